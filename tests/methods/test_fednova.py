"""FedNova's normalised averaging against a loop over clients and steps."""

import numpy as np
import pytest
from by_hand import MODEL

from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.fednova import FedNova
from promptfed.phases import Phase, Update
from tiny import near, numbers, same


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_changes_are_divided_by_how_far_gradients_carry(momentum: float) -> None:
    method = create("fednova", {"epochs": 2, "batch_size": 4, "momentum": momentum})
    sizes, x = (3, 9, 16), numbers(MODEL.weights)
    ups = [near(MODEL.weights, seed) for seed in range(3)]
    state = method.aggregate(dict(MODEL.weights), [Update(i, {}, ups[i], n) for i, n in enumerate(sizes)])
    lengths = []
    for steps in (2, 6, 8):  # two epochs of 1, 3 and 4 batches
        velocity, path = 0.0, 0.0
        for _ in range(steps):  # SGD with momentum on a gradient of one
            velocity = momentum * velocity + 1
            path += velocity
        lengths.append(path)
    shares = [n / sum(sizes) for n in sizes]
    tau = sum(p * a for p, a in zip(shares, lengths, strict=True))
    expected = {}
    for name, start in x.items():
        parts = [p * (numbers(up)[name] - start) / a for p, up, a in zip(shares, ups, lengths, strict=True)]
        expected[name] = start + tau * np.sum(parts, axis=0)
    same(state, expected)


def test_with_equally_many_steps_it_is_fedavg() -> None:
    ups = [near(MODEL.weights, seed) for seed in range(2)]
    updates = [Update(i, {}, ups[i], n) for i, n in enumerate((5, 8))]
    state, mean = (
        create(name, {"batch_size": 8}).aggregate(dict(MODEL.weights), updates) for name in ("fednova", "fedavg")
    )
    same(state, numbers(mean))


def test_steps_of_a_phase() -> None:
    assert [Phase({}, 4, epochs=2).length(n) for n in (0, 1, 4, 5)] == [0, 2, 2, 4]
    assert [Phase({}, 4, steps=3).length(n) for n in (0, 1, 9)] == [0, 3, 3]


def test_another_optimiser_is_refused() -> None:
    with pytest.raises(UserError, match=r"^method\.optimizer = 'adam': fednova .* use 'sgd'$"):
        create("fednova", {"optimizer": "adam"})
    assert isinstance(create("fednova", {"momentum": 0.9}), FedNova)
