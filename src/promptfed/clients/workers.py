"""Worker processes: hosts that are asked over a pipe, in the very bytes that hosts in this process are asked in.

A worker is a fresh interpreter, so neither a script without a main guard nor
a notebook is run twice, and no state of torch is inherited by a fork. It builds its host from a JSON description and
ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from typing import IO, Any

from ..cli import interrupts
from ..errors import UserError
from .host import Message

_COMMAND = [sys.executable, "-c", "from promptfed.clients.workers import main; main()"]
_SIZE = struct.Struct("<Q")


def write_frame(stream: IO[bytes], note: dict[str, Any], blobs: list[bytes]) -> None:
    head = json.dumps({"note": note, "sizes": [len(blob) for blob in blobs]}).encode()
    stream.write(_SIZE.pack(len(head)))
    stream.write(head)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Message | None:
    """None at the end of the stream."""
    size = stream.read(_SIZE.size)
    if len(size) < _SIZE.size:
        return None
    head = json.loads(stream.read(_SIZE.unpack(size)[0]))
    return head["note"], [stream.read(n) for n in head["sizes"]]


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, description: dict[str, Any]) -> None:
        with interrupts.never():  # Ctrl-C is the parent's to handle
            self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(description, [])

    def __call__(self, note: dict[str, Any], blobs: list[bytes]) -> Message:
        self._send(note, blobs)
        assert self._process.stdout is not None
        answer = read_frame(self._process.stdout)
        if answer is None:
            raise UserError(
                f"engine.workers: a worker process ended with code {self._process.wait()} in the middle of a round "
                "(out of memory?); resume the run, with fewer workers if need be"
            )
        if "user_error" in answer[0]:
            raise UserError(answer[0]["user_error"])
        if "traceback" in answer[0]:
            raise RuntimeError("in a worker process:\n" + answer[0]["traceback"])
        return answer

    def _send(self, note: dict[str, Any], blobs: list[bytes]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: read_frame() will find that out too, and say it
            write_frame(self._process.stdin, note, blobs)

    def close(self) -> None:
        self._process.terminate()  # nothing is lost: what a round has stored, it has stored whole
        self._process.wait()


def main() -> None:
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not land among the frames
    frames = sys.stdin.buffer
    first = read_frame(frames)
    if first is None:
        return
    host = None
    while (request := read_frame(frames)) is not None:
        try:
            if host is None:
                from ..runs.build import host_from  # here, so that an import error reaches the parent as an answer

                sys.path[:] = first[0]["path"]
                host = host_from(first[0])
            begun = time.perf_counter()
            note, blobs = host(*request)
            note["seconds"] = time.perf_counter() - begun
        except UserError as error:
            note, blobs = {"user_error": str(error)}, []
        except Exception:
            note, blobs = {"traceback": traceback.format_exc()}, []
        try:
            write_frame(stream, note, blobs)
        except BrokenPipeError:  # the parent has died
            os._exit(1)  # not by way of closing the stream, which would fail once more
