"""pFedMe's inner problem, local step and server rule against NumPy versions of Algorithm 1."""

from typing import Any

import numpy as np
import pytest

from promptfed.methods import create
from promptfed.methods.pfedme import PFedMe
from promptfed.phases import Update
from promptfed.testing import check_method
from promptfed.training import train
from tiny import (
    ROUND,
    SEED,
    Numbers,
    descend,
    distance,
    gradients,
    linear,
    near,
    numbers,
    plan,
    same,
    work,
)

NAME = "promptfed.methods.pfedme:PFedMe"
MODEL = linear()
N, B, LR = 10, 4, 0.05
LAMDA, INNER = 3.0, 0.2


def me(**settings: Any) -> PFedMe:
    given = {"lr": LR, "batch_size": B, "epochs": 2, "lamda": LAMDA, "inner_lr": INNER, "inner_steps": 3}
    method = create(NAME, {**given, **settings})
    assert isinstance(method, PFedMe)
    return method


def envelope(steps: int, lamda: float = LAMDA) -> Any:
    """lamda (w - theta), theta by gradient steps on f(theta) + lamda/2 |theta - w|^2 from w."""

    def gradient(w: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        theta = w
        for _ in range(steps):
            g = gradients(theta, x, y)
            theta = {name: v - INNER * (g[name] + lamda * (v - w[name])) for name, v in theta.items()}
        return {name: lamda * (w[name] - theta[name]) for name in w}

    return gradient


@pytest.mark.parametrize("n", [N, 1])
def test_a_round_descends_the_envelope(n: int) -> None:
    method = me()
    one = work(MODEL.weights, n, down=MODEL.weights)
    start, lr = numbers(MODEL.weights), dict.fromkeys(MODEL.weights, LR)
    expected = descend(start, one.samples, plan(n, B, 2), lr, envelope(3))
    same(train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0].params, expected)
    # One inner step would be lamda inner_lr times the gradient.
    assert distance(expected, descend(start, one.samples, plan(n, B, 2), lr, envelope(1))) > 0.005


def test_one_inner_step_is_sgd_at_another_rate() -> None:
    method = me(inner_steps=1)
    one = work(MODEL.weights, N, down=MODEL.weights)
    expected = descend(
        numbers(MODEL.weights), one.samples, plan(N, B, 2), dict.fromkeys(MODEL.weights, LR * LAMDA * INNER)
    )
    same(train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0].params, expected)


def test_the_recorded_loss_is_that_of_the_local_model() -> None:
    plain, method = create("fedavg", {"batch_size": N, "epochs": 1}), me(batch_size=N, epochs=1)
    losses = [
        train(each, MODEL, [work(MODEL.weights, N, down=MODEL.weights)], each.schedule(1), SEED, 1)[0].loss
        for each in (plain, method)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_personal_model_is_theta_of_what_was_received() -> None:
    method = me(personal_steps=3)
    one = work(MODEL.weights, N, down=MODEL.weights)
    center = numbers(MODEL.weights)

    def proximal(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {name: g[name] + LAMDA * (p[name] - center[name]) for name in p}

    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    rates = dict.fromkeys(MODEL.weights, INNER)
    expected = descend(center, one.samples, plan(N, B, 1), rates, proximal)
    same(done.params, expected)
    assert done.passes == N
    assert method.personal
    assert distance(expected, descend(center, one.samples, plan(N, B, 1), rates)) > 0.02


def test_with_ft_it_is_fine_tuned_like_any_other() -> None:
    (phase,) = create(f"{NAME}+ft").adapt()
    assert phase.plain
    assert phase.epochs == 5


@pytest.mark.parametrize("beta", [1.0, 0.25, 2.0])
def test_the_server_goes_towards_the_plain_mean(beta: float) -> None:
    method = me(beta=beta)
    ups = [near(MODEL.weights, seed) for seed in range(3)]
    updates = [Update(i, {}, up, n) for i, (up, n) in enumerate(zip(ups, (1, 6, 13), strict=True))]
    state = method.aggregate(dict(MODEL.weights), updates)
    mean = {name: np.mean([up[name].double().numpy() for up in ups], axis=0) for name in MODEL.weights}
    same(state, {name: (1 - beta) * p + beta * mean[name] for name, p in numbers(MODEL.weights).items()})


def test_defaults_are_the_authors() -> None:
    method = create(NAME)
    assert isinstance(method, PFedMe)
    assert (method.lamda, method.inner_steps, method.inner_lr, method.beta, method.lr) == (15, 5, 0.09, 1, 0.005)


def test_conformance_with_tokens_behind_frozen_layers() -> None:
    check_method(
        f"{NAME}+vpt", backbone="vit-mini", size=32, tokens=2, layers=(5,), epochs=1, inner_steps=2, personal_steps=2
    )
