"""Clients on this machine: in this process, or spread over worker processes that receive the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue

from ..params import Params
from .base import MessageClients, Reply
from .messages import Ask, Task, Train, TrainResult
from .once import Packing
from .wire import unpack


class LocalClients(MessageClients):
    """ModelScores what is asked over one or several hosts. Which one answers, and in which order, changes nothing."""

    def __init__(self, sizes: dict[int, int], hosts: Sequence[Ask], block: int = 1) -> None:
        super().__init__(sizes)
        self._block, self._all = block, list(hosts)
        self._hosts: SimpleQueue[Ask] = SimpleQueue()
        for host in hosts:
            self._hosts.put(host)
        self._threads = ThreadPoolExecutor(len(hosts)) if len(hosts) > 1 else None

    def exchange(self, task: Task, sent: Mapping[int, Params], order: Sequence[int]) -> Iterator[Reply]:
        # Evaluation is little work per client: few requests, but enough of them to keep all hosts busy.
        few = max(self._block, min(64, -(-len(order) // (8 * len(self._all)))))
        size = self._block if isinstance(task, Train) else few
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        packing = Packing(task, sent, self._once, bytes)

        def ask(group: Sequence[int]) -> list[Reply]:
            packed = packing(group)  # here, so that messages exist only for the clients under way
            host = self._hosts.get()
            self._notify(task, group, len(order))
            try:
                answer = host(packed.request, packed.blobs)
            finally:
                self._hosts.put(host)
            errors = [one.error if isinstance(one, TrainResult) else "" for one in answer.results]
            self._notify(task, group, len(order), answer.seconds, errors)
            return [
                Reply(client, result, unpack(blob)[0], packed.received[client], len(blob))
                for client, result, blob in zip(group, answer.results, answer.blobs or [b""] * len(group), strict=True)
            ]

        return chain.from_iterable(self._threads.map(ask, groups) if self._threads else map(ask, groups))

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for host in self._all:  # also those that are at work
            stop = getattr(host, "close", None)
            if stop:
                stop()
