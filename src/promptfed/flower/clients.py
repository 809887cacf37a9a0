"""Clients on Flower's nodes: the same requests and answers as on this machine, over a Grid."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..clients.base import Clients, Notice, Tell
from ..clients.host import parse_score
from ..clients.once import Once
from ..clients.wire import pack
from ..errors import UserError
from ..method import split_once
from ..params import Params
from ..phases import Update
from ..scoring import Score, Scores
from . import wire as wire  # first: it tells Flower to keep quiet
from .app import differing

# isort: split
from flwr.app import Array, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid


@dataclass(frozen=True)
class Expected:
    """What every node must agree with, and what its answers are held against."""

    clients: int  # they are 0 to clients - 1
    classes: int
    shared: Params  # names and types of what goes up
    fingerprint: dict[str, str]
    domains: int = 0  # columns of a table of groups; 0: there are none
    nodes: Mapping[int, int] | None = None  # which client each node is; none: nodes say so themselves


@dataclass(frozen=True)
class _Under:
    """A request under way."""

    client: int
    deadline: float
    received: int  # bytes
    digests: tuple[str, ...]  # of what it is sent once, with this or before


_Reply = tuple[dict[str, Any], list[Params], list[int], int] | str  # note, tensors, bytes of them, received; or why not


class FlowerClients(Clients):
    """Asks nodes over a Grid. Whoever does not answer in time is left out; whoever answers with an error, too, and why.

    `timeout`: seconds an answer may take; none: for ever.
    `poll`: seconds between looks for answers.
    `window`: requests under way at once; none: all. Messages exist only for these.
    `patience`: seconds in which all nodes must be there at the start.
    `enough`: nodes that will do after that, for a run that has begun; none: all.
    `sizes`: clients' training samples as they were known before, for such a run: who is missing is asked all the same.
    `strict`: whether it is an error if all that were asked fail: in a simulation the fault is then in the method.
    `alive`: called while waiting; raises if waiting has become pointless.
    `missing`: called with the clients that are waited for at the start, when these have changed.
    `stop`: called by close().
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
        missing: Callable[[list[int]], None] = lambda clients: None,
        stop: Callable[[], None] = lambda: None,
        limits: wire.Limits = wire.LIMITS,
    ) -> None:
        self._grid, self._expected, self._limits = grid, expected, limits
        self._timeout, self._poll, self._window, self._strict = timeout, poll, window, strict
        self._alive, self._missing, self._stop = alive, missing, stop
        self._nodes: dict[int, int] = {}  # client -> node
        self._sizes = {client: (sizes or {}).get(client, 0) for client in range(expected.clients)}
        self._once = Once()
        self._quiet: dict[int, float] = {}  # nodes that did not say who they are, and when they are asked again
        self._refused: set[int] = set()  # nodes that will not fit later either
        self._patience, self._enough = patience, enough
        self._tell: Tell = lambda notice: None
        self._meet()

    def watch(self, tell: Tell) -> None:
        self._tell = tell

    def ids(self) -> list[int]:
        return list(self._sizes)

    def sizes(self) -> dict[int, int]:
        return self._sizes

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        found: dict[int, Params] = {}
        for client, reply in self._ask({client: {} for client in clients}, {"ask": "enroll"}):
            if isinstance(reply, str):
                raise UserError(f"client {client} cannot be enrolled: {reply}")
            found[client] = reply[1][0]
        for client in clients:
            if client not in found:
                raise UserError(f"client {client} cannot be enrolled: no answer; resume the run when its node is there")
        return {client: found[client] for client in clients}

    def train(self, sent: Mapping[int, Params], round: int, score: bool) -> tuple[list[Update], list[Scores]]:
        updates, scores, failed = [], [], []
        for client, reply in self._ask(sent, {"ask": "train", "round": round, "score": score}):
            if isinstance(reply, str):
                failed.append(reply)
                updates.append(Update(client, sent[client], {}, 0, error=reply))
                continue
            note, (tensors,), (size,), received = reply
            one = note["clients"][0]
            up = {name.removeprefix("up/"): v for name, v in tensors.items() if name.startswith("up/")}
            stats = {name.removeprefix("stats/"): v for name, v in tensors.items() if name.startswith("stats/")}
            error = _line(one.get("error", ""))
            if not error and any(up[name].dtype != p.dtype for name, p in self._expected.shared.items() if name in up):
                error = "other types than the shared parameters"
            if "after_local" in one:
                scores.append(self._scores(client, one["after_local"], one["passes"]))
            updates.append(
                Update(
                    client=client,
                    sent=sent[client],
                    up=up,
                    n=one["n"],
                    stats=stats,
                    loss=one.get("loss"),
                    passes=one["passes"],
                    bytes_down=received,
                    bytes_up=size,
                    error=error,
                    moved=one.get("moved", {}),
                )
            )
        self._all_failed(failed, sent)
        return sorted(updates, key=lambda u: u.client), sorted(scores, key=lambda s: s.client)

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        answers = self._ask(sent, {"ask": "second", "round": round})
        return {client: reply[3] for client, reply in answers if not isinstance(reply, str)}

    def evaluate(self, sent: Mapping[int, Params], round: int, pooled: bool, after_local: bool) -> list[Scores]:
        # What was learnt in this round counts: the clients stand as they will at the start of the next one.
        note = {"ask": "evaluate", "round": round + 1, "pooled": pooled, "after_local": after_local}
        found, failed = [], []
        for client, reply in self._ask(sent, note):
            if isinstance(reply, str):
                failed.append(reply)
            else:
                one = reply[0]["clients"][0]
                found.append(self._scores(client, one, one["passes"]))
        self._all_failed(failed, sent)
        return sorted(found, key=lambda s: s.client)

    def close(self) -> None:
        self._stop()

    def _all_failed(self, failed: Sequence[str], sent: Mapping[int, Params]) -> None:
        if self._strict and failed and len(failed) == len(sent):
            raise UserError(f'engine.name = "flower": every client failed; the first with: {failed[0]}')

    # ---- who is there

    def _meet(self) -> None:
        """Waits for all nodes, and learns which client each of them is. Whoever does not answer is asked again until
        the patience is over: Flower takes a node for gone that was killed a moment ago, and for there that is gone."""
        count, patience = self._expected.clients, self._patience
        until, waited = time.monotonic() + patience, list[int]()
        while True:
            there = self._there()
            silent = self._take_in(there - set(self._nodes.values()) - self._refused, until - time.monotonic())
            absent = [client for client in self._sizes if client not in self._nodes]
            if not absent or time.monotonic() >= until:
                break
            if absent != waited:
                self._missing(absent)
                waited = absent
            self._alive()
            time.sleep(min(self._poll, 0.1))
        self._missing([])
        self._complain(silent, error=self._enough is None)
        if len(self._nodes) < (count if self._enough is None else self._enough):
            raise UserError(
                f'engine.name = "flower": {len(there)} of {count} nodes are there after {patience:g} s; '
                f"no node is client {', '.join(map(str, absent))}"
            )

    def _complain(self, why: Mapping[int, str], error: bool) -> None:
        """Of nodes that cannot take part."""
        known = self._expected.nodes or {}
        called = {node: f"client {known[node]} (node {node})" if node in known else f"node {node}" for node in why}
        told = [f"{called[node]} cannot take part: {said}" for node, said in why.items()]
        if told and error:
            raise UserError("; ".join(told))
        for one in told:
            warnings.warn(one, stacklevel=4)

    def _take_in(self, nodes: set[int], seconds: float) -> dict[int, str]:
        """-> the nodes that did not answer. At the start of a run one that cannot take part is an error."""
        silent, refused = {}, {}
        for node, found in self._identify(sorted(nodes), max(seconds, 0.0)).items():
            if isinstance(found, str) and found.startswith(_NO_ANSWER):
                silent[node] = found
                continue
            why = found if isinstance(found, str) else self._unwelcome(*found)
            if why:
                refused[node] = why
        self._complain(refused, error=self._enough is None)
        self._refused |= set(refused)
        return silent

    def _present(self) -> dict[int, int]:
        """The clients whose nodes are there. One that has come back under another number is known again."""
        there = self._there()
        unknown = there - set(self._nodes.values()) - self._refused
        quiet = {node for node, until in self._quiet.items() if until > time.monotonic()}
        for node, found in self._identify(sorted(unknown - quiet), _SHORT).items():
            if isinstance(found, str):
                if found != _SILENT[ErrorCode.NODE_UNAVAILABLE]:  # which is known at once
                    self._quiet[node] = time.monotonic() + _SHORT  # it is asked again then
                continue
            why = self._unwelcome(*found)
            if why:
                self._complain({node: why}, error=False)
                # A place is given away only when the node that had it is gone, which may yet be.
                if found[0] not in self._nodes:
                    self._refused.add(node)
        return {client: node for client, node in self._nodes.items() if node in there}

    def _there(self) -> set[int]:
        """The nodes that are there; where sites were admitted, of these alone."""
        there = set(self._grid.get_node_ids())
        return there if self._expected.nodes is None else there & set(self._expected.nodes)

    def _unwelcome(self, client: int, n: int, fingerprint: dict[str, str], node: int) -> str:
        """Takes a node in, or says why not."""
        expected = self._expected
        if expected.nodes is not None and expected.nodes.get(node) != client:
            place = expected.nodes.get(node, "none")
            return f"it says it is client {client}, and was admitted as client {place}"
        if client not in self._sizes:
            return f"it says it is client {client}, and there are clients 0 to {expected.clients - 1}"
        if self._nodes.get(client) in self._there():
            return f"it says it is client {client}, as does node {self._nodes[client]}"
        other = differing(expected.fingerprint, fingerprint)
        if other:
            return f"client {client} has {other} than the server"
        self._nodes[client], self._sizes[client] = node, n
        self._once.lost(client)
        return ""

    def _identify(
        self, nodes: Sequence[int], most: float = math.inf
    ) -> dict[int, tuple[int, int, dict[str, str], int] | str]:
        """-> of each node: client, samples, fingerprint and the node again; or what is wrong."""
        found: dict[int, tuple[int, int, dict[str, str], int] | str] = dict.fromkeys(nodes, _NO_ANSWER)
        timeout = min(self._patience, self._timeout or self._patience, most)
        hello = wire.write({"ask": "identify", "fingerprint": self._expected.fingerprint}, [])
        for node, reply in self._exchange("identify", nodes, lambda node: (node, hello, 0, ()), timeout):
            if isinstance(reply, str):
                found[node] = reply
            else:
                found[node] = (reply[0]["client"], reply[0]["n"], reply[0]["fingerprint"], node)
        return found

    # ---- messages

    def _ask(self, sent: Mapping[int, Params], note: dict[str, Any]) -> Iterator[tuple[int, _Reply]]:
        """Asks, the largest clients first. Those that are not there or do not answer in time are left out."""
        nodes = self._present()
        clients = sorted((c for c in sent if c in nodes), key=lambda client: (-self._sizes[client], client))
        packed: dict[int, Array] = {}  # the last one by the id of what is sent: all clients are often sent one object
        new: dict[str, Array] = {}  # by digest
        large_too = note["ask"] == "train" or note.get("after_local")  # nobody else trains on what is sent once
        begun: dict[int, float] = {}

        def tell(client: int, seconds: float | None = None, error: str = "") -> None:
            self._tell(Notice(note["ask"], client, len(sent), self._sizes[client], seconds, error))

        def make(client: int) -> tuple[int, Any, int, tuple[str, ...]]:
            begun[client] = time.monotonic()
            tell(client)
            down = sent[client]
            always, large = split_once(down)
            if id(down) not in packed:
                packed.clear()
                packed[id(down)] = wire.array(pack(always))
            once = self._once.named(down) if large_too else {}
            blobs, places = [packed[id(down)]], {}
            for name, digest in once.items():
                if not self._once.has(client, digest) and digest not in places:
                    if digest not in new:
                        new[digest] = wire.array(pack({name: large[name]}))
                    places[digest] = len(blobs)
                    blobs.append(new[digest])
            # A node may have come back with another model than it had, which its number does not tell.
            about = {"fingerprint": self._expected.fingerprint}
            whole = {**note, **about, "clients": [client], "blob": [0], "once": [once], "new": places}
            return nodes[client], wire.write(whole, blobs), sum(len(b.data) for b in blobs), tuple(once.values())

        for client, reply in self._exchange(note["ask"], clients, make, self._timeout, str(note.get("round", ""))):
            tell(client, time.monotonic() - begun.pop(client), reply if isinstance(reply, str) else _error(reply[0]))
            yield client, reply
        for client, since in begun.items():
            tell(client, time.monotonic() - since, "no answer")

    def _exchange(
        self,
        ask: str,
        clients: Sequence[int],
        make: Callable[[int], tuple[int, Any, int, tuple[str, ...]]],
        timeout: float | None,
        group: str = "",
    ) -> Iterator[tuple[int, _Reply]]:
        """Sends what make() gives for each client (node, content, bytes, digests), and yields answers as they come."""
        queue, waiting = list(reversed(clients)), dict[str, _Under]()
        while queue or waiting:
            while queue and (self._window is None or len(waiting) < self._window):
                client = queue.pop()
                node, content, received, digests = make(client)
                # No node works on a message, nor is its answer kept, that nobody waits for any more.
                message = Message(content, node, wire.TYPES[ask], ttl=timeout, group_id=group)
                ids = [i for i in self._grid.push_messages([message]) if i]
                if ids:
                    deadline = float("inf") if timeout is None else time.monotonic() + timeout
                    waiting[ids[0]] = _Under(client, deadline, received, digests)
                else:
                    yield client, "its node takes no messages"
            self._alive()
            replies, unreadable = self._pull(list(waiting))
            for name in unreadable:
                yield waiting.pop(name).client, "an answer that cannot be read"
            for message in replies:
                under = waiting.pop(message.metadata.reply_to_message_id, None)
                if under is not None:
                    yield under.client, self._read(message, ask, under)
            now = time.monotonic()
            waiting = {i: under for i, under in waiting.items() if under.deadline > now}
            if waiting and not replies:
                time.sleep(self._poll)

    def _pull(self, names: Sequence[str]) -> tuple[list[Message], list[str]]:
        """Answers that have come; and to which messages one has come that Flower cannot make sense of."""
        if not names:
            return [], []
        try:
            return list(self._grid.pull_messages(list(names))), []
        except _UNREADABLE:
            if len(names) == 1:
                return [], list(names)
        each = [self._pull([name]) for name in names]
        return [message for found, _ in each for message in found], [name for _, bad in each for name in bad]

    def _read(self, message: Message, ask: str, under: _Under) -> _Reply:
        """An answer, or why there is none. Nothing in it can raise."""
        try:
            if message.has_error():
                code, reason = message.error.code, message.error.reason or "error"
                raise UserError(_SILENT.get(code) or _line(f"{reason} (code {code})"))
            note, blobs = wire.read_answer(message.content, ask, self._limits)
            if "error" in note:
                raise UserError(_line(note["error"]))
            tensors = [wire.tensors(blob, self._limits) for blob in blobs]
            for one in note.get("clients", []):
                self._check(one, under.client)
        except UserError as error:
            self._once.lost(under.client)
            return str(error)
        self._once.delivered(under.client, under.digests)
        return note, tensors, [len(blob) for blob in blobs], under.received

    def _check(self, one: dict[str, Any], client: int) -> None:
        if one["client"] != client:
            raise wire.Malformed(f"it answers for client {one['client']}")
        for score in (part for parts in (one, one.get("after_local", {})) for part in map(parts.get, _PARTS) if part):
            if any(len(score[name]) != self._expected.classes for name in ("tp", "fp", "fn")):
                raise wire.Malformed("scores of another number of classes")
        if any(len(row) != self._expected.domains for row in one.get("groups", [])):
            raise wire.Malformed("groups over another number of domains")

    def _scores(self, client: int, note: dict[str, Any], passes: int) -> Scores:
        parts: dict[str, Score] = {name: parse_score(note[name]) for name in _PARTS if name in note}
        groups = None
        if "groups" in note:
            groups = np.array(note["groups"], np.int64).reshape(len(note["groups"]), self._expected.domains)
        return Scores(client, parts, passes, groups)


_PARTS = ("val", "test", "global")
_NO_ANSWER = "no answer"
_SHORT = 60.0  # seconds in which a node that comes in the middle of a run must say who it is
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)  # what Flower raises for objects that are none
# What Flower answers for nodes that do not, in the words of a record.
_SILENT = {
    ErrorCode.MESSAGE_UNAVAILABLE: f"{_NO_ANSWER} in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: f"{_NO_ANSWER} in time",
    ErrorCode.NODE_UNAVAILABLE: f"{_NO_ANSWER}: its node is gone",
}


def _error(note: dict[str, Any]) -> str:
    return next((_line(one["error"]) for one in note.get("clients", ()) if one.get("error")), "")


def _line(text: str) -> str:
    """One line of what a node says, of bounded length and without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:500])
