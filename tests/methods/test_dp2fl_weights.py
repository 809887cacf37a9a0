"""DP2FL's weighting rules by hand, and what holds for any losses."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from promptfed.methods.dp2fl.data_prompt import combine, distance
from promptfed.methods.dp2fl.weights import EPS, global_weights, local_weights

# ---- global weights (Eq. 8)


def test_global_weights_by_hand() -> None:
    """S = 8: (8 - 1) / 16, (8 - 2) / 16, (8 - 5) / 16."""
    assert global_weights([1.0, 2.0, 5.0]) == pytest.approx([7 / 16, 6 / 16, 3 / 16])
    assert global_weights([3.0, 5.0]) == pytest.approx([5 / 8, 3 / 8])


def test_global_weights_at_the_limits() -> None:
    assert global_weights([4.2]) == [1.0]
    assert global_weights([0.0]) == [1.0]
    assert global_weights([0.0, 0.0, 0.0, 0.0]) == [0.25] * 4
    assert global_weights([0.0, 3.0]) == [1.0, 0.0]  # all the loss is one client's


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=12))
def test_global_weights_sum_to_one_and_fall_with_the_loss(totals: list[float]) -> None:
    found = global_weights(totals)
    assert math.fsum(found) == pytest.approx(1)
    assert min(found) >= 0
    ranked = [w for _, w in sorted(zip(totals, found, strict=True), key=lambda pair: pair[0])]
    assert all(a >= b - 1e-12 for a, b in pairwise(ranked))


# ---- local weights (Eq. 9-17)

UNIT = 1 - EPS  # a distance at which the raw weight is L - loss


def local(losses: list[float], before: float = 1.0, distances: list[float] | None = None, **given: Any) -> list[float]:
    return local_weights(before, losses, distances or [UNIT] * len(losses), **{"alpha": 1.2, "beta": 0.2, **given})


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.5, 0.8], [5 / 7, 2 / 7]),  # positive clients only
        ([0.5, 0.8, 1.05, 1.1, 1.3], [0.5, 0.2, 0.2, 0.1, 0]),  # m = .2, M = -.05: f = .5 .2 | .2 .1 | 0
        ([1.05, 1.1, 1.15, 2.0], [0.2 * 5 / 12, 0.2 * 4 / 12, 0.2 * 3 / 12, 0]),  # S' = -.3
        ([1.1, 2.0], [0.2, 0]),  # one retained negative
        ([1.3, 2.0, math.inf, math.nan], [0, 0, 0, 0]),  # all discarded
        ([0.5, 1.0, 1.1], [0.5, 0.5, 0]),  # M = 0: m for a loss of exactly L, the others nothing
        ([1.0, 1.0, 1.4], [0.1, 0.1, 0]),  # S' = 0
        ([1.0, 1.1], [0.2, 0]),  # nobody positive, S' = -.1: (S' - 0) / S' and 0
        ([0.4], [1]),  # K = 1
        ([1.1], [0.2]),
        ([1.9], [0]),
        ([0.5, math.inf, math.nan], [1, 0, 0]),
        ([], []),
    ],
)
def test_local_weights_by_hand(losses: list[float], expected: list[float]) -> None:
    assert local(losses) == pytest.approx(expected, abs=1e-12)


def test_local_weights_divide_by_the_distance() -> None:
    """Raw (1 - .5) / (4 + eps), (1 - .8) / (1 + eps); at no distance at all the divisor is eps."""
    found = local([0.5, 0.8], distances=[4.0, 1.0])
    raw = np.array([0.5 / (4 + 1e-5), 0.2 / (1 + 1e-5)])
    assert found == pytest.approx(raw / raw.sum())
    near = local([0.5, 0.8], distances=[0.0, 1.0])
    assert near[0] == pytest.approx(5e4 / (5e4 + 0.2 / (1 + 1e-5)))


def test_thresholds_belong_to_the_worse_side() -> None:
    """L = 2, alpha = 1.5: 2 is no improvement, 3 is discarded."""
    assert local([1.0, 2.0, 3.0], before=2.0, alpha=1.5) == pytest.approx([0.5, 0.5, 0])
    assert local([3.0], before=2.0, alpha=1.5) == [0]


@pytest.mark.parametrize("before", [0.0, math.inf, math.nan])
def test_without_a_loss_to_improve_on_the_prompt_stays(before: float) -> None:
    assert local([0.0, 0.5, 1.0], before=before) == [0, 0, 0]


def test_proportional_negatives() -> None:
    """f = .5 and gamma .05."""
    assert local([0.5, 1.05], rule="proportional", gamma=0.5) == pytest.approx([0.5 / 0.525, 0.025 / 0.525])
    assert local([0.5, 1.05], rule="proportional", gamma=0.0) == [1, 0]
    assert local([1.05, 1.1], rule="proportional", gamma=9.0) == local([1.05, 1.1])  # nobody positive: no gamma


def test_negatives_as_in_the_paper() -> None:
    """Raw .5 | -.1 -.4, as in docs/methods/dp2fl.md. gamma = .5 / .1 = 5: f = .5, .5, 2. Bounded: f = .5, .5, .125."""
    given: dict[str, Any] = {"losses": [0.5, 1.1, 1.4], "alpha": 1.5}
    assert local(**given, rule="paper") == pytest.approx([1 / 6, 1 / 6, 2 / 3])
    assert local(**given) == pytest.approx([4 / 9, 4 / 9, 1 / 9])
    assert local(**given, rule="proportional", gamma=0.1) == pytest.approx([0.5 / 0.55, 0.01 / 0.55, 0.04 / 0.55])
    # m is the lowest of the positive ones: raw .5 .2 | -.1, gamma = 2
    assert local([0.5, 0.8, 1.1], rule="paper") == pytest.approx([5 / 9, 2 / 9, 2 / 9])
    # A loss of exactly L has raw weight 0, and weighs nothing.
    assert local([0.5, 1.0, 1.1], rule="paper") == pytest.approx([0.5, 0, 0.5])
    assert local([0.5, 1.0], rule="paper") == [1, 0]
    assert local([1.05, 1.1], rule="paper") == local([1.05, 1.1])  # nobody positive


LOSSES = st.lists(st.integers(0, 3000).map(lambda n: n / 1000), min_size=1, max_size=12)


@given(LOSSES, st.integers(1, 3000), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_retained_negatives_weigh_less_than_the_weakest_positive(losses: list[float], thousandths: int, r: Any) -> None:
    before = thousandths / 1000
    distances = [r.uniform(0, 3) for _ in losses]
    found = local(losses, before, distances)
    positive = [w for w, loss in zip(found, losses, strict=True) if loss < before]
    retained = [w for w, loss in zip(found, losses, strict=True) if before <= loss < 1.2 * before]
    discarded = [w for w, loss in zip(found, losses, strict=True) if loss >= 1.2 * before]
    assert all(w == 0 for w in discarded)
    assert sum(found) == pytest.approx(1 if positive else 0.2 if retained else 0)
    if positive:
        assert min(positive) > 0
        assert all(w <= min(positive) * (1 + 1e-12) for w in retained)
        if before not in losses:  # M = 0 leaves nothing for the others
            assert all(w > 0 for w in retained)
    # At equal distances they fall as the loss grows.
    even = sorted(zip(losses, local(losses, before), strict=True))
    fallen = [w for loss, w in even if before <= loss < 1.2 * before]
    assert all(a >= b - 1e-12 for a, b in pairwise(fallen))


@given(LOSSES, st.randoms(use_true_random=False))
def test_local_weights_do_not_depend_on_the_order_to_the_last_bit(losses: list[float], r: Any) -> None:
    order = list(range(len(losses)))
    distances = [r.uniform(0, 3) for _ in losses]
    r.shuffle(order)
    found = local(losses, 1.5, distances)
    again = local([losses[i] for i in order], 1.5, [distances[i] for i in order])
    assert [found[i] for i in order] == again


def test_distance_and_combination() -> None:
    own = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    other = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([[7.0]])}
    far = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([[0.0]])}
    assert distance(other, own) == 5
    found = combine(own, [other, far], [0.5, 0.25])  # own + .5 (0, 3, 4) - .25 (1, 2, 3)
    assert found["a"].tolist() == [0.75, 3.0]
    assert found["b"].tolist() == [[4.25]]
    assert found["a"].dtype == torch.float32
    assert all(torch.equal(p, own[name]) for name, p in combine(own, [other], [0.0]).items())
