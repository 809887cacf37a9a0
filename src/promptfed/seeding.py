"""Randomness from names, never from the order in which things happen."""

import hashlib

import numpy as np
import torch


def rng(seed: int, *keys: int | str) -> np.random.Generator:
    """A generator of its own for (seed, round, client, ...)."""
    # The number of keys counts too: numpy takes [1, 2] and [1, 2, 0] for the same seed.
    return np.random.default_rng([len(keys), seed, *(_number(key) for key in keys)])


def torch_rng(seed: int, *keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng(seed, *keys).integers(2**62)))


def _number(key: int | str) -> int:
    return key if isinstance(key, int) else int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
