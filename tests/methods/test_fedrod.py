"""FedRoD's two losses and two heads against NumPy versions of what the paper says."""

from typing import Any

import numpy as np
import pytest
import torch

from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.fedrod import FedRod, TwoHeads
from promptfed.params import Params
from promptfed.phases import Batch, Context
from promptfed.testing import check_method
from promptfed.training import train
from tiny import (
    CLASSES,
    ROUND,
    SEED,
    Linear,
    Numbers,
    arrays,
    descend,
    distance,
    features,
    gradients,
    linear,
    near,
    numbers,
    plan,
    same,
    samples,
    softmax,
    work,
)

NAME = "promptfed.methods.fedrod:FedRod"
MODEL = linear()
N, B, LR = 10, 4, 0.1
OWN = ("own.weight", "own.bias")


def rod(**settings: Any) -> FedRod:
    method = create(NAME, {"lr": LR, "batch_size": B, "epochs": 2, **settings})
    assert isinstance(method, FedRod)
    return method


def some(method: FedRod) -> Params:
    return near(method.tuning.init(MODEL, SEED), 1, 0.3)


def generic(p: Numbers, x: np.ndarray) -> np.ndarray:
    return features(p, x) @ p["head.weight"].T + p["head.bias"]


def own(p: Numbers, x: np.ndarray) -> np.ndarray:
    return features(p, x) @ p["own.weight"].T + p["own.bias"]


def entropy(logits: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(softmax(logits)[np.arange(len(y)), y]).mean())


def both(counts: np.ndarray, gamma: float) -> Any:
    """n_c^gamma exp(g_c) / sum_c' n_c'^gamma exp(g_c') moves body and head: the prior is part of the head's bias."""
    prior = gamma * np.log(counts)

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        shifted = {**p, "head.bias": p["head.bias"] + prior}
        d_own = (softmax(generic(p, x) + own(p, x)) - np.eye(CLASSES)[y]) / len(y)
        return {**gradients(shifted, x, y), "own.weight": d_own.T @ features(p, x), "own.bias": d_own.sum(0)}

    return gradient


def whole(n: int = 6) -> Batch:
    data = samples(n, 1)
    return Batch(data.images(slice(None)), data.y, None, torch.tensor([0.5, 0.5]), {})


def context(counts: Any) -> Context:
    return Context({}, {}, None, torch.tensor(6), torch.tensor(counts))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_round_descends_both_losses_each_on_its_own_parameters(gamma: float) -> None:
    method = rod(gamma=gamma)
    one = work(some(method), N)
    counts = np.bincount(one.samples.y.numpy(), minlength=CLASSES)
    assert counts.min() > 0
    assert counts.max() > counts.min()
    start = numbers(one.params)
    lr = dict.fromkeys(start, LR)
    expected = descend(start, one.samples, plan(N, B, 2), lr, both(counts, gamma))
    done = train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0]
    same(done.params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), lr, both(counts, 0))) > 0.01


def test_the_loss_by_hand() -> None:
    method = rod()
    p = some(method)
    x, y = arrays(samples(6, 1))
    n = numbers(p)
    expected = entropy(generic(n, x) + np.log([1, 7, 3]), y) + entropy(generic(n, x) + own(n, x), y)
    assert method.loss(MODEL, p, whole(), context([1, 7, 3]))[0].item() == pytest.approx(expected, rel=1e-5)


def test_predictions_are_the_sum_of_both_heads() -> None:
    method = rod()
    p = some(method)
    x, _ = arrays(samples(6, 1))
    logits = method.tuning.logits(MODEL, p, whole(), context([1, 1, 1]))
    np.testing.assert_allclose(logits.numpy(), generic(numbers(p), x) + own(numbers(p), x), atol=1e-5)


def test_the_private_head_moves_nothing_else() -> None:
    """With it or without: body and generic head have the same gradients."""
    method = rod()
    found = []
    for scale in (0.0, 5.0):
        p = {n: (scale * v if n in OWN else v).clone().requires_grad_() for n, v in some(method).items()}
        method.loss(MODEL, p, whole(), context([2, 2, 2]))[0].backward()
        found.append({n: v.grad for n, v in p.items()})
    for name in MODEL.weights:
        torch.testing.assert_close(found[0][name], found[1][name])
    assert float((found[0]["own.weight"] - found[1]["own.weight"]).abs().max()) > 0.01


def test_classes_that_a_client_lacks_are_no_part_of_its_balanced_softmax() -> None:
    method = rod()
    p = {n: v.clone().requires_grad_() for n, v in some(method).items()}
    batch = whole()._replace(y=torch.tensor([0, 1, 0, 1, 1, 0]))
    x, _ = arrays(samples(6, 1))
    n = numbers(p)
    loss, _ = method.loss(MODEL, p, batch, context([3, 3, 0]))
    there = generic(n, x)[:, :2] + np.log(3)
    expected = entropy(there, batch.y.numpy()) + entropy(generic(n, x) + own(n, x), batch.y.numpy())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert p["head.bias"].grad[2].abs().item() < 1e-6


def test_a_client_of_one_class_has_nothing_to_learn_about_the_generic_model() -> None:
    method = rod()
    p = {n: v.clone().requires_grad_() for n, v in some(method).items()}
    batch = whole(1)._replace(y=torch.tensor([2]))
    method.loss(MODEL, p, batch, context([0, 0, 1]))[0].backward()
    assert max(float(p[name].grad.abs().max()) for name in MODEL.weights) < 1e-5
    assert p["own.bias"].grad.abs().max().item() > 0.1


def test_padding_whose_label_the_client_lacks_counts_for_nothing() -> None:
    method = rod()
    p = some(method)
    batch = whole()._replace(y=torch.tensor([0, 1, 0, 1, 2, 2]))
    padded = batch._replace(weight=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    short = batch._replace(x=batch.x[:4], y=batch.y[:4])
    a, b = (method.loss(MODEL, p, one, context([2, 2, 0]))[0] for one in (padded, short))
    assert a.item() == pytest.approx(b.item(), rel=1e-6)


def test_the_second_head_starts_silent_and_stays() -> None:
    method = rod()
    init = method.tuning.init(MODEL, SEED)
    assert {name: p.abs().max().item() for name, p in init.items() if name in OWN} == dict.fromkeys(OWN, 0)
    assert set(method.kept(init)) == set(OWN)
    assert set(method.phases(1)[0].train) == {"own", "body", "head"}


def test_the_generic_model_serves_those_who_never_train() -> None:
    method = rod()
    state = method.shared(some(method))
    common = method.common(state)
    x, _ = arrays(samples(6, 1))
    logits = method.tuning.logits(MODEL, common, whole(), context([1, 1, 1]))
    np.testing.assert_allclose(logits.numpy(), generic(numbers(state), x), atol=1e-5)
    assert method.personal
    assert method.serves


def test_without_a_head_there_is_no_second_one() -> None:
    with pytest.raises(UserError, match='FedRod needs a tuning with a "head"'):
        create(f"{NAME}+promptfl")
    headless = Linear("bare", MODEL.image, CLASSES, {n: p for n, p in MODEL.weights.items() if n.startswith("body")})
    with pytest.raises(UserError, match='"bare" has no head'):
        TwoHeads().check(headless)


def test_conformance_with_tokens_behind_frozen_layers() -> None:
    check_method(f"{NAME}+vpt", backbone="vit-mini", size=32, tokens=2, layers=(5,), epochs=1)
