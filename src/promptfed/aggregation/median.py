"""Coordinate-wise median (Yin et al., ICML 2018). Clients count alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ..params import Params
from .base import Change, Combination, Notes, each


def middle(stacked: Tensor) -> Tensor:
    """(K, ...) -> (...): of an even number, the mean of the two in the middle."""
    ordered, count = stacked.sort(0).values, len(stacked)
    return torch.lerp(ordered[(count - 1) // 2], ordered[count // 2], 0.5)


class Median(Combination):
    name = "median"

    def combine(self, changes: list[Change]) -> tuple[Params, Notes]:
        return {name: middle(stacked) for name, stacked in each(changes)}, {}
