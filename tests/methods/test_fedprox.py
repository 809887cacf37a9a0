"""FedProx's proximal term (Eq. 2) against NumPy."""

import pytest
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, context, local_round, proximal, whole

from promptfed.methods import create
from tiny import arrays, cross_entropy, descend, distance, near, numbers, plan, same, samples, work


def test_fedprox_is_held_near_what_it_received() -> None:
    method = create("fedprox", {**COMMON, "mu": 3.0})
    one = work(MODEL.weights, N, down=MODEL.weights)
    start = numbers(MODEL.weights)
    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), proximal(3.0, start))
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS))) > 0.02


def test_fedprox_adds_half_mu_times_the_squared_distance() -> None:
    method = create("fedprox", {"mu": 0.5})
    p, down = dict(MODEL.weights), near(MODEL.weights, 1)
    data = samples(6, 1)
    squared = sum(float(((p[name] - down[name]).double() ** 2).sum()) for name in p)
    expected = cross_entropy(numbers(p), *arrays(data)) + 0.5 / 2 * squared
    loss, _ = method.loss(MODEL, p, whole(), context(method, down))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert squared > 0.5
