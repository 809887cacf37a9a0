"""Parameters as whole numbers modulo 2^32.

A client sends round(w x 2^30 / range), where w is its part of all samples. Parts add up to 1 at most, so the sum stays
within 2^30 and half a unit per client, far from wrapping around. A unit is range / 2^30: the mean is exact to half a
unit per client.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..errors import UserError
from ..params import Params

_ONE = 2.0**30


def encode(params: Params, part: float, range: float) -> dict[str, np.ndarray]:
    """Each parameter as a flat array. `part`: the client's weight in the mean."""
    found = {}
    for name, p in params.items():
        values = p.detach().cpu().double().flatten().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= range:  # nor if it is NaN
            raise UserError(f"secure.range = {range:g}: {name} has a value of {largest:.3g}, which is larger")
        found[name] = np.rint(values * (part * _ONE / range)).astype(np.int32).view(np.uint32)
    return found


def decode(sums: Mapping[str, np.ndarray], like: Params, part: float, range: float) -> Params:
    """The mean, in the shapes and types of `like`. `part`: the weights of those in the sum, together."""
    unit = range / (_ONE * part)
    values = {name: torch.from_numpy(sums[name].view(np.int32) * unit) for name in like}
    return {name: values[name].reshape(p.shape).to(p.dtype) for name, p in like.items()}
