"""Rule: what the server does with a round's updates instead of averaging them all."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import params as P
from ..method import Method, State, split_once
from ..params import Params
from ..phases import Context, Update


@dataclass(frozen=True)
class Change:
    """An update, and what its client would have sent had training changed nothing."""

    update: Update
    still: Params
    norm: float  # Euclidean, of the difference, in double precision: that of 3e38 is finite


Notes = dict[str, list[Any]]  # numbers of each change, for the round's line


class Rule(ABC):
    """Subclasses are a Selection or a Combination."""

    name: ClassVar[str]

    def needed(self, count: int) -> int:
        """How many updates it needs to withstand the malicious ones of so many."""
        return 1

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Before the first round of a resumed run: what was recorded of earlier ones."""
        return

    @abstractmethod
    def aggregate(self, method: Method, state: State, changes: list[Change]) -> tuple[State, list[Update], Notes]:
        """-> the new state, the updates that made it, and notes"""


class Selection(Rule):
    """Leaves out or scales updates. The method aggregates the rest in its own way, with its own weights."""

    @abstractmethod
    def select(self, changes: list[Change]) -> tuple[list[Update], Notes]:
        """-> the updates that are used, and notes"""

    def aggregate(self, method: Method, state: State, changes: list[Change]) -> tuple[State, list[Update], Notes]:
        used, notes = self.select(changes)
        return method.aggregate(state, used), used, notes


class Combination(Rule):
    """Makes one update of all, in place of their mean. Methods that aggregate in their own way, but by a mean alone
    (`Method.by_mean`), see it as what every client has sent."""

    @abstractmethod
    def combine(self, changes: list[Change]) -> tuple[Params, Notes]:
        """-> what takes the place of the mean, and notes"""

    def aggregate(self, method: Method, state: State, changes: list[Change]) -> tuple[State, list[Update], Notes]:
        updates = [change.update for change in changes]
        if method.streams:
            made, notes = self.combine(changes)
            return method.merge(state, made), updates, notes
        # The mean of equal updates is their value, whatever the weights: as if all clients had sent what the rule made.
        strides = [method.stride(update.n) for update in updates]
        paired = list(zip(changes, strides, strict=True))
        made, notes = self.combine([moved(change, scaled(change, 1 / stride)) for change, stride in paired])
        alike = [replace(c.update, up=scaled(moved(c, made), stride)) for c, stride in paired]
        return method.aggregate(state, alike), updates, notes


def apply(
    rule: Rule, method: Method, state: State, init: Params, updates: Sequence[Update], draws: tuple[int, int]
) -> tuple[State, list[Update], dict[str, Any]]:
    """-> the new state, the updates that made it, and what is recorded. `draws`: seed and round."""
    changes = [change_of(method, init, update, draws) for update in updates]
    made, used, notes = rule.aggregate(method, state, changes)
    rows = [{"client": change.update.client, "norm": change.norm} for change in changes]
    for name, values in notes.items():
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    return made, used, {"rule": rule.name, "clients": rows}


def moved(change: Change, up: Params) -> Change:
    """The same client with another update."""
    norm = math.sqrt(sum(squares(up[name], p) for name, p in change.still.items()))
    return Change(replace(change.update, up=up), change.still, norm)


def change_of(method: Method, init: Params, update: Update, draws: tuple[int, int]) -> Change:
    still = method.unmoved(init, seen(update, draws))
    return moved(Change(update, still, 0.0), update.up)


def seen(update: Update, draws: tuple[int, int]) -> Context:
    """Of a client, what the server knows: what it was sent."""
    down, once = split_once(update.sent)
    none = torch.zeros((), dtype=torch.int64)
    return Context(down, {}, None, none, none.expand(1), once=once, draws=(*draws, update.client))


def squares(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().sum())


def each(changes: Sequence[Change]) -> Iterable[tuple[str, Tensor]]:
    """One tensor of all updates at a time: (K, ...)"""
    for name in changes[0].update.up:
        yield name, torch.stack([change.update.up[name] for change in changes])


def distances(changes: Sequence[Change]) -> Tensor:
    """(K, K) squared Euclidean distances of updates."""
    found = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    for i, one in enumerate(changes):
        for j, other in enumerate(changes[:i]):
            up = other.update.up
            found[i, j] = found[j, i] = sum(squares(p, up[name]) for name, p in one.update.up.items())
    return found


def scaled(change: Change, factor: float) -> Params:
    """The change times a factor, from where its client began."""
    up = change.update.up
    return {n: (p.double() + factor * (up[n].double() - p.double())).to(p.dtype) for n, p in change.still.items()}


def weighted(items: Sequence[Params], weights: Sequence[float]) -> Params:
    """Their mean in double precision, so that the order of updates does not show."""
    mean = P.mean([{name: p.double() for name, p in item.items()} for item in items], weights)
    return {name: p.to(items[0][name].dtype) for name, p in mean.items()}
