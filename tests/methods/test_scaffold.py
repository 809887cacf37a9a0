"""SCAFFOLD's local steps and control variates against NumPy (Algorithm 1, option II)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, local_round

from promptfed import params as P
from promptfed.clients.messages import Train, read_update
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.phases import Update
from promptfed.privacy import Privacy
from promptfed.training import context
from tiny import Numbers, descend, distance, gradients, near, numbers, plan, same, toy_host, work


def corrected(c: Numbers, own: Numbers) -> Any:
    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {name: g[name] - own[name] + c[name] for name in p}

    return gradient


def test_every_step_is_corrected_by_c_minus_the_clients_own() -> None:
    method = create("scaffold", COMMON)
    c, own = near(MODEL.weights, 1), near(MODEL.weights, 2)
    sent = {"counted": torch.tensor([3.0]), "turn": torch.tensor(5.0)}
    one = work(MODEL.weights, N, down={**MODEL.weights, **P.nested("control", c), **sent})
    one.private = {**P.nested("control", own), **P.nested("before", near(own, 3)), "stamp": torch.tensor(3.0)}
    one.draws = (0, 6, 0)
    start, steps, rates = numbers(MODEL.weights), plan(N, B, 2), at(LR, *WEIGHTS)
    expected = descend(start, one.samples, steps, rates, corrected(numbers(c), numbers(own)))
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, steps, rates)) > 0.02


def test_two_rounds_of_two_clients(tmp_path: Path) -> None:
    """c_i' = c_i - c + (x - y_i) / (K lr) stays with the client; the server finds the change of c without it."""
    method = create("scaffold", {**COMMON, "epochs": 1, "server_lr": 0.5})
    host = toy_host(method, tmp_path)  # 8 and 6 samples: two steps each
    state = method.begin(MODEL, host.init, 0)
    for client in range(3):  # the third never trains
        state = method.admit(state, client, {}, 0)
    x = numbers(MODEL.weights)
    c = {name: np.zeros_like(p) for name, p in x.items()}
    own = [c, c]
    for round in (1, 2):
        updates, y = [], []
        for client, n in enumerate((8, 6)):
            _, (blob,) = host.train(
                [[host.work(client, method.down(state, client), round)]], Train(round=round, score=False)
            )
            up, stats = read_update(blob)
            assert (up.keys(), stats) == (set(WEIGHTS), {})
            updates.append(Update(client, {}, up, n))
            y.append(numbers(up))
        state = method.aggregate(state, updates)
        new = [{k: own[i][k] - c[k] + (x[k] - y[i][k]) / (2 * LR) for k in x} for i in (0, 1)]
        c = {k: c[k] + sum(new[i][k] - own[i][k] for i in (0, 1)) / 3 for k in c}
        x = {k: x[k] + 0.5 * np.mean([each[k] - x[k] for each in y], axis=0) for k in x}
        own = new
        for client in (0, 1):
            same(P.under(host.remembers(client, round + 1)[0], "control"), own[client], 1e-4)
        same({name: state[name] for name in WEIGHTS}, x)
        same(P.under(state, "control"), c, 1e-4)
    assert all(np.abs(c[name]).max() > 1e-3 for name in WEIGHTS)
    host.store.close()


def test_c_stays_the_mean_of_all_clients_when_one_joins_later() -> None:
    method = create("scaffold")
    state = method.begin(MODEL, dict(MODEL.weights), 0)
    for client in (0, 1):
        state = method.admit(state, client, {}, 0)
    first, second = near(MODEL.weights, 1), near(MODEL.weights, 2)
    state |= P.nested("control", {name: (p + second[name]) / 2 for name, p in first.items()})
    joined = method.admit(state, 2, {}, 3)
    same(P.under(joined, "control"), numbers({name: (p + second[name]) / 3 for name, p in first.items()}))


