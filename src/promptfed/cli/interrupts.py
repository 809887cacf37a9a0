"""Ctrl-C: at once while nothing is begun, never in a worker, and otherwise as Python has it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CODE = 130  # what a shell expects of a command that was interrupted


@contextmanager
def at_once() -> Iterator[None]:
    """For imports, which take seconds: an exception in the middle of one comes out as tracebacks of all kinds."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(CODE))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def never() -> Iterator[None]:
    """For starting processes: they never see it, from their first instruction on. Here it waits until this ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
