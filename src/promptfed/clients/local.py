"""Clients on this machine: in this process, or spread over worker processes that receive the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from ..method import split_once
from ..params import Params
from ..phases import Update
from ..scoring import Score, Scores
from .base import Clients, Notice, Tell
from .host import Message, parse_score, read_message
from .once import Once
from .wire import pack, unpack

Answer = Callable[[dict[str, Any], list[bytes]], Message]


class LocalClients(Clients):
    """Splits what is asked over one or several hosts. Who answers, and in which order, changes nothing."""

    def __init__(self, sizes: dict[int, int], hosts: Sequence[Answer], block: int = 1) -> None:
        self._sizes, self._block, self._all = sizes, block, list(hosts)
        self._hosts: SimpleQueue[Answer] = SimpleQueue()
        for host in hosts:
            self._hosts.put(host)
        self._once = Once()
        self._threads = ThreadPoolExecutor(len(hosts)) if len(hosts) > 1 else None
        self._tell: Tell | None = None

    def watch(self, tell: Tell) -> None:
        self._tell = tell

    def ids(self) -> list[int]:
        return list(self._sizes)

    def sizes(self) -> dict[int, int]:
        return self._sizes

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        found: dict[int, Params] = {}
        for asked, (_, blobs) in self._ask(
            {client: {} for client in clients}, {"ask": "enroll"}, self._large(len(clients))
        ):
            found.update({client: unpack(blob)[0] for client, blob in zip(asked, blobs, strict=True)})
        return {client: found[client] for client in clients}

    def train(self, sent: Mapping[int, Params], round: int, score: bool) -> tuple[list[Update], list[Scores]]:
        updates, scores = [], []
        for _, (note, blobs) in self._ask(sent, {"ask": "train", "round": round, "score": score}, self._block):
            for one, blob in zip(note["clients"], blobs, strict=True):
                client = one["client"]
                up, stats = read_message(blob)
                if "after_local" in one:
                    scores.append(_scores(client, one["after_local"], one["passes"]))
                updates.append(
                    Update(
                        client=client,
                        sent=sent[client],
                        up=up,
                        n=one["n"],
                        stats=stats,
                        loss=one.get("loss"),
                        passes=one["passes"],
                        bytes_down=note["received"][client],
                        bytes_up=len(blob),
                        error=one.get("error", ""),
                        moved=one.get("moved", {}),
                    )
                )
        return sorted(updates, key=lambda u: u.client), sorted(scores, key=lambda s: s.client)

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        answers = self._ask(sent, {"ask": "second", "round": round}, self._block)
        return {client: n for _, (note, _) in answers for client, n in note["received"].items()}

    def evaluate(self, sent: Mapping[int, Params], round: int, pooled: bool, after_local: bool) -> list[Scores]:
        # What was learnt in this round counts: the clients stand as they will at the start of the next one.
        note = {"ask": "evaluate", "round": round + 1, "pooled": pooled, "after_local": after_local}
        answers = self._ask(sent, note, self._large(len(sent)))
        found = [_scores(one["client"], one, one["passes"]) for _, (reply, _) in answers for one in reply["clients"]]
        return sorted(found, key=lambda s: s.client)

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for host in self._all:  # also those that are at work
            stop = getattr(host, "close", None)
            if stop:
                stop()

    def _large(self, clients: int) -> int:
        """Clients a request where each is little work: few requests, but enough of them to keep all hosts busy."""
        return max(self._block, min(64, -(-clients // (8 * len(self._all)))))

    def _ask(self, sent: Mapping[int, Params], note: dict[str, Any], size: int) -> Iterator[tuple[list[int], Message]]:
        """Asks for `size` clients at a time, the largest first so that no host is left with a long one at the end."""
        clients = sorted(sent, key=lambda client: (-self._sizes[client], client))
        groups = [clients[i : i + size] for i in range(0, len(clients), size)]

        def one(group: list[int]) -> tuple[list[int], Message]:
            # Packed here, so that messages exist only for the clients under way; one for clients sent the same object.
            place: dict[int, int] = {}
            blobs: list[bytes] = []
            once: list[dict[str, str]] = []  # of each client: name -> digest
            new: dict[str, int] = {}  # digest -> blob
            received: dict[int, int] = {}
            for client in group:
                down = sent[client]
                always, large = split_once(down)
                if id(down) not in place:
                    place[id(down)] = len(blobs)
                    blobs.append(pack(always))
                received[client] = len(blobs[place[id(down)]])
                trains = note["ask"] == "train" or note.get("after_local")  # nobody else needs what is sent once
                once.append(self._once.named(down) if trains else {})
                for name, digest in once[-1].items():
                    if not self._once.has(client, digest):
                        if digest not in new:
                            new[digest] = len(blobs)
                            blobs.append(pack({name: large[name]}))
                        received[client] += len(blobs[new[digest]])
            index = [place[id(sent[client])] for client in group]
            host = self._hosts.get()
            self._notify(note["ask"], group, len(clients))
            begun = perf_counter()
            try:
                said, answers = host({**note, "clients": group, "blob": index, "once": once, "new": new}, blobs)
            finally:
                self._hosts.put(host)
            for client, named in zip(group, once, strict=True):
                self._once.delivered(client, named.values())
            # A worker knows how long its clients took; here, its start and the pipe would count too.
            self._notify(note["ask"], group, len(clients), said.get("seconds", perf_counter() - begun), said)
            return group, ({**said, "received": received}, answers)

        return self._threads.map(one, groups) if self._threads else map(one, groups)

    def _notify(
        self,
        ask: str,
        group: Sequence[int],
        asked: int,
        seconds: float | None = None,
        said: Mapping[str, Any] | None = None,
    ) -> None:
        if self._tell:
            samples = sum(self._sizes[client] for client in group)
            errors = {one["client"]: one["error"] for one in (said or {}).get("clients", ()) if "error" in one}
            for client in group:
                self._tell(Notice(ask, client, asked, samples, seconds, errors.get(client, "")))


def _scores(client: int, note: dict[str, Any], passes: int) -> Scores:
    parts: dict[str, Score] = {name: parse_score(note[name]) for name in ("val", "test", "global") if name in note}
    groups = np.array(note["groups"], np.int64) if "groups" in note else None
    return Scores(client, parts, passes, groups)
