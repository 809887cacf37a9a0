"""Coordinate-wise trimmed mean (Yin et al., ICML 2018). Clients count alike."""

from __future__ import annotations

from ..params import Params
from .base import Change, Combination, Notes, each


class TrimmedMean(Combination):
    """Without the share's smallest and largest values of each coordinate."""

    name = "trimmed-mean"

    def __init__(self, share: float) -> None:
        self._share = share

    def combine(self, changes: list[Change]) -> tuple[Params, Notes]:
        count = len(changes)
        cut = min(int(self._share * count + 1e-9), (count - 1) // 2)
        return {name: stacked.sort(0).values[cut : count - cut].mean(0) for name, stacked in each(changes)}, {}