def test_the_clients_own_follows_from_what_it_sends_under_privacy(tmp_path: Path) -> None:
    method = create("scaffold", {**COMMON, "epochs": 1})
    host = toy_host(method, tmp_path)
    host.privacy, host.noise_seed = Privacy(clip=0.01, noise=1.0), 7
    down = method.down(method.admit(method.begin(MODEL, host.init, 0), 0, {}, 0), 0)
    _, (blob,) = host.train([[host.work(0, down, 1)]], Train(round=1, score=False))
    x, sent = numbers(MODEL.weights), numbers(read_update(blob)[0])
    same(P.under(host.remembers(0, 2)[0], "control"), {k: (x[k] - sent[k]) / (2 * LR) for k in x}, 1e-4)
    host.store.close()


def test_the_number_of_clients_is_not_sent() -> None:
    method = create("scaffold")
    state = method.admit(method.begin(MODEL, dict(MODEL.weights), 0), 0, {}, 0)
    assert torch.equal(state["clients"], torch.tensor(1.0))
    assert method.down(state, 0).keys() == {*WEIGHTS, *(f"control.{name}" for name in WEIGHTS), "turn", "counted"}


def test_a_run_that_was_begun_without_numbers_goes_on(tmp_path: Path) -> None:
    method = create("scaffold", {**COMMON, "epochs": 1})
    host = toy_host(method, tmp_path)
    state = method.admit(method.begin(MODEL, host.init, 0), 0, {}, 0)
    earlier = {name: p for name, p in state.items() if name not in ("turn", "counted")}
    own = near(MODEL.weights, 1)
    one = host.work(0, method.down(earlier, 0), 1)
    one.private = P.nested("control", own)
    same(method.client_constants(MODEL, one.params, context(one, MODEL)), numbers(own))
    _, (blob,) = host.train([[one]], Train(round=1, score=False))
    later = method.aggregate(earlier, [Update(0, {}, read_update(blob)[0], 8)])
    assert (later["turn"].item(), later["counted"].tolist()) == (1, [0])
    assert method.admit(earlier, 1, {}, 2)["counted"].tolist() == [-1, -1]
    host.store.close()


@pytest.mark.parametrize(
    ("name", "vector", "mean", "settings"),
    [("scaffold", "control", "control", {}), ("feddyn", "slope", "h", {"alpha": 2.0})],
)
def test_the_mean_stays_one_if_an_answer_is_lost(
    name: str, vector: str, mean: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The second answer of client 0: in the third round it trains with its vector of the first."""
    method = create(name, {**COMMON, "epochs": 1, **settings})
    host = toy_host(method, tmp_path)
    state = method.begin(MODEL, host.init, 0)
    for client in (0, 1):
        state = method.admit(state, client, {}, 0)
    kept: list[list[Numbers]] = []
    for round, lost in ((1, ()), (2, (0,)), (3, ())):
        updates, vectors = [], []
        for client, n in enumerate((8, 6)):
            one = host.work(client, method.down(state, client), round)
            _, (blob,) = host.train([[one]], Train(round=round, score=False))
            updates.append(Update(client, {}, read_update(blob)[0], n))
            vectors.append(numbers(P.under(host.remembers(client, round + 1)[0], vector)))
        kept.append(vectors)
        state = method.aggregate(state, [u for u in updates if u.client not in lost])
    before = numbers(P.under(host.remembers(0, 4)[0], "before"))
    assert distance(before, kept[0][0]) < 1e-6
    assert distance(before, kept[1][0]) > 0.01
    same(P.under(state, mean), {k: (kept[2][0][k] + kept[2][1][k]) / 2 for k in kept[2][0]}, 1e-4)
    host.store.close()


@pytest.mark.parametrize(("key", "value"), [("optimizer", "adam"), ("momentum", 0.9), ("cosine_rounds", 5)])
def test_settings_under_which_a_path_says_nothing_of_gradients_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^method\.{key} = {value!r}: scaffold reads mean gradients"):
        create("scaffold", {key: value})
