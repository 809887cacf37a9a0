"""Bulyan (El Mhamdi et al., ICML 2018): Krum chooses, and each coordinate leaves out values far from the median."""

from __future__ import annotations

import torch
from torch import Tensor

from ..params import Params
from .base import Change, Combination, Notes, distances, each
from .krum import scores
from .median import middle


class Bulyan(Combination):
    """K - 2f updates, chosen one after another by Krum; of each coordinate the mean of the K - 4f values nearest to
    the median."""

    name = "bulyan"

    def __init__(self, share: float) -> None:
        self._share = share

    def malicious(self, count: int) -> int:
        return int(self._share * count + 1e-9)

    def needed(self, count: int) -> int:
        return 4 * self.malicious(count) + 3

    def combine(self, changes: list[Change]) -> tuple[Params, Notes]:
        count, f = len(changes), self.malicious(len(changes))
        squared, left, chosen = distances(changes), list(range(count)), list[int]()
        while len(chosen) < count - 2 * f:
            best = int(scores(squared[left][:, left], f).argmin())
            chosen.append(left.pop(best))
        some = [changes[i] for i in sorted(chosen)]
        made = {name: _nearest(stacked, count - 4 * f) for name, stacked in each(some)}
        return made, {"chosen": [i in chosen for i in range(count)]}


def _nearest(stacked: Tensor, keep: int) -> Tensor:
    """(K, ...) -> (...): the mean of the values nearest to the median."""
    near = (stacked - middle(stacked)).abs().argsort(stable=True, dim=0)[:keep]
    return torch.gather(stacked, 0, near).mean(0)
