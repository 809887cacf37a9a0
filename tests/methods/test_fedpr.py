"""FedPR's projection against NumPy. A linear layer's weight, a matrix like a prompt, stands for one: its gradients are
known by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.fedpr import FedPr
from promptfed.models.vit import vit
from promptfed.params import Params
from promptfed.phases import Context, Update
from promptfed.testing import check_method
from promptfed.training import Trained, Work, chunks, train
from tiny import (
    CLASSES,
    ROUND,
    SEED,
    Numbers,
    arrays,
    descend,
    distance,
    gradients,
    linear,
    near,
    numbers,
    plan,
    same,
    samples,
    work,
)

NAME = "promptfed.methods.fedpr:FedPr"
MODEL = linear()  # body.weight is (4, 60)
N, B, LR = 10, 4, 0.1
LATER, FIRST = torch.ones(()), torch.zeros(())


def pr(**settings: Any) -> FedPr:
    method = create(NAME, {"lr": LR, "batch_size": B, "epochs": 2, **settings})
    assert isinstance(method, FedPr)
    return method


def null_space(p: np.ndarray, closed: int) -> np.ndarray:
    """V2 V2^T, with V2 all but the first eigenvectors of P^T P in falling order."""
    _, vectors = np.linalg.eigh(p.T @ p)  # rising
    v2 = vectors[:, : p.shape[1] - closed]
    return v2 @ v2.T


def local_round(method: FedPr, one: Work) -> Params:
    """Trained, and finished as a host does."""
    done: Trained = train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0]
    return method.finish(done.params, context(one.down))


def context(down: Params) -> Context:
    return Context(down, {}, None, torch.tensor(N), torch.ones(CLASSES))


def received(learnt: torch.Tensor = LATER) -> Params:
    return {**MODEL.weights, "learnt": learnt}


# 60 directions: a share of .8 would close 12 of them, more than the matrix has rows, and closes all 4 that it has.
@pytest.mark.parametrize(("ratio", "closed"), [(0.8, 4), (0.95, 3), (0.97, 1), (0.99, 0), (1.0, 0)])
def test_every_step_is_projected(ratio: float, closed: int) -> None:
    method = pr(ratio=ratio)
    one = work(MODEL.weights, N, down=received())
    start = numbers(MODEL.weights)
    projector = null_space(start["body.weight"], closed)

    def projected(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {**g, "body.weight": g["body.weight"] @ projector}

    expected = descend(start, one.samples, plan(N, B, 2), dict.fromkeys(start, LR), projected)
    found = local_round(method, one)
    same(found, expected)
    plain = descend(start, one.samples, plan(N, B, 2), dict.fromkeys(start, LR))
    assert (distance(expected, plain) > 0.005) == (closed > 0)
    if closed == 4:  # tokens of the update at right angles to those of the global prompt
        change = (found["body.weight"] - MODEL.weights["body.weight"]).double()
        assert float((change @ MODEL.weights["body.weight"].double().T).abs().max()) < 1e-5
        assert float(change.abs().max()) > 0.01


def test_it_is_the_optimisers_step_that_is_projected() -> None:
    """Adam sees the whole gradient, at the projected weights; its step is no longer in the null space."""
    method = pr(optimizer="adam", lr=0.01)
    one = work(MODEL.weights, N, down=received())
    start = numbers(MODEL.weights)
    projector = null_space(start["body.weight"], 4)
    x, y = arrays(one.samples)
    p = start
    first, second = ({name: np.zeros_like(v) for name, v in p.items()} for _ in range(2))
    for t, index in enumerate(plan(N, B, 2), start=1):
        g = gradients(p, x[index], y[index])
        first = {name: 0.9 * v + 0.1 * g[name] for name, v in first.items()}
        second = {name: 0.999 * v + 0.001 * g[name] ** 2 for name, v in second.items()}
        step = {n: 0.01 * first[n] / (1 - 0.9**t) / (np.sqrt(second[n] / (1 - 0.999**t)) + 1e-8) for n in p}
        p = {name: v - (step[name] @ projector if name == "body.weight" else step[name]) for name, v in p.items()}
    same(local_round(method, one), p, 1e-4)


def test_the_first_round_is_fedavg() -> None:
    one = work(MODEL.weights, N, down=received(FIRST))
    expected = descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), dict.fromkeys(MODEL.weights, LR))
    same(local_round(pr(), one), expected)


def test_it_is_over_once_prompts_have_been_aggregated() -> None:
    method = pr()
    state = method.begin(MODEL, MODEL.weights, 0)
    assert state["learnt"].item() == 0
    ups = [near(MODEL.weights, seed) for seed in (1, 2)]
    state = method.aggregate(state, [Update(0, {}, ups[0], 1), Update(1, {}, ups[1], 3)])
    assert state.pop("learnt").item() == 1
    same(state, {name: (ups[0][name].double().numpy() + 3 * ups[1][name].double().numpy()) / 4 for name in ups[0]})


def test_a_client_with_one_sample_and_a_prompt_of_zeros() -> None:
    zero = {**MODEL.weights, "body.weight": torch.zeros_like(MODEL.weights["body.weight"])}
    found = local_round(pr(), work(zero, 1, down={**zero, "learnt": LATER}))
    assert all(p.isfinite().all() for p in found.values())


def test_padding_counts_for_nothing() -> None:
    method = pr()
    down = received()
    p = near(MODEL.weights, 3)
    (whole,) = chunks(samples(6, 1))
    ctx = Context(down, {}, None, torch.tensor(6), torch.ones(CLASSES), method.closed(down))
    padded = whole._replace(weight=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    short = whole._replace(x=whole.x[:4], y=whole.y[:4])
    a, b = (method.loss(MODEL, p, one, ctx)[0] for one in (padded, short))
    assert a.item() == pytest.approx(b.item(), rel=1e-6)


def test_it_is_for_prompts() -> None:
    method = pr()
    with pytest.raises(UserError, match=r"FedPr is for prompts \(\+vpt, \+vpt-d or \+promptfl\)"):
        method.check(MODEL, method.tuning.init(MODEL, SEED))
    small = vit((3, 8, 8), CLASSES, 0, width=16, depth=2, heads=2)
    deep = create(f"{NAME}+vpt-d", {"tokens": 3})
    init = deep.tuning.init(small, SEED)
    deep.check(small, init)
    assert isinstance(deep, FedPr)
    found = deep.closed({**init, "learnt": LATER})
    assert {name: tuple(v.shape) for name, v in found.items()} == {"tokens.0": (16, 3), "tokens.1": (16, 3)}
    with pytest.raises(UserError, match='FedPr needs a tuning with a "body"'):
        create(f"{NAME}+head")


def test_conformance_on_any_matrix() -> None:
    check_method(NAME, backbone="cnn", epochs=1)


def test_conformance_with_tokens_behind_frozen_layers() -> None:
    check_method(f"{NAME}+vpt", backbone="vit-mini", size=32, tokens=2, layers=(5,), epochs=1)
