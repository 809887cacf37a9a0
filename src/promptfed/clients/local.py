"""Clients on this machine: in this process, or spread over worker processes that receive the same bytes by a pipe.

A worker is a fresh interpreter, so neither a script without a main guard nor a notebook is run twice, and no state of
torch is inherited by a fork. It builds its host from a JSON description and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from queue import SimpleQueue
from threading import Event
from typing import IO, Any

from .. import params as P
from .. import processes
from ..errors import UserError
from ..params import Params
from .base import MANY, MessageClients, Reply
from .blocks import MOST
from .host import Host
from .messages import RESULTS, Answer, Ask, Evaluate, Packing, Request, Task, Train, TrainResult
from .wire import unpack

_SMALL = 8 << 20  # bytes of a model of which a process may hold several copies
_ANSWERS = 256 << 20  # bytes of updates that a request may be answered with, where it need not have so many clients
_MOST = 64  # clients in a request
_LOOK = 1.0  # seconds between looks whether all has ended


class LocalClients(MessageClients):
    """Spreads what is asked over one or several hosts. Which one answers, and in which order, changes nothing.
    `block`: clients that a host trains as one; 0: the host chooses. `unions`: of scoring.unions()."""

    def __init__(self, sizes: dict[int, int], hosts: Sequence[Ask], block: int = 1, unions: bool = False) -> None:
        super().__init__(sizes)
        self._unions = unions
        self._block, self._all = block, list(hosts)
        self._hosts: SimpleQueue[Ask] = SimpleQueue()
        for host in hosts:
            self._hosts.put(host)
        # Twice as many threads as hosts: requests are packed and answers read while the hosts are at work.
        self._threads = ThreadPoolExecutor(2 * len(hosts)) if len(hosts) > 1 else None
        self._closed = False

    def exchange(self, task: Task, sent: Mapping[int, Params], order: Sequence[int]) -> Iterator[Reply]:
        if self._unions and isinstance(task, Evaluate) and not task.after_local and len(order) > MANY:
            # Groups by the number of clients alone: losses must not depend on the number of hosts.
            task, size = task.model_copy(update={"together": True}), max(32, min(_MOST, len(order) // 64))
        else:
            size = self._clients_per_request(task, sent, order)
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        packing = Packing(task, sent, self._once, bytes)
        turns = [Event() for _ in groups]  # to get a host: large clients are first

        def ask(number: int) -> list[Reply]:
            group = groups[number]
            try:
                request, blobs, received = packing(group)  # here, so that messages exist only for clients under way
                # The one before may have been cancelled, which happens when this ends.
                while number and not turns[number - 1].wait(_LOOK) and not self._closed:
                    pass
                host = self._hosts.get()
            finally:
                turns[number].set()
            self._notify(task, group, len(order))
            try:
                answer = host(request, blobs)
            finally:
                self._hosts.put(host)
            errors = [one.error if isinstance(one, TrainResult) else "" for one in answer.results]
            self._notify(task, group, len(order), answer.seconds, errors)
            return [
                Reply(client, result, unpack(blob)[0], received[client], len(blob))
                for client, result, blob in zip(group, answer.results, answer.blobs or [b""] * len(group), strict=True)
            ]

        each = range(len(groups))
        return chain.from_iterable(self._threads.map(ask, each) if self._threads else map(ask, each))

    def _clients_per_request(self, task: Task, sent: Mapping[int, Params], order: Sequence[int]) -> int:
        """Few requests, but enough of them to keep all hosts busy: fewer where an answer is little work and small."""
        most = _MOST
        if isinstance(task, Train):
            most = 8 if order and P.nbytes(sent[order[0]]) <= _SMALL else 1
        block = self._block
        if not block:  # by memory, of which the host knows: as many as it can use and whose answers are not too large
            block = max(1, min(MOST, _ANSWERS // max(P.nbytes(sent[order[0]]), 1))) if order else 1
        return max(block, min(most, -(-len(order) // (8 * len(self._all)))))

    def close(self) -> None:
        self._closed = True
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for host in self._all:  # also those that are at work
            stop = getattr(host, "close", None)
            if stop:
                stop()


# ---- worker processes

_COMMAND = [sys.executable, "-c", "from promptfed.clients.local import main; main()"]
_SIZE = struct.Struct("<Q")


def write_frame(stream: IO[bytes], *parts: bytes) -> None:
    stream.write(_SIZE.pack(len(parts)))
    for part in parts:
        stream.write(_SIZE.pack(len(part)))
        stream.write(part)
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[bytes]:
    """Its parts; none at the end of the stream, also if it ends within a frame."""

    def exactly(size: int) -> bytes:
        found = stream.read(size)
        if len(found) < size:
            raise EOFError
        return found

    def number() -> int:
        return int(_SIZE.unpack(exactly(_SIZE.size))[0])

    try:
        return [exactly(number()) for _ in range(number())]
    except EOFError:
        return []


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._process = processes.start(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(json.dumps(description).encode())

    def __call__(self, request: Request, blobs: list[bytes]) -> Answer:
        self._send(request.model_dump_json().encode(), *blobs)
        assert self._process.stdout is not None
        answer = read_frame(self._process.stdout)
        if not answer:
            raise UserError(
                f"engine.workers: a worker process ended with code {self._process.wait()} in the middle of a round "
                "(out of memory?); resume the run, with fewer workers if need be"
            )
        outcome, text, *rest = answer
        if outcome == b"user error":
            raise UserError(text.decode())
        if outcome == b"traceback":
            raise RuntimeError("in a worker process:\n" + text.decode())
        return Answer(RESULTS.validate_json(text), rest, float(outcome))

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: read_frame() will find that out too, and say it
            write_frame(self._process.stdin, *parts)

    def close(self) -> None:
        self._process.terminate()  # nothing is lost: what a round has stored, it has stored whole
        self._process.wait()


def main() -> None:
    processes.end_with_parent()
    processes.keep_freed_memory()
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not land among the frames
    frames = sys.stdin.buffer
    first = read_frame(frames)
    if not first:
        return
    host: Host | None = None
    while asked := read_frame(frames):
        try:
            if host is None:
                from ..runs.build import host_from  # here, so that an import error reaches the parent as an answer

                description = json.loads(first[0])
                sys.path[:] = description["path"]
                host = host_from(description)
            request = Request.model_validate_json(asked[0])
            answer = host(request, asked[1:])
            # An answer begins with the seconds it took, or says what it is instead.
            said = [
                str(answer.seconds).encode(),
                RESULTS.dump_json(list(answer.results), exclude_none=True),
                *answer.blobs,
            ]
        except UserError as error:
            said = [b"user error", str(error).encode()]
        except Exception:
            said = [b"traceback", traceback.format_exc().encode()]
        try:
            write_frame(stream, *said)
        except BrokenPipeError:  # the parent has died
            os._exit(1)  # not by way of closing the stream, which would fail once more
