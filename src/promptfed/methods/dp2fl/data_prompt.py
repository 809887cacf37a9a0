"""A client's data prompt: the part of MaPLe's parameters that is its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from torch import Tensor

from ... import Params, Update


def maps(params: Params) -> Params:
    """The data prompt."""
    return {name: p for name, p in params.items() if name.startswith("map.")}


def in_order(updates: Sequence[Update]) -> list[Update]:
    """By a digest of their data prompts: reveals nothing about who sent them, and is the same in every mode and run."""
    return sorted(updates, key=lambda u: sha256(b"".join(map(raw, maps(u.up).values()))).digest())


def raw(p: Tensor) -> bytes:
    return p.detach().cpu().contiguous().numpy().tobytes()


def distance(a: Params, b: Params) -> float:
    """Euclidean, over the names of b, in float64."""
    # NumPy's sum does not depend on the number of threads.
    return math.sqrt(math.fsum(float(np.square(_array(a, name) - _array(b, name)).sum()) for name in b))


def combine(own: Params, others: Sequence[Params], weights: Sequence[float]) -> Params:
    """Eq. 12: own + sum_i w_i (others_i - own), in float64 and in the given order."""
    made: Params = {}
    for name, p in own.items():
        base = p.cpu().double()
        moved = base.clone()
        for other, weight in zip(others, weights, strict=True):
            if weight:
                moved += weight * (other[name].cpu().double() - base)
        made[name] = moved.to(p)
    return made


def _array(params: Params, name: str) -> np.ndarray:
    return params[name].detach().cpu().double().numpy()
