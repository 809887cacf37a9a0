"""Clients of which some are malicious."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..aggregation.base import Change, change_of
from ..clients.base import Clients, Reply, Take, Tell
from ..clients.messages import Masks, Task
from ..method import Method
from ..params import Params
from ..phases import Update
from ..scoring import Scores
from ..seeding import torch_rng
from .untargeted import Forge


class Attacked(Clients):
    """Other clients, of which the malicious ones send what `forge` makes in place of their updates."""

    def __init__(
        self, clients: Clients, method: Method, init: Params, forge: Forge, malicious: Sequence[int], seed: int
    ) -> None:
        self._clients, self._method, self._init = clients, method, init
        self._forge, self._malicious, self._seed = forge, malicious, seed

    def watch(self, tell: Tell) -> None:
        self._clients.watch(tell)

    def ids(self) -> list[int]:
        return self._clients.ids()

    def sizes(self) -> dict[int, int]:
        return self._clients.sizes()

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        return self._clients.enroll(clients)

    def train(
        self,
        sent: Mapping[int, Params],
        round: int,
        score: bool,
        take: Take = lambda update: update,
        masks: Masks | None = None,
    ) -> tuple[list[Update], list[Scores]]:
        updates, scores = self._clients.train(sent, round, score)
        return [take(update) for update in self._attacked(updates, round)], scores

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        return self._clients.send_second(sent, round)

    def ask(self, task: Task, sent: Mapping[int, Params]) -> Iterator[Reply]:
        return self._clients.ask(task, sent)

    def evaluate(self, sent: Mapping[int, Params], *, as_of: int, pooled: bool, after_local: bool) -> list[Scores]:
        return self._clients.evaluate(sent, as_of=as_of, pooled=pooled, after_local=after_local)

    def close(self) -> None:
        self._clients.close()

    def _attacked(self, updates: Sequence[Update], round: int) -> list[Update]:
        changes = [change_of(self._method, self._init, u, (self._seed, round)) for u in updates if not u.error]
        malicious = torch.tensor([change.update.client in self._malicious for change in changes])
        if not malicious.any() or int((~malicious).sum()) < 2:  # attacks need a deviation of honest clients
            return list(updates)
        moves = torch.stack([_flat(change) for change in changes])
        forged = self._forge(moves, malicious, torch_rng(self._seed, round, "attack"))
        bad = [change for change in changes if change.update.client in self._malicious]
        made = {c.update.client: _moved(c, move) for c, move in zip(bad, forged, strict=True)}
        return [replace(u, up=made[u.client]) if u.client in made else u for u in updates]


def _flat(change: Change) -> torch.Tensor:
    """(d,) in double precision"""
    up = change.update.up
    return torch.cat([(up[name].double() - p.double()).flatten() for name, p in change.still.items()])


def _moved(change: Change, move: torch.Tensor) -> Params:
    """Where the client began, and this change from there."""
    parts = torch.split_with_sizes(move, [p.numel() for p in change.still.values()])
    still = change.still.items()
    return {name: (p.double() + part.view(p.shape)).to(p.dtype) for (name, p), part in zip(still, parts, strict=True)}
