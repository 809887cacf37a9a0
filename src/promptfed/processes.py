"""Processes that work for another one: how they are started, how they end, and how they use memory."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

_LOOK = 0.5  # seconds between looks at the parent
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """subprocess.Popen of a process that never sees Ctrl-C, from its first instruction on: it is the parent's to
    handle."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent: int | None = None) -> None:
    """Terminates this process once its parent is gone, even if the parent was killed. `parent`: its id, for a process
    that might lose it before this call."""
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def keep_freed_memory() -> None:
    """Has the C library reuse large blocks that were freed, rather than return them to the system: getting them back
    costs a page fault per 4 KB, for a small model as long as its training step. Changes nothing but speed."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if adjust:
        adjust(_MMAP_THRESHOLD, 32 << 20)  # the most that every version accepts
        adjust(_TRIM_THRESHOLD, 1 << 30)
