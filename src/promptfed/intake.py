"""The server's intake of a round: updates are checked as they come, then added up at once or held for aggregate().

Without it, a round would need the memory of all its updates. Where a method needs only their mean, each is added in the
order of clients and let go. Otherwise those that exceed a fixed amount of memory are held in a temporary file, mapped
into memory: aggregate() sees the same list of the same numbers.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import IO, Protocol

import torch

from . import Method, Params, State, Update, UserError
from . import params as P
from .data import cache

HELD = 256 << 20  # bytes of updates that are held in memory
_ALIGNED = 64  # as torch aligns its own memory
_MAP = 1 << 40  # an address range, not a size on disk


class Mean(Protocol):
    """As params.Mean: updates are added one by one."""

    def add(self, item: Params, weight: float) -> None: ...

    def value(self) -> Params: ...


class Intake:
    """Of one round. `asked`: the clients that are asked to train, and their numbers of samples. `listed`: updates are
    held although the method needs only their mean. `mean`: what they are added to, if they are."""

    def __init__(
        self,
        method: Method,
        state: State,
        shared: Params,
        asked: Mapping[int, int],
        listed: bool = False,
        mean: Mean | None = None,
    ) -> None:
        self._method, self._state, self._shared, self._asked = method, state, shared, asked
        self._mean = (mean or P.Mean(sum(asked.values()))) if method.streams and not listed else None
        self._next = sorted(asked, reverse=True)  # clients whose turn is still to come, the next one last
        self._waiting: dict[int, Update] = {}  # have come before their turn
        self._spool = Spool()

    def take(self, update: Update) -> Update:
        """What is kept of an update: it has an error if it must not be used, and no tensors if they are not needed."""
        why = fault(update, self._method.uploads(self._shared, update.client), self._asked.get(update.client, 0))
        why = why or self._method.unusable(self._state, update)
        kept = replace(update, up={}, stats={}, error=why)
        if self._mean is None:
            return kept if why else self._spool.hold(update)
        usable = kept if why else update
        its_turn = bool(self._next) and self._next[-1] == update.client
        self._waiting[update.client] = usable if its_turn else self._spool.hold(usable)
        while self._next and self._next[-1] in self._waiting:
            self._add(self._next.pop())
        return kept

    def aggregate(self, used: list[Update]) -> State:
        """The server's new state, by the updates that are used, in the order of clients."""
        if self._mean is None:
            return self._method.aggregate(self._state, used)
        for client in reversed(self._next):  # some of those before them did not answer
            if client in self._waiting:
                self._add(client)
        return self._method.merge(self._state, self._mean.value())

    def _add(self, client: int) -> None:
        update = self._waiting.pop(client)
        self._spool.release(client)
        if not update.error:
            assert self._mean is not None
            self._mean.add(update.up, update.n)


class Spool:
    """Holds updates: up to a number of bytes in memory, others in a temporary file of the cache folder."""

    def __init__(self, memory: int = HELD) -> None:
        self._left = memory
        self._sizes: dict[int, int] = {}  # of updates in memory, by client
        self._file: IO[bytes] | None = None

    def hold(self, update: Update) -> Update:
        size = P.nbytes(update.up) + P.nbytes(update.stats)
        if size <= self._left:
            self._left -= size
            self._sizes[update.client] = size
            return update
        return replace(update, up=self._mapped(update.up), stats=self._mapped(update.stats))

    def release(self, client: int) -> None:
        """The client's update is not needed any more."""
        self._left += self._sizes.pop(client, 0)

    def _mapped(self, params: Params) -> Params:
        return {name: self._written(p) for name, p in params.items()}

    def _written(self, p: torch.Tensor) -> torch.Tensor:
        if not p.numel():
            return p
        folder = cache.root()
        try:
            if self._file is None:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it ends with the last tensor in it
                self._file.truncate(_MAP)
                self._map = mmap.mmap(self._file.fileno(), _MAP)
            start = self._file.seek(-(-self._file.tell() // _ALIGNED) * _ALIGNED)
            self._file.write(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f'PROMPTFED_CACHE: the updates of a round cannot be held in "{folder}" ({error.strerror}); '
                "make room and resume the run"
            ) from None
        return torch.frombuffer(self._map, dtype=p.dtype, count=p.numel(), offset=start).reshape(p.shape)


def fault(update: Update, expected: Params, n: int) -> str:
    """Why an update must not be used, whose parameters should have these names and shapes, and whose client was
    introduced with n samples; empty if it may."""
    if update.error:
        return update.error
    if {name: p.shape for name, p in update.up.items()} != {name: p.shape for name, p in expected.items()}:
        return "names or shapes differ from the shared parameters"
    if update.n < 1:
        return "no samples"
    told = [update.loss * update.n if update.loss is not None else 0.0, *update.moved.values()]
    if not all(map(math.isfinite, told)) or not P.finite({**update.up, **update.stats}):
        return "non-finite update"
    if update.n != n:  # it would choose its own weight
        return f"it says it has {update.n} training samples, and was introduced with {n}"
    return ""
