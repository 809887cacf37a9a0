"""FedEM's E-step, M-steps and prediction against NumPy versions of Algorithm 1."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.clients.messages import Train, read_update
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.fedem import FedEm, Mixture
from promptfed.params import Params
from promptfed.phases import Batch, Context, Update
from promptfed.testing import check_method
from promptfed.training import Trained, Work, train
from promptfed.tuning import Full
from promptfed.tunings.text import TextContext
from promptfed.tunings.tokens import Tokens
from tiny import (
    CLASSES,
    ROUND,
    SEED,
    Linear,
    Numbers,
    arrays,
    distance,
    features,
    linear,
    near,
    numbers,
    plan,
    same,
    samples,
    softmax,
    toy_host,
    work,
)

NAME = "promptfed.methods.fedem:FedEm"
MODEL = linear()
M, N, B, LR = 3, 10, 4, 0.1
PI = np.array([0.5, 0.3, 0.2])


def em(**settings: Any) -> FedEm:
    method = create(NAME, {"lr": LR, "batch_size": B, "epochs": 2, **settings})
    assert isinstance(method, FedEm)
    return method


def some(method: FedEm, pi: Any = PI) -> Params:
    """Components far apart, so that samples belong to some more than to others."""
    parts = near(method.tuning.init(MODEL, SEED), 1, 0.5)
    return {**parts, "mixture": torch.tensor(pi, dtype=torch.float32)}


def part(p: Numbers, m: int) -> Numbers:
    return {name.removeprefix(f"mix.{m}."): v for name, v in p.items() if name.startswith(f"mix.{m}.")}


def probability(p: Numbers, x: np.ndarray) -> np.ndarray:
    """(B, classes) of one component."""
    return softmax(features(p, x) @ p["head.weight"].T + p["head.bias"])


def responsibility(p: Numbers, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """q (B, M), Bayes' rule: exp(-loss) is the probability of the label."""
    joint = np.stack([p["mixture"][m] * probability(part(p, m), x)[np.arange(len(y)), y] for m in range(M)], 1)
    return joint / joint.sum(1, keepdims=True)


def weighted(p: Numbers, x: np.ndarray, y: np.ndarray, q: np.ndarray) -> Numbers:
    """Gradients of mean_i q_i CE_i of one component."""
    f = features(p, x)
    d_logits = q[:, None] * (probability(p, x) - np.eye(CLASSES)[y]) / len(y)
    d_features = d_logits @ p["head.weight"]
    return {
        "head.weight": d_logits.T @ f,
        "head.bias": d_logits.sum(0),
        "body.weight": d_features.T @ x.reshape(len(x), -1),
        "body.bias": d_features.sum(0),
    }


def whole(n: int = 6, weight: torch.Tensor | None = None, extra: Params | None = None) -> Batch:
    data = samples(n, 1)
    return Batch(data.images(slice(None)), data.y, weight, torch.tensor([0.5, 0.5]), extra or {})


def context(stats: Params | None = None) -> Context:
    return Context({}, {}, None, torch.tensor(6), torch.ones(CLASSES), stats=stats or {})


def local_round(method: FedEm, one: Work) -> Trained:
    return train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0]


def test_names_roles_and_who_keeps_what() -> None:
    method = em()
    init = method.tuning.init(MODEL, SEED)
    assert set(init) == {"mixture"} | {f"mix.{m}.{name}" for m in range(M) for name in MODEL.weights}
    assert method.tuning.role("mix.2.head.bias") == "head"
    assert method.tuning.role("mix.0.body.weight") == "body"
    assert method.tuning.role("mixture") == "mixture"
    assert set(method.kept(init)) == {"mixture"}
    assert method.roles() == ("body", "head")
    assert set(method.phases(1)[0].train) == {"body", "head"}
    assert method.personal


def test_components_start_apart_the_first_as_it_would_alone() -> None:
    init = em().tuning.init(MODEL, SEED)
    np.testing.assert_allclose(init["mixture"].numpy(), 1 / 3)
    same({name: init[f"mix.0.{name}"] for name in MODEL.weights}, numbers(MODEL.weights), 0)
    for m in (1, 2):
        same(
            {n: init[f"mix.{m}.{n}"] for n in ("body.weight", "body.bias")},
            {n: MODEL.weights[n].numpy() for n in ("body.weight", "body.bias")},
            0,
        )
        head, first = init[f"mix.{m}.head.weight"], MODEL.weights["head.weight"]
        assert 0.5 * first.abs().max() < head.abs().max() <= first.abs().max()
    heads = [init[f"mix.{m}.head.weight"] for m in range(M)]
    assert min(float((heads[a] - heads[b]).abs().max()) for a, b in ((0, 1), (0, 2), (1, 2))) > 0.1


def test_predictions_are_the_mixture_of_what_the_components_say() -> None:
    method = em()
    p = some(method)
    x, _ = arrays(samples(6, 1))
    expected = np.log(sum(PI[m] * probability(part(numbers(p), m), x) for m in range(M)))
    logits = method.tuning.logits(MODEL, p, whole(), context())
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(logits.exp().sum(1).numpy(), 1, atol=1e-5)  # a distribution: cross-entropy is right


def test_the_e_step_is_bayes_rule() -> None:
    method = em()
    p = some(method)
    q = method.sample_constants(MODEL, p, whole(), context())["q"].numpy()
    expected = responsibility(numbers(p), *arrays(samples(6, 1)))
    np.testing.assert_allclose(q, expected, atol=1e-5)
    assert np.ptp(expected, axis=0).max() > 0.3


