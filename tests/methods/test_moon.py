"""MOON's contrastive term (Eq. 3), differentiated by hand, and what a client remembers for it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, context, contrastive, local_round, whole

from promptfed.clients.messages import Train, read_update
from promptfed.methods import create
from promptfed.params import Params
from tiny import (
    BODY,
    arrays,
    cross_entropy,
    descend,
    distance,
    features,
    near,
    numbers,
    plan,
    same,
    samples,
    toy_host,
    work,
)


def test_moon_draws_features_to_the_received_model_and_away_from_the_previous_one() -> None:
    method = create("moon", {**COMMON, "mu": 2.0, "temperature": 0.4})
    memory = {name: p for name, p in near(MODEL.weights, 4, scale=0.5).items() if name in BODY}
    one = work(MODEL.weights, N, down=MODEL.weights, memory=memory)
    start, previous = numbers(MODEL.weights), {**numbers(MODEL.weights), **numbers(memory)}
    lr = at(LR, *WEIGHTS)
    expected = descend(start, one.samples, plan(N, B, 2), lr, contrastive(2.0, 0.4, start, previous))
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), lr)) > 0.02
    # Received and previous model are not interchangeable.
    swapped = descend(start, one.samples, plan(N, B, 2), lr, contrastive(2.0, 0.4, previous, start))
    assert distance(expected, swapped) > 0.02


@pytest.mark.parametrize("memory", [{}, {name: MODEL.weights[name] for name in BODY}])
def test_moon_in_the_first_round_has_no_previous_model_and_trains_as_fedavg(memory: Params) -> None:
    """The received model stands on both sides: the term is log 2 and has no slope."""
    method = create("moon", {**COMMON, "mu": 3.0, "epochs": 1})
    one = work(MODEL.weights, N, down=MODEL.weights, memory=memory)
    done = local_round(method, one)
    start = numbers(MODEL.weights)
    same(done.params, descend(start, one.samples, plan(N, B, 1), at(LR, *WEIGHTS)))
    x, y = arrays(one.samples)
    plain, p = 0.0, start
    for index in plan(N, B, 1):
        plain += cross_entropy(p, x[index], y[index]) * len(index)
        p = descend(p, one.samples, [index], at(LR, *WEIGHTS))
    assert done.loss == pytest.approx(plain / N + 3 * np.log(2), rel=1e-5)


def test_moons_loss_by_hand() -> None:
    """Features at right angles to the previous model's and along the received one's."""
    method = create("moon", {"mu": 2.0, "temperature": 0.5})
    batch = whole(2)
    p = dict(MODEL.weights)
    z = torch.from_numpy(features(numbers(p), arrays(samples(2, 1))[0])).float()
    other = torch.stack([z[:, 1], -z[:, 0], z[:, 3], -z[:, 2]], 1)
    batch = batch._replace(extra={"received": 5 * z, "previous": other})
    loss, _ = method.loss(MODEL, p, batch, context(method))
    term = -np.log(np.exp(1 / 0.5) / (np.exp(1 / 0.5) + np.exp(0)))
    assert loss.item() == pytest.approx(cross_entropy(numbers(p), *arrays(samples(2, 1))) + 2 * term, rel=1e-5)


def test_moons_reference_features_are_those_of_the_received_and_the_remembered_body() -> None:
    method = create("moon")
    now, down, memory = (near(MODEL.weights, seed) for seed in (1, 2, 3))
    memory = {name: memory[name] for name in BODY}
    found = method.sample_constants(MODEL, now, whole(), context(method, down, memory))
    x, _ = arrays(samples(6, 1))
    same(found, {"received": features(numbers(down), x), "previous": features(numbers(memory), x)})


def test_moon_remembers_the_body_it_trained_last(tmp_path: Path) -> None:
    method = create("moon", {**COMMON, "epochs": 1})
    host = toy_host(method, tmp_path)
    first = host.work(0, dict(MODEL.weights), 1)
    same(first.memory, {name: p for name, p in numbers(MODEL.weights).items() if name in BODY})
    _, blobs = host.train([[first]], Train(round=1, score=False))
    sent, _ = read_update(blobs[0])
    assert sent.keys() == set(WEIGHTS)
    down = near(MODEL.weights, 8)
    second = host.work(0, down, 2)
    same(second.memory, {name: p for name, p in numbers(sent).items() if name in BODY}, 0)
    same(second.params, numbers(down), 0)
    # Trained again, round 1 starts from what was known before it; the other client knows nothing of this one.
    for again in (host.work(0, down, 1), host.work(1, down, 2)):
        same(again.memory, {name: p for name, p in numbers(down).items() if name in BODY}, 0)
    host.store.close()


def test_moon_remembers_all_that_features_depend_on() -> None:
    roles = {"context": True, "deep.0": True, "map.0.weight": True}  # of MaPLe, whose maps have another role
    method = create("moon+maple")
    for name, remembered in roles.items():
        assert method.remembers_role(method.tuning.role(name)) is remembered
    assert not create("moon").remembers_role("head")
    assert not create("moon+pt").remembers_role("private")
