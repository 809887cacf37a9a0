"""Generators are named, and a name always means the same numbers."""

from hashlib import sha256

import numpy as np
import pytest

from promptfed.seeding import rng


def word(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:4], "little")


@pytest.mark.parametrize("keys", [(), (1,), (3, 0, "batches", 0), (7, 2**32 - 1), (1, 2**40, "noise"), ("sample",)])
def test_a_generator_is_that_of_the_list_of_its_keys(keys):
    """numpy reads a list of integers; results on record were drawn so."""
    for seed in (0, 3, 2**32, 2**63):
        expected = np.random.default_rng([len(keys), seed, *(word(k) if isinstance(k, str) else k for k in keys)])
        assert rng(seed, *keys).integers(2**62, size=4).tolist() == expected.integers(2**62, size=4).tolist()
