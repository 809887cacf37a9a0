"""Norm bounding: an update that is far longer than usual is shortened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ..phases import Update
from .base import Change, Notes, Selection, scaled

_ROUNDS = 10  # that the median looks back on


class NormBound(Selection):
    """No update is longer than `bound` times the median norm of this round's updates and those of the last ten."""

    name = "norm-bound"

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._recent: deque[list[float]] = deque(maxlen=_ROUNDS)

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            if "aggregation" in line:
                self._recent.append([row["norm"] for row in line["aggregation"]["clients"]])

    def select(self, changes: list[Change]) -> tuple[list[Update], Notes]:
        norms = [change.norm for change in changes]
        most = self._bound * median([norm for round in (*self._recent, norms) for norm in round])
        self._recent.append(norms)
        factors = [most / norm if norm > most else 1.0 for norm in norms]
        used = [
            change.update if factor == 1.0 else replace(change.update, up=scaled(change, factor))
            for change, factor in zip(changes, factors, strict=True)
        ]
        return used, {"factor": factors} if min(factors) < 1 else {}
