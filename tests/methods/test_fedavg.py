"""FedAvg: descent on all weights, and a mean weighted by samples, against NumPy."""

import numpy as np
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, initial, local_round

from promptfed.methods import create
from promptfed.phases import Update
from tiny import Numbers, descend, distance, gradients, near, numbers, plan, same, work


def test_fedavg_descends_the_mean_cross_entropy_on_all_weights() -> None:
    method = create("fedavg", COMMON)
    one = work(MODEL.weights, N)
    expected = descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS))
    same(local_round(method, one).params, expected)
    assert distance(expected, numbers(MODEL.weights)) > 0.05


def test_fedavg_passes_momentum_and_weight_decay_on() -> None:
    method = create("fedavg", {**COMMON, "momentum": 0.6, "weight_decay": 0.3})

    def decayed(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        return {name: g + 0.3 * p[name] for name, g in gradients(p, x, y).items() if name != "x"}

    one = work(MODEL.weights, N)
    expected = descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS), decayed, momentum=0.6)
    same(local_round(method, one).params, expected)


def test_fedavg_weights_clients_by_their_samples() -> None:
    ups = [near(MODEL.weights, seed) for seed in range(3)]
    updates = [Update(i, {}, up, n) for i, (up, n) in enumerate(zip(ups, (1, 6, 13), strict=True))]
    state = create("fedavg").aggregate(dict(MODEL.weights), updates)
    expected = {
        name: np.average([up[name].numpy() for up in ups], axis=0, weights=[1, 6, 13]) for name in MODEL.weights
    }
    same(state, expected)
    assert distance(expected, {name: np.mean([up[name].numpy() for up in ups], axis=0) for name in ups[0]}) > 0.01


def test_aggregation_keeps_what_nobody_sent() -> None:
    state = create("fedavg").aggregate(
        {"body.x": torch.zeros(1), "kept": torch.ones(1)}, [Update(0, {}, {"body.x": torch.ones(1)}, 3)]
    )
    assert {name: p.item() for name, p in state.items()} == {"body.x": 1, "kept": 1}


def test_every_client_receives_the_global_model() -> None:
    method = create("fedavg")
    state = method.begin(MODEL, initial(method), 0)
    assert state.keys() == MODEL.weights.keys()
    assert all(
        torch.equal(method.down(state, client)[name], p) for client in (0, 9) for name, p in MODEL.weights.items()
    )
