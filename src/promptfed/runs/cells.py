"""Numbers over seeds, and numbers as text in the cells of tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np


def in_percent(value: float | None) -> float:
    """NaN for None."""
    return 100 * value if value is not None else math.nan


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of the values that are not NaN; (NaN, 0) of none, (value, 0) of one."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, 0.0
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0


def mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values))


def over_seeds(found: Iterable[Mapping[str, Any] | None], *path: str) -> dict[str, Any] | None:
    """Of the metric at this path, in the runs that have it."""
    values: list[Any] = [reduce(getitem, path, m) for m in found if m and path[0] in m]
    known = [value for value in values if value is not None]
    mean, std = spread(known)
    return {"mean": mean, "std": std if len(known) > 1 else None} if known else None


def score(row: Mapping[str, Any], key: str) -> str:
    """With the number of clients where it is not the mean of all."""
    counted = row["clients"].get(key)
    part = f" ({_of(counted)})" if counted and counted["n"] < counted["of"] else ""
    return percent(row[key]) + part


def _of(counted: Mapping[str, Any] | None) -> str:
    return f"{counted['n']} of {counted['of']}" if counted else "-"


def percent(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "-"
    wide = "" if spread["std"] is None else f" ±{100 * spread['std']:.1f}"
    return f"{100 * spread['mean']:.1f}{wide}"


def points(difference: float | None) -> str:
    """0.031 -> +3.1"""
    return "-" if difference is None else f"{round(100 * difference, 1) + 0.0:+.1f}"  # + 0.0: no -0.0


def size(n: float) -> str:
    """1234567 -> 1.2 MB"""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def count(n: float) -> str:
    """672000 -> 672 k"""
    if n >= 1e6:
        return f"{n / 1e6:.2f} M"
    return f"{n / 1e3:.0f} k" if n >= 1e3 else f"{n:.0f}"


def rounds(n: int) -> str:
    return f"{n} round{'s' if n != 1 else ''}"
