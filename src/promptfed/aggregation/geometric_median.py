"""Geometric median (Pillutla et al., "Robust Aggregation for Federated Learning", 2022), weighted by samples."""

from __future__ import annotations

import math

from ..params import Params
from .base import Change, Combination, Notes, squares, weighted

_STEPS, _PRECISION = 100, 1e-7
_SMALLEST = 1e-8  # a distance that is divided by


class GeometricMedian(Combination):
    """The point with the smallest sum of distances to all updates, by Weiszfeld's iteration."""

    name = "geometric-median"

    def combine(self, changes: list[Change]) -> tuple[Params, Notes]:
        ups = [change.update.up for change in changes]
        samples = [float(change.update.n) for change in changes]
        weights = [n / max(_SMALLEST, change.norm) for n, change in zip(samples, changes, strict=True)]
        made = weighted(ups, weights)
        for _ in range(_STEPS):
            apart = [math.sqrt(sum(squares(up[name], p) for name, p in made.items())) for up in ups]
            weights = [n / max(_SMALLEST, distance) for n, distance in zip(samples, apart, strict=True)]
            last, made = made, weighted(ups, weights)
            if sum(squares(p, last[name]) for name, p in made.items()) < _PRECISION**2 * min(apart) ** 2:
                break
        total = sum(weights)
        return made, {"weight": [weight / total for weight in weights]}
