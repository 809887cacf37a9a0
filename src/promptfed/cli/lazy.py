"""Modules that are imported when they are first asked for: torch alone takes seconds, in which Ctrl-C may come."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

INTERRUPTED = 130  # the exit code that a shell expects of a command that was interrupted


@contextmanager
def at_once() -> Iterator[None]:
    """For imports, which take seconds: an exception in the middle of one comes out as tracebacks of all kinds."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, of name -> module or module:name, relative to the package."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, its = places[name].partition(":")
        found = getattr(import_module(module, package), its or name)
        setattr(sys.modules[package], name, found)
        return found

    return find


class Module:
    """A module of promptfed, for the command line: not every command needs it."""

    def __init__(self, name: str) -> None:
        self._name = f"promptfed.{name}"

    def __getattr__(self, name: str) -> Any:
        with at_once():
            module = import_module(self._name)
        return getattr(module, name)
