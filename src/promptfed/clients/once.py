"""Requests and their blobs, and which clients already have the large tensors that are sent only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Generic, TypeVar

from torch import Tensor

from ..method import split_once
from ..params import Params
from .messages import Evaluate, Recipient, Request, Task, Train
from .wire import pack

Blob = TypeVar("Blob")  # bytes, or what an engine carries them in


def _trains(task: Task) -> bool:
    """Only training needs what is sent once."""
    return isinstance(task, Train) or (isinstance(task, Evaluate) and task.after_local)


class Once:
    def __init__(self) -> None:
        self._digests: dict[int, tuple[Tensor, str]] = {}  # by a tensor's id: it is kept, so that the id stays its own
        self._delivered: set[tuple[int, str]] = set()

    def named(self, task: Task, down: Params) -> dict[str, str]:
        """The digest of each tensor of a request that is sent only once, by its name."""
        return {name: self._digest(name, p) for name, p in split_once(down)[1].items()} if _trains(task) else {}

    def has(self, client: int, digest: str) -> bool:
        return (client, digest) in self._delivered

    def delivered(self, client: int, task: Task, down: Params) -> None:
        self._delivered.update((client, digest) for digest in self.named(task, down).values())

    def lost(self, client: int) -> None:
        """The client may have lost all of it: it is sent again."""
        self._delivered = {(c, digest) for c, digest in self._delivered if c != client}

    def _digest(self, name: str, p: Tensor) -> str:
        if id(p) not in self._digests:
            self._digests[id(p)] = (p, sha256(pack({name: p})).hexdigest())
        return self._digests[id(p)][1]


@dataclass(frozen=True)
class Packed(Generic[Blob]):
    request: Request
    blobs: list[Blob]
    received: dict[int, int]  # bytes for each client


class Packing(Generic[Blob]):
    """Makes the requests of one exchange. Of clients that are sent the same object, the blob is packed once."""

    def __init__(self, task: Task, sent: Mapping[int, Params], once: Once, carry: Callable[[bytes], Blob]) -> None:
        self._task, self._sent, self._once, self._carry = task, sent, once, carry
        self._last: tuple[Params, Blob, int] | None = None  # all clients are often sent one object
        self._kept: dict[str, tuple[Blob, int]] = {}  # by digest

    def __call__(self, clients: Sequence[int]) -> Packed[Blob]:
        blobs: list[tuple[Blob, int]] = []  # with their bytes
        index: dict[int | str, int] = {}  # of each, by the id of what is sent or by the digest of what is sent once
        recipients, received = [], {}
        new: dict[str, int] = {}

        def place(key: int | str, make: Callable[[], tuple[Blob, int]]) -> int:
            if key not in index:
                index[key] = len(blobs)
                blobs.append(make())
            return index[key]

        for client in clients:
            down = self._sent[client]
            once = self._once.named(self._task, down)
            missing = {name: digest for name, digest in once.items() if not self._once.has(client, digest)}
            blob = place(id(down), partial(self._always, down))
            large = {
                digest: place(digest, partial(self._large, name, digest, down)) for name, digest in missing.items()
            }
            recipients.append(Recipient(client=client, blob=blob, once=once))
            received[client] = sum(blobs[i][1] for i in (blob, *large.values()))
            new |= large
        request = Request(task=self._task, clients=recipients, new=new)
        return Packed(request, [blob for blob, _ in blobs], received)

    def _always(self, down: Params) -> tuple[Blob, int]:
        last = self._last  # several threads may be here: at worst, something is packed twice
        if last is None or last[0] is not down:
            last = self._last = (down, *self._carried(split_once(down)[0]))
        return last[1:]

    def _large(self, name: str, digest: str, down: Params) -> tuple[Blob, int]:
        if digest not in self._kept:
            self._kept[digest] = self._carried({name: split_once(down)[1][name]})
        return self._kept[digest]

    def _carried(self, params: Params) -> tuple[Blob, int]:
        blob = pack(params)
        return self._carry(blob), len(blob)
