"""Randomness from names, never from the order in which things happen."""

import hashlib
from functools import lru_cache

import numpy as np
import torch


def rng(seed: int, *keys: int | str) -> np.random.Generator:
    """A generator of its own for (seed, round, client, ...)."""
    # The number of keys counts too: numpy takes [1, 2] and [1, 2, 0] for the same seed.
    words = [len(keys), seed, *(key if isinstance(key, int) else _number(key) for key in keys)]
    # The same seed as by the list, without numpy's slow reading of its integers one by one.
    return np.random.default_rng(np.array(words, np.uint32) if max(words) < 1 << 32 else words)


def torch_rng(seed: int, *keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng(seed, *keys).integers(2**62)))


@lru_cache(maxsize=1024)
def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
