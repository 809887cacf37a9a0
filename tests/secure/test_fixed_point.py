"""Numbers modulo 2^32: how exact a mean is, and what does not fit."""

import numpy as np
import pytest
import torch

from promptfed import UserError
from promptfed.secure.fixed_point import decode, encode


@pytest.mark.parametrize("clients", [3, 50, 1000])
@pytest.mark.parametrize("range", [0.5, 64.0])
def test_the_mean_is_exact_to_half_a_unit_per_client(clients: int, range: float) -> None:
    g = torch.Generator().manual_seed(clients)
    values = range * (2 * torch.rand(clients, 300, generator=g) - 1)
    values[:, 0], values[:, 1] = range, -range  # nor do the largest sums wrap around
    n = torch.randint(1, 100, (clients,), generator=g).double()
    parts = n / n.sum()
    total = np.zeros(300, np.uint32)
    for x, part in zip(values, parts, strict=True):
        total += encode({"w": x}, float(part), range)["w"]
    found = decode({"w": total}, {"w": torch.zeros(300, dtype=torch.float64)}, 1.0, range)["w"]
    assert (found - parts @ values.double()).abs().max() <= clients / 2 * range / 2**30


def test_a_sum_over_some_clients_is_scaled_to_their_weight() -> None:
    sums = encode({"w": torch.tensor([[3.0, -4.0]]), "b": torch.tensor(0.25)}, 0.2, 8.0)
    found = decode(sums, {"w": torch.zeros(1, 2), "b": torch.zeros(())}, 0.2, 8.0)
    torch.testing.assert_close(found, {"w": torch.tensor([[3.0, -4.0]]), "b": torch.tensor(0.25)})


@pytest.mark.parametrize("value", [8.1, -9.0, float("nan"), float("inf")])
def test_values_beyond_the_range_are_refused(value: float) -> None:
    with pytest.raises(UserError, match=r"^secure.range = 8: w has a value of .*, which is larger$"):
        encode({"w": torch.tensor([0.0, value])}, 1.0, 8.0)
