"""What SGPT's server makes of prompts, keys and selections, against NumPy."""

import itertools
from typing import Any

import numpy as np
import torch
from sgpt_toy import GROUP, HEAD, MODEL, SHARED, G, small, some
from torch import Tensor

from promptfed.methods.sgpt import Sgpt
from promptfed.phases import Update


def updates(method: Sgpt, sizes: tuple[int, ...], selected: Any) -> list[Update]:
    return [
        Update(i, {}, some(method, 10 + i), n, {} if s is None else {"selected": torch.tensor(s, dtype=torch.float32)})
        for i, (n, s) in enumerate(zip(sizes, selected, strict=True))
    ]


def numbers(values: list[Tensor]) -> np.ndarray:
    return np.stack([v.double().numpy() for v in values])


def test_server_rule() -> None:
    """Group 0 by selections (60, 20, 0 of 80), 1 by one client alone, 2 is rare with 50, 3 was never selected."""
    method = small(key_momentum=0.25, prompt_momentum=0.75)
    state = {**some(method), "counts": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    sent = updates(method, (2, 5, 3), [(60, 0, 1, 0), (20, 0, 40, 0), (0, 51, 9, 0)])
    new = method.aggregate(state, sent)
    assert set(new) == set(state)
    for name in (*SHARED, *GROUP, *HEAD):
        mean = np.tensordot([0.2, 0.5, 0.3], numbers([u.up[name] for u in sent]), 1)
        rate = 0.75 if name in GROUP else 0
        expected = rate * state[name].double().numpy() + (1 - rate) * mean
        np.testing.assert_allclose(new[name], expected, rtol=1e-5, atol=1e-6)
        assert new[name].dtype == torch.float32
    keys = numbers([u.up["keys"] for u in sent])
    weights = np.array([[0.75, 0, 1 / 3, 1 / 3], [0.25, 0, 1 / 3, 1 / 3], [0, 1, 1 / 3, 1 / 3]])
    mean = np.einsum("cg,cgw->gw", weights, keys)
    np.testing.assert_allclose(new["keys"], 0.25 * state["keys"].numpy() + 0.75 * mean, rtol=1e-5, atol=1e-6)
    assert new["counts"].tolist() == [81, 53, 53, 4]
    assert torch.equal(method.down(new, 0)["counts"], new["counts"])


def test_table_4_without_momentum_and_with_keys_averaged_by_samples() -> None:
    method = small(key_momentum=0, prompt_momentum=0, key_weights="samples")
    state = {**some(method), "counts": torch.zeros(G)}
    sent = updates(method, (1, 3), [(100, 0, 0, 0), (0, 100, 70, 0)])
    new = method.aggregate(state, sent)
    for name in ("keys", *GROUP):
        mean = np.tensordot([0.25, 0.75], numbers([u.up[name] for u in sent]), 1)
        np.testing.assert_allclose(new[name], mean, rtol=1e-5, atol=1e-6)
    assert new["counts"].tolist() == [100, 100, 70, 0]


def test_from_how_many_selections_on_clients_weigh_by_them() -> None:
    state = {**some(small()), "counts": torch.zeros(G)}
    sent = updates(small(), (1, 1), [(2, 0, 0, 0), (0, 0, 0, 0)])
    by_selections = small(rare=1, key_momentum=0).aggregate(state, sent)["keys"]
    uniform = small(rare=2, key_momentum=0).aggregate(state, sent)["keys"]
    keys = [u.up["keys"] for u in sent]
    torch.testing.assert_close(by_selections[0], keys[0][0])
    torch.testing.assert_close(uniform[0], (keys[0][0] + keys[1][0]) / 2)
    for found in (by_selections, uniform, small(rare=0, key_momentum=0).aggregate(state, sent)["keys"]):
        torch.testing.assert_close(found[1:], (keys[0][1:] + keys[1][1:]) / 2)


def test_clients_that_selected_nothing() -> None:
    """Shared prompts alone have no keys; zero epochs select nothing."""
    for method in (small(training="shared"), small(epochs=0)):
        state = {**some(method), "counts": torch.zeros(G)}
        new = method.aggregate(state, updates(method, (1, 2), [None, None]))
        assert set(new) == set(state)
        assert all(p.isfinite().all() for p in new.values())
        assert not new["counts"].any()


def test_the_order_of_updates_does_not_show() -> None:
    method = small()
    state = {**some(method), "counts": torch.tensor([2.0**24, 1.0, 0.0, 7.0])}
    sent = updates(method, (7, 3, 11), [(70, 1, 1, 0), (13, 0, 90, 0), (1, 5, 33, 0)])
    first = method.aggregate(state, sent)
    for order in itertools.permutations(sent):
        again = method.aggregate(state, list(order))
        for name, p in first.items():
            assert torch.equal(p, again[name]), name


def test_the_server_starts_with_no_selections() -> None:
    method = small()
    init = method.tuning.init(MODEL, 0)
    state = method.begin(MODEL, init, 0)
    assert set(state) == {*init, "counts"}
    assert state["counts"].tolist() == [0] * G
    assert set(method.start(init, state, {}, {})) == set(init)
