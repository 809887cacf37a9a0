"""FedDyn's objective, client gradients and server rule against NumPy (Algorithm 1)."""

from pathlib import Path

import numpy as np
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, local_round

from promptfed import params as P
from promptfed.clients.messages import Train, read_update
from promptfed.methods import create
from promptfed.phases import Update
from tiny import Numbers, descend, distance, gradients, near, numbers, plan, same, toy_host, work


def test_a_client_descends_the_regularised_objective() -> None:
    method = create("feddyn", {**COMMON, "alpha": 2.0})
    slope = near(MODEL.weights, 2)
    one = work(MODEL.weights, N, down={**MODEL.weights, "counted": torch.tensor([3.0]), "turn": torch.tensor(5.0)})
    one.private = {**P.nested("slope", slope), **P.nested("before", near(slope, 3)), "stamp": torch.tensor(3.0)}
    one.draws = (0, 6, 0)
    start, linear = numbers(MODEL.weights), numbers(slope)

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {name: g[name] - linear[name] + 2.0 * (p[name] - start[name]) for name in p}

    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), gradient)
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS))) > 0.02


def test_h_stays_the_mean_of_all_clients_when_one_joins_later() -> None:
    method = create("feddyn")
    state = method.begin(MODEL, dict(MODEL.weights), 0)
    for client in (0, 1, 2):
        state = method.admit(state, client, {}, 0)
    h = near(MODEL.weights, 1)
    joined = method.admit({**state, **P.nested("h", h)}, 3, {}, 2)
    same(P.under(joined, "h"), numbers({name: 3 / 4 * p for name, p in h.items()}))


def test_two_rounds_of_two_clients_of_three(tmp_path: Path) -> None:
    alpha = 0.5
    method = create("feddyn", {**COMMON, "epochs": 1, "alpha": alpha})
    host = toy_host(method, tmp_path)
    state = method.begin(MODEL, host.init, 0)
    for client in range(3):
        state = method.admit(state, client, {}, 0)
    theta = numbers(MODEL.weights)
    h = {name: np.zeros_like(p) for name, p in theta.items()}
    slopes = [h, h]
    for round in (1, 2):
        updates, y = [], []
        for client in (0, 1):
            assert method.down(state, client).keys() == {*WEIGHTS, "turn", "counted"}
            _, (blob,) = host.train(
                [[host.work(client, method.down(state, client), round)]], Train(round=round, score=False)
            )
            up, _ = read_update(blob)
            updates.append(Update(client, {}, up, 8 - 2 * client))
            y.append(numbers(up))
        state = method.aggregate(state, updates)
        slopes = [{k: slopes[i][k] - alpha * (y[i][k] - theta[k]) for k in theta} for i in (0, 1)]
        h = {k: h[k] - alpha / 3 * sum(each[k] - theta[k] for each in y) for k in h}
        theta = {k: np.mean([each[k] for each in y], axis=0) - h[k] / alpha for k in theta}
        same({name: state[name] for name in WEIGHTS}, theta)
        for client in (0, 1):
            same(P.under(host.remembers(client, round + 1)[0], "slope"), slopes[client])
    host.store.close()
