"""Files that several processes share: written in one step, and locked."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: there is no room for what is written
_EDGE = 4096  # bytes at the beginning and end of a file where a mark is looked for


def write(path: Path, content: bytes, *, private: bool = False, new: bool = False) -> None:
    """Writes a file in one step: readers see all of it or what was there before. `private`: readable by its owner
    only. `new`: FileExistsError if there is one already."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")  # unique, so that two writers never share it
    mode = 0o600 if private else 0o666
    if new:
        path.touch(mode, exist_ok=False)
    try:
        part.touch(mode, exist_ok=False)
        with part.open("wb") as file:
            _flush(file, content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        if new:
            path.unlink(missing_ok=True)
        raise


def append(path: Path, text: str) -> None:
    """Appends to a file; the text is on disk when this returns."""
    with path.open("ab") as file:
        _flush(file, text.encode())


def refuse_foreign(path: Path, mark: bytes, setting: str) -> None:
    """UserError where a file is already there and does not bear our mark, at its beginning or end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        begins = file.read(_EDGE)
        file.seek(max(0, path.stat().st_size - _EDGE))
        if mark in begins or mark in file.read():
            return
    raise UserError(f'{setting} = "{path}" exists and was not written by promptfed; choose another name')


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(path: Path, *, shared: bool = False, seconds: float | None = None) -> Iterator[IO[str]]:
    """Holds a lock file, alone or with other readers (`shared`, of a file that must exist). Raises Locked if another
    process holds it for so many seconds; None waits for ever."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until = None if seconds is None else time.monotonic() + seconds
    with path.open("r" if shared else "a+") as file:
        while True:
            try:
                fcntl.flock(file, kind if until is None else kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if until is None or time.monotonic() >= until:
                    raise Locked(str(path)) from None
                time.sleep(0.02)
        yield file


def _flush(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
