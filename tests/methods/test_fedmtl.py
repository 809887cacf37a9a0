"""FedMTL's loss (Eq. 1) against NumPy, and a server that keeps every client's model."""

import numpy as np
import pytest
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, context, initial, local_round, whole

from promptfed.clients.wire import pack, unpack
from promptfed.methods import create
from promptfed.params import Params
from promptfed.phases import Update
from tiny import Numbers, arrays, cross_entropy, descend, gradients, near, numbers, plan, same, samples, work


def mtl_down(own: Params, mean: Params) -> Params:
    return {**own, **{f"mean.{name}": p for name, p in mean.items()}}


def test_fedmtl_descends_cross_entropy_with_relation_and_ridge() -> None:
    method = create("fedmtl", {**COMMON, "iterations": 21, "relation": 1.5, "ridge": 0.4})
    mean = near(MODEL.weights, 6)
    center = numbers(mean)

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {name: g[name] + 2 * 1.5 * (v - center[name]) + 2 * 0.4 * v for name, v in p.items()}

    one = work(MODEL.weights, N, down=mtl_down(MODEL.weights, mean))
    steps = plan(N, B, 2)
    assert len(steps) == 6  # 21 sample visits are ceil(21 / 4) = 6 steps
    expected = descend(numbers(MODEL.weights), one.samples, steps, at(LR, *WEIGHTS), gradient)
    same(local_round(method, one).params, expected)


def test_fedmtls_loss_by_hand() -> None:
    method = create("fedmtl", {"relation": 0.5, "ridge": 0.25})
    p, mean = dict(MODEL.weights), near(MODEL.weights, 6)
    loss, _ = method.loss(MODEL, p, whole(), context(method, mtl_down(p, mean)))
    far = sum(float(((p[n] - mean[n]).double() ** 2).sum()) for n in p)
    norm = sum(float((p[n].double() ** 2).sum()) for n in p)
    expected = cross_entropy(numbers(p), *arrays(samples(6, 1))) + 0.5 * far + 0.25 * norm
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def one_number(value: float) -> Params:
    return {"body.w": torch.tensor([value])}


def test_fedmtls_server_keeps_all_models_and_their_plain_mean() -> None:
    method = create("fedmtl")
    state = method.begin(MODEL, one_number(9.0), 0)
    # An unseen client receives the mean as its model.
    assert {n: p.item() for n, p in method.down(state, 3).items()} == {"body.w": 9, "mean.body.w": 9}
    # Numbers of samples do not weight the mean of the models.
    state = method.aggregate(state, [Update(3, {}, one_number(1.0), 100), Update(12, {}, one_number(5.0), 1)])
    assert {n: p.item() for n, p in method.down(state, 3).items()} == {"body.w": 1, "mean.body.w": 3}
    assert {n: p.item() for n, p in method.down(state, 12).items()} == {"body.w": 5, "mean.body.w": 3}
    # Client 1 is not a prefix of client 12.
    assert {n: p.item() for n, p in method.down(state, 1).items()} == {"body.w": 3, "mean.body.w": 3}
    # Whoever does not take part keeps its model, and counts in the mean.
    state = method.aggregate(state, [Update(1, {}, one_number(6.0), 7), Update(3, {}, one_number(4.0), 7)])
    own = [method.down(state, client)["body.w"].item() for client in (1, 3, 12)]
    assert own == [6, 4, 5]
    assert method.down(state, 99)["mean.body.w"].item() == 5


def test_what_fedmtl_sends_to_an_unseen_client_can_be_packed() -> None:
    method = create("fedmtl")
    state = method.begin(MODEL, initial(method), 0)
    found, _ = unpack(pack(method.down(state, 0)))
    assert found.keys() == {*WEIGHTS, *(f"mean.{name}" for name in WEIGHTS)}
