"""Half precision in the passes through a model (`engine.precision`). Parameters, their gradients' sums and the steps of
optimisers stay in fp32: autocast rounds the factors of matrix products only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LOSS_SCALE = 1024.0  # keeps small gradients of activations above the least number of fp16; a power of two: exact


def reduced(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Matrix products in this precision."""
    if precision == "fp32":
        return nullcontext()
    # Without autocast's cache of rounded parameters: it would outlive the step that changes them.
    return torch.autocast(device.type, _DTYPES[precision], cache_enabled=False)


def full(device: torch.device) -> AbstractContextManager[object]:
    """All in fp32, also within reduced()."""
    return torch.autocast(device.type, enabled=False) if current(device) else nullcontext()


def current(device: torch.device) -> torch.dtype | None:
    """What reduced() has set; None outside of it."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def loss_scale(device: torch.device) -> float:
    """What a loss is multiplied by before its gradient is taken, and the gradient divided by."""
    return _LOSS_SCALE if current(device) is torch.float16 else 1.0
