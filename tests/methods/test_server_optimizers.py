"""FedAvgM, FedAdagrad, FedAdam and FedYogi: two rounds of one number by hand, and what is sent."""

import math

import pytest
import torch
from by_hand import MODEL, WEIGHTS

from promptfed.methods import create
from promptfed.phases import Update
from tiny import near

TAU, ETA = 0.1, 0.5


def rounds(name: str, **settings: float) -> list[float]:
    """The weight after each of two rounds. In the first, clients with 1 and 3 samples move it from 1 to 3 and to 1: a
    mean change of .5; in the second, one client moves it by -.2."""
    method = create(name, settings)
    state = method.begin(MODEL, {"body.w": torch.tensor([1.0])}, 0)
    found = []
    for ups in ([(3.0, 1), (1.0, 3)], [(None, 5)]):
        here = state["body.w"]
        updates = [
            Update(i, {}, {"body.w": here - 0.2 if up is None else torch.tensor([up])}, n)
            for i, (up, n) in enumerate(ups)
        ]
        state = method.aggregate(state, updates)
        found.append(state["body.w"].item())
    return found


def test_fedavgm_adds_momentum_to_the_mean_change() -> None:
    # m is .5, then .9 x .5 - .2 = .25
    assert rounds("fedavgm") == pytest.approx([1.5, 1.75])
    assert rounds("fedavgm", server_lr=0.1, server_momentum=0.0) == pytest.approx([1.05, 1.03])


def test_fedadagrad_sums_squares() -> None:
    v = [TAU**2 + 0.25, TAU**2 + 0.25 + 0.04]
    first = 1 + ETA * 0.5 / (math.sqrt(v[0]) + TAU)
    expected = [first, first + ETA * -0.2 / (math.sqrt(v[1]) + TAU)]
    assert rounds("fedadagrad", tau=TAU, server_lr=ETA) == pytest.approx(expected)


def test_fedadam_averages_squares() -> None:
    v = [0.75 * TAU**2 + 0.25 * 0.25]
    v.append(0.75 * v[0] + 0.25 * 0.04)
    first = 1 + ETA * 0.2 * 0.5 / (math.sqrt(v[0]) + TAU)  # m = .8 x 0 + .2 x .5
    expected = [first, first + ETA * (0.8 * 0.1 - 0.2 * 0.2) / (math.sqrt(v[1]) + TAU)]
    found = rounds("fedadam", tau=TAU, server_lr=ETA, beta2=0.75, server_momentum=0.8)
    assert found == pytest.approx(expected)


def test_fedyogi_moves_towards_squares_at_a_bounded_rate() -> None:
    v = [TAU**2 + 0.25 * 0.25]  # .01 is below .25: v grows by a quarter of that
    v.append(v[0] - 0.25 * 0.04)  # .0725 is above .04: v falls by a quarter of that
    first = 1 + ETA * 0.2 * 0.5 / (math.sqrt(v[0]) + TAU)
    expected = [first, first + ETA * (0.8 * 0.1 - 0.2 * 0.2) / (math.sqrt(v[1]) + TAU)]
    found = rounds("fedyogi", tau=TAU, server_lr=ETA, beta2=0.75, server_momentum=0.8)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_moments_stay_on_the_server(name: str) -> None:
    method = create(name)
    state = method.begin(MODEL, dict(MODEL.weights), 0)
    state = method.aggregate(state, [Update(0, {}, near(MODEL.weights, 1), 1)])
    assert method.down(state, 0).keys() == set(WEIGHTS)
    assert len(state) == (2 if name == "fedavgm" else 3) * len(WEIGHTS)
    assert not method.personal
