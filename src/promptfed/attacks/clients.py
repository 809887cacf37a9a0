"""Clients of which some are malicious."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..aggregation.base import Change, change_of, seen
from ..clients.base import Clients, Reply, Take, Tell
from ..clients.messages import Masks, Task
from ..errors import UserError
from ..method import Method
from ..params import Params
from ..phases import Update
from ..runs.build import Parts
from ..scoring import Scores
from ..seeding import torch_rng

Forge = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # changes (K, d), malicious (K,) bool, random -> (m, d)


class Malicious(Clients):
    """Other clients, of which some send what forged() makes of all updates. These act together."""

    def __init__(self, clients: Clients, parts: Parts, malicious: Sequence[int]) -> None:
        self.clients, self.parts, self.malicious = clients, parts, malicious
        if parts.config.secure.aggregation:
            raise UserError("secure.aggregation = true hides the updates that attacks are made of (allowed: false)")

    def forged(self, updates: Sequence[Update], round: int) -> list[Update]:
        """All updates of a round as the server sees them, given those of the engine."""
        return list(updates)

    def draws(self, round: int) -> tuple[int, int]:
        return self.parts.config.seed, round

    def watch(self, tell: Tell) -> None:
        self.clients.watch(tell)

    def ids(self) -> list[int]:
        return self.clients.ids()

    def sizes(self) -> dict[int, int]:
        return self.clients.sizes()

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        return self.clients.enroll(clients)

    def train(
        self,
        sent: Mapping[int, Params],
        round: int,
        score: bool,
        take: Take = lambda update: update,
        masks: Masks | None = None,
    ) -> tuple[list[Update], list[Scores]]:
        updates, scores = self.clients.train(sent, round, score)
        return [take(update) for update in self.forged(updates, round)], scores

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        return self.clients.send_second(sent, round)

    def ask(self, task: Task, sent: Mapping[int, Params]) -> Iterator[Reply]:
        return self.clients.ask(task, sent)

    def evaluate(self, sent: Mapping[int, Params], *, as_of: int, pooled: bool, after_local: bool) -> list[Scores]:
        return self.clients.evaluate(sent, as_of=as_of, pooled=pooled, after_local=after_local)

    def close(self) -> None:
        self.clients.close()


class Forging(Malicious):
    """Malicious clients send changes that `forge` makes of all changes, and report on them as the method asks."""

    def __init__(
        self, clients: Clients, parts: Parts, malicious: Sequence[int], forge: Forge, method: Method | None = None
    ) -> None:
        super().__init__(clients, parts, malicious)
        self._forge, self._method = forge, method or parts.method  # by which malicious clients report

    def forged(self, updates: Sequence[Update], round: int) -> list[Update]:
        parts, draws = self.parts, self.draws(round)
        changes = [change_of(parts.method, parts.init, u, draws) for u in updates if not u.error]
        malicious = torch.tensor([change.update.client in self.malicious for change in changes])
        if not malicious.any() or int((~malicious).sum()) < 2:  # attacks need a deviation of honest clients
            return list(updates)
        moves = torch.stack([_flat(change) for change in changes])
        forged = self._forge(moves, malicious, torch_rng(*draws, "attack"))
        bad = [change for change in changes if change.update.client in self.malicious]
        made = {c.update.client: self._sent(c, move, draws) for c, move in zip(bad, forged, strict=True)}
        return [made.get(update.client, update) for update in updates]

    def _sent(self, change: Change, move: Tensor, draws: tuple[int, int]) -> Update:
        update, up = change.update, _moved(change, move)
        ctx = replace(seen(update, draws), stats=update.stats)
        params = self._method.start(self.parts.init, {**ctx.down, **up}, {}, {})
        with torch.no_grad():
            told = self._method.report(self.parts.model, params, ctx)
        return replace(update, up=up, stats={**update.stats, **told})


def _flat(change: Change) -> Tensor:
    """(d,) in double precision"""
    up = change.update.up
    return torch.cat([(up[name].double() - p.double()).flatten() for name, p in change.still.items()])


def _moved(change: Change, move: Tensor) -> Params:
    """Where the client began, and this change from there."""
    parts = torch.split_with_sizes(move, [p.numel() for p in change.still.values()])
    still = change.still.items()
    return {name: (p.double() + part.view(p.shape)).to(p.dtype) for (name, p), part in zip(still, parts, strict=True)}
