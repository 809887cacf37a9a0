"""Params against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from promptfed import params as P


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_mean_is_weighted() -> None:
    items = [{"w": vector(0, 8), "b": vector(1)}, {"w": vector(4, 0), "b": vector(5)}]
    found = P.mean(items, [1, 3])
    assert found["w"].tolist() == [3.0, 2.0]  # (1 x 0 + 3 x 4) / 4, (1 x 8 + 3 x 0) / 4
    assert found["b"].tolist() == [4.0]


def test_mean_does_not_depend_on_the_scale_of_the_weights() -> None:
    items = [{"w": vector(0, 8)}, {"w": vector(4, 0)}]
    assert P.mean(items, [10, 30])["w"].tolist() == [3.0, 2.0]
    assert P.mean(items, [0, 2])["w"].tolist() == [4.0, 0.0]


def test_mean_leaves_its_items_alone_and_owns_its_memory() -> None:
    first, second = {"w": vector(1, 2)}, {"w": vector(3, 4)}
    found = P.mean([first, second], [1, 1])
    found["w"].add_(100)
    assert first["w"].tolist() == [1, 2]
    assert second["w"].tolist() == [3, 4]
    alone = P.mean([first], [7])
    alone["w"].add_(100)
    assert first["w"].tolist() == [1, 2]


@pytest.mark.parametrize(("count", "weights"), [(0, []), (2, [0, 0])])
def test_mean_of_nothing_is_an_error(count: int, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive total weight"):
        P.mean([{"w": vector(1)}] * count, weights)


def test_mean_needs_one_weight_an_item() -> None:
    with pytest.raises(ValueError):
        P.mean([{"w": vector(1)}] * 2, [1])


def test_mean_of_empty_params_is_empty() -> None:
    assert P.mean([{}, {}], [1, 2]) == {}


def test_sqdist_sums_over_all_names_of_the_first() -> None:
    a = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": vector(5)}
    b = {"w": torch.tensor([[0.0, 2.0], [1.0, 7.0]]), "b": vector(1), "further": vector(100)}
    assert P.sqdist(a, b).item() == 1 + 0 + 4 + 9 + 16


def test_gradient_of_sqdist_is_twice_the_difference() -> None:
    a, b = {"w": vector(1, 5).requires_grad_()}, {"w": vector(4, 3)}
    P.sqdist(a, b).backward()
    assert a["w"].grad is not None
    assert a["w"].grad.tolist() == [-6, 4]


def test_sqnorm_sums_over_all_names() -> None:
    assert P.sqnorm({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": vector(-5)}).item() == 1 + 4 + 9 + 16 + 25


def test_stack_puts_clients_on_a_leading_axis() -> None:
    items = [{"w": torch.full((2, 3), float(i)), "b": vector(i)} for i in range(4)]
    stacked = P.stack(items)
    assert stacked["w"].shape == (4, 2, 3)
    assert stacked["w"][2].eq(2).all()
    assert stacked["b"].tolist() == [[0], [1], [2], [3]]


def test_unstack_is_the_inverse_and_owns_its_memory() -> None:
    items = [{"w": torch.full((2, 3), float(i)), "b": vector(i)} for i in range(3)]
    stacked = P.stack(items)
    parts = P.unstack(stacked, 3)
    for part, item in zip(parts, items, strict=True):
        assert list(part) == list(item)
        assert all(torch.equal(part[name], item[name]) for name in item)
    parts[0]["w"].add_(100)
    assert stacked["w"][0].eq(0).all()
    # A part of its own, not a view that keeps all clients in memory.
    assert parts[1]["w"].untyped_storage().nbytes() == 6 * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_finds_one_bad_number(bad: float) -> None:
    good = {"w": torch.zeros(5), "b": torch.zeros(2, 2)}
    assert P.finite(good)
    assert P.finite({})
    good["b"][1, 0] = bad
    assert not P.finite(good)


def test_nbytes_counts_elements_by_their_size() -> None:
    params = {
        "float32": torch.zeros(3, 5),
        "float16": torch.zeros(7, dtype=torch.float16),
        "int64": torch.zeros(2, dtype=torch.int64),
        "scalar": torch.tensor(1.0),
        "view": torch.zeros(10, 10)[:, :2],
    }
    assert P.nbytes(params) == 15 * 4 + 7 * 2 + 2 * 8 + 4 + 20 * 4
    assert P.numel(params) == 15 + 7 + 2 + 1 + 20
    assert P.nbytes({}) == P.numel({}) == 0


def test_to_moves_every_entry() -> None:
    moved = P.to({"w": torch.zeros(2), "b": torch.zeros(1)}, torch.device("meta"))
    assert [p.device.type for p in moved.values()] == ["meta", "meta"]


def test_mean_agrees_with_numpy_on_many_items() -> None:
    g = np.random.default_rng(0)
    values, weights = g.normal(size=(9, 4)).astype(np.float32), g.integers(1, 50, 9)
    found = P.mean([{"w": torch.from_numpy(v)} for v in values], weights.tolist())["w"]
    np.testing.assert_allclose(found, np.average(values, axis=0, weights=weights), rtol=1e-5, atol=1e-6)


def test_names_below_a_name() -> None:
    held = {"val.3.x": torch.zeros(1), "val.10.x": torch.ones(2), "value": torch.zeros(3), "val.3.y": torch.zeros(4)}
    assert {name: p.numel() for name, p in P.under(held, "val").items()} == {"3.x": 1, "10.x": 2, "3.y": 4}
    assert {name: p.numel() for name, p in P.under(held, "val.3").items()} == {"x": 1, "y": 4}
    assert P.under(P.nested("a.b", held), "a.b") == held
    assert P.under(P.nested("private", held, "/"), "private", "/") == held
    assert P.under(held, "nothing") == {}
    grouped = P.groups(P.under(held, "val"))
    assert {group: list(parts) for group, parts in grouped.items()} == {"3": ["x", "y"], "10": ["x"]}
