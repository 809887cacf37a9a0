"""Per-FedAvg's meta-steps of both orders (Eq. 3-5), and how a client adapts."""

import numpy as np
import pytest
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, context, local_round, whole

from promptfed.methods import create
from promptfed.training import train
from tiny import (
    ROUND,
    SEED,
    Numbers,
    arrays,
    cross_entropy,
    descend,
    distance,
    gradients,
    numbers,
    plan,
    same,
    samples,
    work,
)


def test_first_order_perfedavg_takes_the_gradient_behind_an_inner_step() -> None:
    method = create("perfedavg", {**COMMON, "alpha": 0.5})

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x[0::2], y[0::2])
        return gradients({name: v - 0.5 * g[name] for name, v in p.items()}, x[1::2], y[1::2])

    one = work(MODEL.weights, N)
    start = numbers(MODEL.weights)
    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), meta)
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS))) > 0.02


def torch_loss(p: dict[str, torch.Tensor], x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    f = torch.from_numpy(x.reshape(len(x), -1)) @ p["body.weight"].T + p["body.bias"]
    return torch.nn.functional.cross_entropy(f @ p["head.weight"].T + p["head.bias"], torch.from_numpy(y))


def test_second_order_perfedavg_differentiates_through_the_inner_step() -> None:
    alpha = 0.5

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        w = {name: torch.from_numpy(v).requires_grad_() for name, v in p.items()}
        inner = torch.autograd.grad(torch_loss(w, x[0::2], y[0::2]), list(w.values()), create_graph=True)
        stepped = {name: v - alpha * g for (name, v), g in zip(w.items(), inner, strict=True)}
        outer = torch.autograd.grad(torch_loss(stepped, x[1::2], y[1::2]), list(w.values()))
        return {name: g.numpy() for name, g in zip(w, outer, strict=True)}

    one = work(MODEL.weights, N)
    start = numbers(MODEL.weights)
    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), meta)
    second = local_round(create("perfedavg", {**COMMON, "alpha": alpha, "order": "second"}), one)
    same(second.params, expected)
    first = local_round(create("perfedavg", {**COMMON, "alpha": alpha}), one)
    assert distance(expected, numbers(first.params)) > 0.01


def test_perfedavgs_second_order_gradient_agrees_with_finite_differences() -> None:
    """Of F(w) = f(w - a grad f(w)) in float64: no automatic differentiation on the other side."""
    method = create("perfedavg", {"alpha": 0.5, "order": "second"})
    x, y = arrays(samples(6, 1))

    def value(p: Numbers) -> float:
        g = gradients(p, x[0::2], y[0::2])
        return cross_entropy({name: v - 0.5 * g[name] for name, v in p.items()}, x[1::2], y[1::2])

    start = numbers(MODEL.weights)
    params = {name: p.clone().requires_grad_() for name, p in MODEL.weights.items()}
    loss, _ = method.loss(MODEL, params, whole(), context(method))
    assert loss.item() == pytest.approx(value(start), rel=1e-5)
    loss.backward()
    for name, place in (("head.bias", (1,)), ("head.weight", (2, 3)), ("body.bias", (0,)), ("body.weight", (1, 7))):
        sides = []
        for step in (1e-5, -1e-5):
            moved = start[name].copy()
            moved[place] += step
            sides.append(value({**start, name: moved}))
        assert params[name].grad[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-3, abs=1e-5)


def test_perfedavg_uses_a_lone_sample_for_both_steps() -> None:
    method = create("perfedavg", {**COMMON, "epochs": 1, "alpha": 0.5})

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return gradients({name: v - 0.5 * g[name] for name, v in p.items()}, x, y)

    one = work(MODEL.weights, 1)
    expected = descend(numbers(MODEL.weights), one.samples, [np.array([0])], at(LR, *WEIGHTS), meta)
    same(local_round(method, one).params, expected)


@pytest.mark.parametrize("order", ["first", "second"])
def test_perfedavg_adapts_by_plain_steps_at_alpha(order: str) -> None:
    method = create("perfedavg", {**COMMON, "alpha": 0.3, "adapt_steps": 2, "order": order})
    one = work(MODEL.weights, N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 1)[:2], at(0.3, *WEIGHTS)))
    assert done.passes == 2 * B
