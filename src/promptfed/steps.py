"""Long work beside the rounds, such as decoding images: how far it is, for whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

_Block = TypeVar("_Block", bound=Sized)


@dataclass(eq=False)
class Step:
    """Work on a known number of images."""

    what: str
    total: int
    count: Callable[[], int]  # how many are done; called from any thread
    over: bool = False  # also where it failed
    begun: float = field(default_factory=time.monotonic)

    @property
    def active(self) -> bool:
        return not self.over and self.count() < self.total

    def left(self) -> float | None:
        """Seconds until its end, as fast as so far; None before anything is done."""
        done = self.count()
        return (time.monotonic() - self.begun) * (self.total - done) / done if done else None


Listener = Callable[[Step], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has `listener` told of each step that begins, and again when it is over."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def heard() -> bool:
    """Whether anybody listens."""
    return _listener.get() is not None


def tell(step: Step) -> None:
    listener = _listener.get()
    if listener:
        listener(step)


def counted(what: str, total: int, blocks: Iterable[_Block]) -> Iterator[_Block]:
    """Hands blocks of images on, as a step."""
    done = 0
    step = Step(what, total, lambda: done)
    tell(step)
    try:
        for block in blocks:
            done += len(block)
            yield block
    finally:
        step.over = True
        tell(step)
