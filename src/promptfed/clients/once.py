"""What travels once: large tensors, named by their content, and who has them."""

from collections.abc import Iterable
from hashlib import sha256

from torch import Tensor

from ..method import split_once
from ..params import Params
from .wire import pack


class Once:
    def __init__(self) -> None:
        self._digests: dict[int, tuple[Tensor, str]] = {}  # by a tensor's id: it is kept, so that the id stays its own
        self._delivered: set[tuple[int, str]] = set()

    def named(self, down: Params) -> dict[str, str]:
        """Of what is sent to a client, the digest of each part that travels once, by its name."""
        return {name: self._digest(name, p) for name, p in split_once(down)[1].items()}

    def has(self, client: int, digest: str) -> bool:
        return (client, digest) in self._delivered

    def delivered(self, client: int, digests: Iterable[str]) -> None:
        self._delivered.update((client, digest) for digest in digests)

    def lost(self, client: int) -> None:
        """The client may have nothing of it any more: it is sent again."""
        self._delivered = {(c, digest) for c, digest in self._delivered if c != client}

    def _digest(self, name: str, p: Tensor) -> str:
        if id(p) not in self._digests:
            self._digests[id(p)] = (p, sha256(pack({name: p})).hexdigest())
        return self._digests[id(p)][1]
