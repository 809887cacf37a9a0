"""Clients on Flower's nodes: the same requests and answers as on this machine, over a Grid."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

from ..clients import messages as M
from ..clients.base import MessageClients, Reply
from ..errors import UserError
from ..params import Params
from . import wire
from ._flwr import ErrorCode, Grid, Message, RecordDict, log
from .app import differing


@dataclass(frozen=True)
class Expected:
    """What every node must agree with, and what its answers are checked against."""

    clients: int  # they are 0 to clients - 1
    classes: int
    shared: Params  # names and types of what goes up
    fingerprint: dict[str, str]
    domains: int = 0  # columns of a table of groups; 0: there are none
    nodes: Mapping[int, int] | None = None  # which client each node is; None: nodes say so themselves


_Result = tuple[Any, Params, int]  # what a node answered, its tensors and the bytes of those


class FlowerClients(MessageClients):
    """Asks nodes over a Grid. Those that do not answer in time, or answer with an error, are left out.

    `timeout`: seconds an answer may take; None: unlimited.
    `poll`: seconds between looks for answers.
    `window`: requests under way at once; None: all. Messages exist only for these.
    `patience`: seconds in which all nodes must be there at the start.
    `enough`: nodes that will do after that, for a run that is resumed; None: all.
    `sizes`: clients' training samples as known before, for such a run: missing clients are asked all the same.
    `strict`: whether it is an error if all that were asked fail: in a simulation the fault is then in the method.
    `alive`: called while waiting; raises if waiting has become pointless.
    `stop`: called by close().
    `sign`: signs a message before it is sent; None: on one machine, nothing is signed.
    """

    def __init__(
        self,
        grid: Grid,
        expected: Expected,
        *,
        timeout: float | None = None,
        poll: float = 1.0,
        window: int | None = None,
        patience: float = 120.0,
        enough: int | None = None,
        sizes: Mapping[int, int] | None = None,
        strict: bool = False,
        alive: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
        sign: Callable[[Message], None] | None = None,
        limits: wire.Limits = wire.LIMITS,
    ) -> None:
        super().__init__({client: (sizes or {}).get(client, 0) for client in range(expected.clients)})
        self._grid, self._expected, self._limits = grid, expected, limits
        self._timeout, self._poll, self._window, self._strict = timeout, poll, window, strict
        self._alive, self._stop, self._sign = alive, stop, sign
        self._nodes: dict[int, int] = {}  # client -> node
        self._quiet: dict[int, float] = {}  # nodes that did not say who they are, and when they are asked again
        self._refused: set[int] = set()  # nodes that will never fit
        self._patience, self._enough = patience, enough
        self._meet()

    def close(self) -> None:
        self._stop()

    # ---- who is there

    def _meet(self) -> None:
        """Waits for all nodes, and learns which client each of them is. Nodes that do not answer are asked again until
        the patience is over: Flower's list of nodes lags behind when one is killed or comes back."""
        count, patience = self._expected.clients, self._patience
        until, waited = time.monotonic() + patience, list[int]()
        while True:
            there = self._there()
            silent = self._take_in(there - set(self._nodes.values()) - self._refused, until - time.monotonic())
            absent = [client for client in self._sizes if client not in self._nodes]
            if not absent or time.monotonic() >= until:
                break
            if absent != waited:
                log(INFO, "waiting for client %s, for %g s at most", ", ".join(map(str, absent)), patience)
                waited = absent
            self._alive()
            time.sleep(min(self._poll, 0.1))
        self._complain(silent, error=self._enough is None)
        if len(self._nodes) < (count if self._enough is None else self._enough):
            raise UserError(
                f'engine.name = "flower": {len(there)} of {count} nodes are connected after {patience:g} s; '
                f"no node is client {', '.join(map(str, absent))}"
            )

    def _complain(self, why: Mapping[int, str], error: bool) -> None:
        """Raises or warns about nodes that cannot take part."""
        known = self._expected.nodes or {}
        called = {node: f"client {known[node]} (node {node})" if node in known else f"node {node}" for node in why}
        told = [f"{called[node]} cannot take part: {said}" for node, said in why.items()]
        if told and error:
            raise UserError("; ".join(told))
        for one in told:
            warnings.warn(one, stacklevel=4)

    def _take_in(self, nodes: set[int], seconds: float) -> dict[int, str]:
        """-> nodes that did not answer, and why. At the start of a run a node that cannot take part is an error."""
        silent, refused = {}, {}
        for node, found in self._identify(sorted(nodes), max(seconds, 0.0)).items():
            if isinstance(found, str) and found.startswith(_NO_ANSWER):
                silent[node] = found
                continue
            why = found if isinstance(found, str) else self._unwelcome(node, found)
            if why:
                refused[node] = why
        self._complain(refused, error=self._enough is None)
        self._refused |= set(refused)
        return silent

    def _present(self) -> dict[int, int]:
        """Connected clients and their nodes. A client that came back under another node number is recognised."""
        there = self._there()
        unknown = there - set(self._nodes.values()) - self._refused
        quiet = {node for node, until in self._quiet.items() if until > time.monotonic()}
        for node, found in self._identify(sorted(unknown - quiet), _SHORT).items():
            if isinstance(found, str):
                if found != _SILENT[ErrorCode.NODE_UNAVAILABLE]:  # known without waiting
                    self._quiet[node] = time.monotonic() + _SHORT  # it is asked again then
                continue
            why = self._unwelcome(node, found)
            if why:
                self._complain({node: why}, error=False)
                # A client is taken over only when its earlier node is gone, which may still happen.
                if found.client not in self._nodes:
                    self._refused.add(node)
        return {client: node for client, node in self._nodes.items() if node in there}

    def _there(self) -> set[int]:
        """Connected nodes; where sites were admitted, only theirs."""
        there = set(self._grid.get_node_ids())
        return there if self._expected.nodes is None else there & set(self._expected.nodes)

    def _unwelcome(self, node: int, found: wire.IdentifyResult) -> str:
        """Accepts a node, or says why not."""
        expected, client = self._expected, found.client
        if expected.nodes is not None and expected.nodes.get(node) != client:
            place = expected.nodes.get(node, "none")
            return f"it says it is client {client}, and was admitted as client {place}"
        if client not in self._sizes:
            return f"it says it is client {client}, and there are clients 0 to {expected.clients - 1}"
        if self._nodes.get(client) in self._there():
            return f"it says it is client {client}, as does node {self._nodes[client]}"
        other = differing(expected.fingerprint, found.fingerprint)
        if other:
            return f"client {client} has {other} than the server"
        if client in self._nodes and found.n != self._sizes[client]:  # its weight in the run
            return f"client {client} has {found.n} training samples, and was introduced with {self._sizes[client]}"
        self._nodes[client], self._sizes[client] = node, found.n
        self._once.lost(client)
        return ""

    def _identify(self, nodes: Sequence[int], most: float = math.inf) -> dict[int, wire.IdentifyResult | str]:
        """-> what each node says about itself, or what is wrong with it"""
        found: dict[int, wire.IdentifyResult | str] = dict.fromkeys(nodes, _NO_ANSWER)
        timeout = min(self._patience, self._timeout or self._patience, most)
        hello = wire.write_request(wire.Identify(), fingerprint=self._expected.fingerprint)
        for node, reply in self._deliver(wire.Identify(), nodes, lambda node: (node, hello), timeout):
            found[node] = reply if isinstance(reply, str) else reply[0]
        return found

    # ---- messages

    def exchange(self, task: M.Task, sent: Mapping[int, Params], order: Sequence[int]) -> Iterator[Reply]:
        nodes = self._present()
        packing = M.Packing(task, sent, self._once, wire.array)
        begun: dict[int, float] = {}
        received: dict[int, int] = {}
        errors: list[str] = []

        def letter(client: int) -> tuple[int, RecordDict]:
            begun[client] = time.monotonic()
            self._notify(task, [client], len(sent))
            request, blobs, size = packing([client])
            received.update(size)
            # With a fingerprint: a node may have come back with another model under the same number.
            content = wire.write_request(request, blobs, self._expected.fingerprint)
            return nodes[client], content

        def answered(client: int, error: str) -> None:
            self._notify(task, [client], len(sent), time.monotonic() - begun.pop(client), [error])

        for client, found in self._deliver(task, [c for c in order if c in nodes], letter, self._timeout):
            why = found if isinstance(found, str) else self._unfit(client, *found[:2])
            if isinstance(found, str) or why:
                errors.append(why)
                answered(client, why)
                yield Reply(client, error=why)
            else:
                result, tensors, size = found
                answered(client, getattr(result, "error", ""))
                yield Reply(client, result, tensors, received[client], size)
        for client in list(begun):
            answered(client, _NO_ANSWER)
        for client in (client for client in order if client not in nodes):
            self._notify(task, [client], len(sent), 0.0, [_ABSENT])
        if self._strict and errors and len(errors) == len(sent):
            raise UserError(f'engine.name = "flower": every client failed; the first with: {errors[0]}')

    def _deliver(
        self,
        task: M.Task | wire.Identify,
        clients: Sequence[int],
        letter: Callable[[int], tuple[int, RecordDict]],
        timeout: float | None,
    ) -> Iterator[tuple[int, _Result | str]]:
        """Sends each client its letter (node and content), and yields answers as they come, or why there is none."""
        queue = list(reversed(clients))
        waiting: dict[str, tuple[int, float]] = {}  # client and deadline, by message
        group = _round(task)
        while queue or waiting:
            while queue and (self._window is None or len(waiting) < self._window):
                client = queue.pop()
                node, content = letter(client)
                # ttl: no node works on a message that has timed out here, nor is its answer kept.
                message = Message(content, node, wire.TYPES[task.ask], ttl=timeout, group_id=group)
                if self._sign:
                    self._sign(message)
                ids = [i for i in self._grid.push_messages([message]) if i]
                if ids:
                    waiting[ids[0]] = client, math.inf if timeout is None else time.monotonic() + timeout
                else:
                    yield client, "its node takes no messages"
            self._alive()
            replies, unreadable = self._pull(list(waiting))
            for name in unreadable:
                yield waiting.pop(name)[0], "an answer that cannot be read"
            for message in replies:
                known = waiting.pop(message.metadata.reply_to_message_id, None)
                if known is not None:
                    yield known[0], self._read(message, task)
            now = time.monotonic()
            waiting = {name: (client, deadline) for name, (client, deadline) in waiting.items() if deadline > now}
            if waiting and not replies:
                time.sleep(self._poll)

    def _pull(self, names: Sequence[str]) -> tuple[list[Message], list[str]]:
        """Answers so far; and the messages whose answer Flower cannot decode."""
        if not names:
            return [], []
        try:
            return list(self._grid.pull_messages(list(names))), []
        except _UNREADABLE:
            if len(names) == 1:
                return [], list(names)
        each = [self._pull([name]) for name in names]
        return [message for found, _ in each for message in found], [name for _, bad in each for name in bad]

    def _read(self, message: Message, task: M.Task | wire.Identify) -> _Result | str:
        """An answer, or why there is none. Nothing in it can raise."""
        if message.has_error():
            code, reason = message.error.code, message.error.reason or "error"
            return _SILENT.get(code) or wire.printable(f"{reason} (code {code})", 500)
        try:
            answered, blobs = wire.read_answer(message.content, task, self._limits)
            tensors = wire.tensors(blobs[0], self._limits) if blobs else {}
        except wire.Malformed as error:
            return str(error)
        if answered.error:
            return wire.printable(answered.error, 500)
        if isinstance(answered.result, M.TrainResult):
            answered.result.error = wire.printable(answered.result.error, 500)
        return answered.result, tensors, sum(map(len, blobs))

    def _unfit(self, client: int, result: M.Result, tensors: Params) -> str:
        """Why a result cannot be used here; empty if it can."""
        if result.client != client:
            return f"it answers for client {result.client}"
        scores, groups = None, None
        if isinstance(result, M.TrainResult):
            scores, up = result.after_local, M.split_update(tensors)[0]
            if any(up[name].dtype != p.dtype for name, p in self._expected.shared.items() if name in up):
                return "other types than the shared parameters"
        elif isinstance(result, M.EvaluateResult):
            scores, groups = result.scores, result.groups
        for split in (scores.val, scores.test, scores.pooled) if scores else ():
            if split and {len(split.tp), len(split.fp), len(split.fn)} != {self._expected.classes}:
                return "scores of another number of classes"
        if any(len(row) != self._expected.domains for row in groups or []):
            return "groups over another number of domains"
        return ""


_NO_ANSWER = "no answer"
_ABSENT = f"{_NO_ANSWER}: its node is not connected"
_SHORT = 60.0  # seconds in which a node that connects in the middle of a run must say which client it is
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)  # what Flower raises for malformed objects
# What Flower answers for nodes that do not answer, in the words of a record.
_SILENT = {
    ErrorCode.MESSAGE_UNAVAILABLE: f"{_NO_ANSWER} in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: f"{_NO_ANSWER} in time",
    ErrorCode.NODE_UNAVAILABLE: f"{_NO_ANSWER}: its node is gone",
}


def _round(task: M.Task | wire.Identify) -> str:
    """The round that a task is part of, for a node's log."""
    if isinstance(task, M.Enroll | wire.Identify):
        return ""
    return str(task.as_of - 1 if isinstance(task, M.Evaluate) else task.round)
