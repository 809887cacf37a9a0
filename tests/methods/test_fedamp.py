"""FedAMP's attention between clients against NumPy, and its proximal term."""

from pathlib import Path

import numpy as np
import pytest
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, local_round, proximal

from promptfed.clients.messages import Train, read_update
from promptfed.methods import create
from promptfed.phases import Update
from tiny import descend, near, numbers, plan, same, toy_host, work


def test_similar_clients_count_more() -> None:
    method = create("fedamp", {"own_share": 0.4, "sigma": 3.0})
    state = method.begin(MODEL, dict(MODEL.weights), 0)
    same(method.down(state, 2), numbers(MODEL.weights), 0)
    ups = {2: near(MODEL.weights, 1), 10: near(MODEL.weights, 2, 0.05), 1: near(MODEL.weights, 3, 1.0)}
    state = method.aggregate(state, [Update(client, {}, up, 1 + client) for client, up in ups.items()])
    flat = {client: np.concatenate([numbers(up)[name].ravel() for name in WEIGHTS]) for client, up in ups.items()}
    for client, w in flat.items():
        others = [c for c in flat if c != client]
        cosines = [w @ flat[c] / np.linalg.norm(w) / np.linalg.norm(flat[c]) for c in others]
        shares = 0.6 * np.exp(3.0 * np.array(cosines)) / np.exp(3.0 * np.array(cosines)).sum()
        assert abs(shares[0] - shares[1]) > 0.02
        expected = {
            name: 0.4 * p + sum(s * numbers(ups[c])[name] for s, c in zip(shares, others, strict=True))
            for name, p in numbers(ups[client]).items()
        }
        same(method.down(state, client), expected)
    # A client that has not trained yet receives the plain mean; one that does not answer keeps its model.
    same(method.down(state, 7), {n: np.mean([numbers(up)[n] for up in ups.values()], axis=0) for n in WEIGHTS})
    later = method.aggregate(state, [Update(2, {}, ups[1], 1)])
    same({n: later[f"model.10.{n}"] for n in WEIGHTS}, numbers(ups[10]), 0)


@pytest.mark.parametrize("own_share", [0.0, 1.0])
def test_a_single_client_receives_its_own_model(own_share: float) -> None:
    method = create("fedamp", {"own_share": own_share})
    up = near(MODEL.weights, 1)
    state = method.aggregate(method.begin(MODEL, dict(MODEL.weights), 0), [Update(3, {}, up, 1)])
    same(method.down(state, 3), numbers(up), 0)


def test_a_client_is_held_near_what_it_received() -> None:
    method = create("fedamp", {**COMMON, "lamda": 3.0})
    one = work(MODEL.weights, N, down=MODEL.weights)
    start = numbers(MODEL.weights)
    same(
        local_round(method, one).params,
        descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), proximal(3.0, start)),
    )


def test_a_client_trains_from_what_it_received_and_predicts_with_its_own_model(tmp_path: Path) -> None:
    method = create("fedamp", {**COMMON, "epochs": 1})
    host = toy_host(method, tmp_path)
    _, (blob,) = host.train([[host.work(0, dict(MODEL.weights), 1)]], Train(round=1, score=False))
    sent, _ = read_update(blob)
    down = near(MODEL.weights, 8)
    same(host.work(0, down, 2).params, numbers(down), 0)
    same(host.work(0, down, 2, predicts=True).params, numbers(sent), 0)
    same(host.work(1, down, 2, predicts=True).params, numbers(down), 0)  # it has not trained yet
    host.store.close()
