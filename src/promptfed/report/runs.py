"""Numbers as pictures have them: in per cent, over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np


def percent(value: float | None) -> float:
    return 100 * value if value is not None else math.nan


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of what is known; (NaN, 0) of nothing, (value, 0) of one."""
    known = [value for value in values if value == value]
    if not known:
        return math.nan, 0.0
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
