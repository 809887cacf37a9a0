"""Rounds of the linear model under secure aggregation, with clients that are lost on the way."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from promptfed.clients.base import Reply
from promptfed.clients.local import LocalClients
from promptfed.clients.messages import Task
from promptfed.method import FedAvg, Method, State
from promptfed.params import Params
from promptfed.secure import Secure
from promptfed.secure.site import Masker
from promptfed.server import Line, Plan, step
from tiny import SEED, linear, toy_host

SIZES = (8, 6, 5, 9, 7)
SHORT = {"epochs": 1, "batch_size": 4, "lr": 0.1}
ON = Secure(aggregation=True)


class Lossy(LocalClients):
    """`lost`: whose answers to which messages do not reach the server. All that do are in `said`."""

    lost: Mapping[str, Collection[int]] = {}

    def exchange(self, task: Task, sent: Mapping[int, Params], order: Sequence[int]) -> Iterator[Reply]:
        for reply in super().exchange(task, sent, order):
            if reply.client not in self.lost.get(task.ask, ()):
                self.said.setdefault(task.ask, []).append(reply)
                yield reply


@contextmanager
def federation(
    path: Path,
    secure: Secure = ON,
    lost: Mapping[str, Collection[int]] | None = None,
    sizes: Sequence[int] = SIZES,
    method: Method | None = None,
) -> Iterator[tuple[Lossy, Method, Params]]:
    """-> clients, their method and its initial parameters"""
    host = toy_host(method or FedAvg(**SHORT), path, sizes)
    if secure.aggregation:
        host.masker = Masker(secure, SEED, path / "masks")
    clients = Lossy(dict(enumerate(sizes)), [host])
    clients.lost, clients.said = lost or {}, {}
    yield clients, host.method, host.init
    host.close()


def trained(
    path: Path, secure: Secure = ON, rounds: int = 1, fraction: float = 1.0, **settings: Any
) -> tuple[State, Line]:
    """-> the server's state after some rounds, and the last one's line"""
    plan = Plan(99, fraction, SEED, eval_every=99, after_local="none", secure=secure)
    with federation(path, secure, **settings) as (clients, method, init):
        state = method.begin(linear(), init, SEED)
        for round in range(1, rounds + 1):
            state, line, _ = step(method, init, clients, plan, state, round)
    return state, line