def test_a_round_descends_each_component_by_its_share_and_counts_pi() -> None:
    method = em()
    one = work(some(method), N)
    start = numbers(one.params)
    x, y = arrays(one.samples)
    q = responsibility(start, x, y)  # of the start of the round, for all of it
    expected = {"mixture": PI}
    for m in range(M):
        p = part(start, m)
        for index in plan(N, B, 2):
            g = weighted(p, x[index], y[index], q[index, m])
            p = {name: v - LR * g[name] for name, v in p.items()}
        expected |= {f"mix.{m}.{name}": v for name, v in p.items()}
    done = local_round(method, one)
    same(done.params, expected)
    assert distance(expected, start) > 0.02
    finished = method.finish(done.params, context(done.stats))
    np.testing.assert_allclose(finished["mixture"].numpy(), q.mean(0), atol=1e-5)
    assert np.abs(q.mean(0) - PI).max() > 0.02


def test_one_component_is_fedavg() -> None:
    method, plain = em(components=1), create("fedavg", {"lr": LR, "batch_size": B, "epochs": 2})
    done = local_round(method, work(method.tuning.init(MODEL, SEED), N))
    expected = train(plain, MODEL, [work(MODEL.weights, N)], plain.schedule(ROUND), SEED, ROUND)[0]
    same({n.removeprefix("mix.0."): p for n, p in done.params.items() if n != "mixture"}, numbers(expected.params))
    assert done.loss == pytest.approx(expected.loss, rel=1e-5)
    assert method.finish(done.params, context(done.stats))["mixture"].tolist() == [1]


def test_padding_counts_for_nothing() -> None:
    method = em()
    p = some(method)
    q = method.sample_constants(MODEL, p, whole(), context())
    padded = whole(weight=torch.tensor([1.0, 1, 1, 1, 0, 0]), extra=q)
    short = Batch(padded.x[:4], padded.y[:4], None, padded.noise, {"q": q["q"][:4]})
    (a, counted), (b, expected) = (method.loss(MODEL, p, batch, context()) for batch in (padded, short))
    assert a.item() == pytest.approx(b.item(), rel=1e-6)
    torch.testing.assert_close(counted["q"], expected["q"])
    assert counted["q"].sum().item() == pytest.approx(4)


@pytest.mark.parametrize("n", [1, 5])
def test_a_client_of_one_class_or_one_sample_ends_with_weights_that_sum_to_one(n: int) -> None:
    method = em()
    one = work(some(method), n)
    one.samples.y.fill_(2)
    done = local_round(method, one)
    pi = method.finish(done.params, context(done.stats))["mixture"]
    assert pi.isfinite().all()
    assert pi.sum().item() == pytest.approx(1, abs=1e-6)


def test_a_component_without_weight_does_no_harm() -> None:
    method = em()
    p = some(method, [1.0, 0.0, 0.0])
    logits = method.tuning.logits(MODEL, p, whole(), context())
    alone = np.log(probability(part(numbers(p), 0), arrays(samples(6, 1))[0]))
    np.testing.assert_allclose(logits.numpy(), alone, atol=1e-5)
    assert method.sample_constants(MODEL, p, whole(), context())["q"].isfinite().all()


def test_without_training_pi_stays() -> None:
    method = em()
    p = some(method)
    assert method.finish(p, context()) is p


def test_components_are_averaged_by_samples() -> None:
    method = em()
    ups = [method.shared(near(method.tuning.init(MODEL, SEED), seed)) for seed in (1, 2)]
    state = method.aggregate(
        method.begin(MODEL, method.tuning.init(MODEL, SEED), 0), [Update(0, {}, ups[0], 1), Update(1, {}, ups[1], 3)]
    )
    same(state, {name: (ups[0][name].double().numpy() + 3 * ups[1][name].double().numpy()) / 4 for name in ups[0]})


def test_pi_is_kept_and_nothing_of_it_is_sent(tmp_path: Path) -> None:
    method = em(epochs=1)
    host = toy_host(method, tmp_path)
    down = method.shared(near(method.tuning.init(MODEL, SEED), 1, 0.5))
    first = host.work(0, down, 1)
    np.testing.assert_allclose(first.params["mixture"].numpy(), 1 / 3)  # a newcomer
    _, blobs = host.train([[first]], Train(round=1, score=False))
    up, stats = read_update(blobs[0])
    assert "mixture" not in up
    assert stats["q"].numel() == 0
    pi = host.work(0, down, 2).params["mixture"]
    x, y = arrays(first.samples)
    np.testing.assert_allclose(pi.numpy(), responsibility(numbers(first.params), x, y).mean(0), atol=1e-5)
    np.testing.assert_allclose(host.work(1, down, 2).params["mixture"].numpy(), 1 / 3)
    host.store.close()


def test_components_that_could_not_come_apart_are_refused() -> None:
    alike = Linear("linear", MODEL.image, CLASSES, {n: torch.zeros_like(p) for n, p in MODEL.weights.items()})
    with pytest.raises(UserError, match="components start and stay equal with this tuning, use 1"):
        Mixture(inner=Full()).check(alike)
    Mixture(inner=Full(), components=1).check(alike)
    Mixture(inner=Full()).check(MODEL)


def test_it_wraps_whatever_is_tuned() -> None:
    for plugin, inner in (("", Full), ("+vpt", Tokens), ("+promptfl", TextContext)):
        tuning = create(NAME + plugin, {"components": 2}).tuning
        assert isinstance(tuning, Mixture)
        assert (type(tuning.inner), tuning.components) == (inner, 2)


def test_conformance_with_tokens_behind_frozen_layers() -> None:
    check_method(f"{NAME}+vpt", backbone="vit-mini", size=32, components=4, tokens=2, layers=(5,), epochs=1)
