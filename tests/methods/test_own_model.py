"""Ditto and APFL, whose clients have a shared model and one of their own, against NumPy."""

import numpy as np
import pytest
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, initial, local_round

from promptfed import params as P
from promptfed.methods import create
from tiny import Numbers, arrays, descend, distance, gradients, near, numbers, plan, same, work


def test_dittos_own_model_is_held_near_the_received_one() -> None:
    method = create("ditto", {**COMMON, "lamda": 2.0})
    own = near(MODEL.weights, 1)
    one = work({**MODEL.weights, **P.nested("own", own)}, N, down=MODEL.weights)
    start = numbers(MODEL.weights)

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {name: g[name] + 2.0 * (p[name] - start[name]) for name in p}

    done = local_round(method, one).params
    # The shared model is trained as by FedAvg, in a phase of its own.
    same(method.shared(done), descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS)))
    expected = descend(numbers(own), one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS), gradient)
    same(P.under(done, "own"), expected)
    free = descend(numbers(own), one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS))
    assert distance(expected, free) > 0.02


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfls_models_and_their_mix_descend_together(adaptive: bool) -> None:
    method = create("apfl", {**COMMON, "alpha": 0.3, "adaptive": adaptive})
    second = near(MODEL.weights, 1)
    params = {**MODEL.weights, **P.nested("own", second), "alpha": torch.tensor(0.3)}
    one = work(params, N, down=MODEL.weights)
    x, y = arrays(one.samples)
    w, v, alpha = numbers(MODEL.weights), numbers(second), 0.3
    for index in plan(N, B, 2):
        mixed = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
        g, at_mix = gradients(w, x[index], y[index]), gradients(mixed, x[index], y[index])
        slope = sum(float(((v[name] - w[name]) * at_mix[name]).sum()) for name in w)
        w = {name: p - LR * g[name] for name, p in w.items()}
        v = {name: p - LR * alpha * at_mix[name] for name, p in v.items()}
        alpha -= LR * slope * adaptive
    done = local_round(method, one).params
    same({name: done[name] for name in WEIGHTS}, w)
    same(P.under(done, "own"), v)
    assert done["alpha"].item() == pytest.approx(alpha, abs=1e-5)
    assert (abs(alpha - 0.3) > 0.01) is adaptive


@pytest.mark.parametrize(
    ("adaptive", "roles"), [(True, {"body", "head", "own", "share"}), (False, {"body", "head", "own"})]
)
def test_apfls_share_does_not_decay(adaptive: bool, roles: set[str]) -> None:
    (phase,) = create("apfl", {"adaptive": adaptive, "weight_decay": 0.1}).schedule(1)
    assert phase.train.keys() == roles
    assert {
        role: optimizer.weight_decay for role, optimizer in phase.train.items() if role != "share"
    } == dict.fromkeys(roles - {"share"}, 0.1)
    assert not adaptive or phase.train["share"].weight_decay == 0


def test_apfls_share_stays_between_zero_and_one() -> None:
    method = create("apfl")
    params = {"alpha": torch.tensor(1.4)}
    assert method.finish(params, None)["alpha"].item() == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_only_the_shared_model_travels(name: str) -> None:
    method = create(name)
    init = initial(method)
    assert method.shared(init).keys() == set(WEIGHTS)
    # A client without a model of its own starts with the received one, and then with what it kept.
    down, kept = near(MODEL.weights, 1), P.nested("own", near(MODEL.weights, 2))
    same(P.under(method.start(init, down, {}, {}), "own"), numbers(down), 0)
    same(P.under(method.start(init, down, kept, {}), "own"), numbers(P.under(kept, "own")), 0)
    # The shared model alone is scored as both.
    common = method.common(down)
    assert common is not None
    same(P.under(method.start(init, common, kept, {}), "own"), numbers(down), 0)
