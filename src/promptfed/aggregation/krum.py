"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017): updates that have many others near them."""

from __future__ import annotations

from torch import Tensor

from ..phases import Update
from .base import Change, Notes, Selection, distances


def scores(squared: Tensor, malicious: int) -> Tensor:
    """(K,) from (K, K): the sum of each update's K - f - 2 smallest distances to others."""
    near = max(1, len(squared) - malicious - 2)
    others = squared.clone().fill_diagonal_(float("inf")).sort(1).values
    return others[:, :near].sum(1)


class Krum(Selection):
    """The one update with the lowest score."""

    name = "krum"

    def __init__(self, share: float) -> None:
        self._share = share

    def malicious(self, count: int) -> int:
        return int(self._share * count + 1e-9)

    def needed(self, count: int) -> int:
        return 2 * self.malicious(count) + 3

    def kept(self, count: int) -> int:
        return 1

    def select(self, changes: list[Change]) -> tuple[list[Update], Notes]:
        count = len(changes)
        order = scores(distances(changes), self.malicious(count)).argsort(stable=True).tolist()
        chosen = set(order[: self.kept(count)])
        used = [change.update for i, change in enumerate(changes) if i in chosen]
        return used, {"chosen": [i in chosen for i in range(count)]}


class MultiKrum(Krum):
    """The K - f updates with the lowest scores."""

    name = "multi-krum"

    def kept(self, count: int) -> int:
        return count - self.malicious(count)
