"""Keys, shares and encrypted shares as the tensors of a message."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..params import Params


def rows(items: Iterable[bytes]) -> Tensor:
    """(N, size)"""
    return torch.stack([row(item) for item in items])


def row(item: bytes) -> Tensor:
    """(size,)"""
    return torch.from_numpy(np.frombuffer(item, np.uint8).copy())


def raw(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def read(message: Params, name: str, shape: tuple[int, ...]) -> Tensor:
    """The one tensor of a message."""
    found = message.get(name)
    if len(message) != 1 or found is None or found.dtype != torch.uint8 or tuple(found.shape) != shape:
        raise UserError(f"secure.aggregation: a message must hold {name} of shape {shape}, and nothing else")
    return found
