"""Scores of an evaluation against scikit-learn and by hand."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from client_blocks import MODEL
from promptfed import training as client_module
from promptfed.methods import create
from promptfed.params import Params
from promptfed.scoring import Pooled, Score, evaluate
from promptfed.training import Work
from tiny import CLASSES, Linear, arrays, linear, near, numbers, samples


def scored(n: int, seed: int = 0, classes: int = CLASSES) -> tuple[Score, np.ndarray, np.ndarray, float]:
    """A score, and the labels, predictions and summed loss that NumPy makes of the same model."""
    model = linear(seed, classes=classes)
    data = samples(n, seed, classes=classes)
    p, (x, y) = numbers(model.weights), arrays(data)
    logits = (x.reshape(n, -1) @ p["body.weight"].T + p["body.bias"]) @ p["head.weight"].T + p["head.bias"]
    loss = float((np.log(np.exp(logits).sum(1)) - logits[np.arange(n), y]).sum())
    one = Work(0, data, dict(model.weights), {}, {})
    return evaluate(create("fedavg"), model, one, dict(model.weights), data), y, logits.argmax(1), loss


@pytest.mark.parametrize(("n", "seed", "classes"), [(20, 0, 3), (12, 1, 8), (1, 2, 3), (5, 3, 8)])
def test_scores_agree_with_scikit_learn(n: int, seed: int, classes: int) -> None:
    """Also where classes occur among labels or predictions only, or in neither."""
    score, labels, predictions, loss = scored(n, seed, classes)
    assert score.n == n
    assert score.accuracy == pytest.approx(accuracy_score(labels, predictions))
    assert score.macro_f1 == pytest.approx(f1_score(labels, predictions, average="macro", zero_division=0))
    assert score.loss == pytest.approx(loss, rel=1e-5)


def test_scores_by_hand() -> None:
    """Labels 0 0 1 1 2, predictions 0 1 1 1 3: F1 of 2/3, 4/5, 0 and 0; class 4 occurs nowhere."""
    tp, fp, fn = np.array([1, 2, 0, 0, 0]), np.array([0, 1, 0, 1, 0]), np.array([1, 0, 1, 0, 0])
    score = Score(5, 2.5, tp, fp, fn)
    assert score.accuracy == pytest.approx(3 / 5)
    assert score.macro_f1 == pytest.approx((2 / 3 + 4 / 5 + 0 + 0) / 4)


def test_the_score_of_nothing_is_unknown() -> None:
    zero = np.zeros(3, np.int64)
    empty = Score(0, 0.0, zero, zero, zero)
    assert empty.accuracy is None
    assert empty.macro_f1 is None
    method = create("fedavg")
    none = samples(0)
    found = evaluate(method, MODEL, Work(0, none, dict(MODEL.weights), {}, {}), dict(MODEL.weights), none)
    assert (found.n, found.loss, found.accuracy) == (0, 0.0, None)


def test_scores_add_up_to_the_score_of_all_samples() -> None:
    (a, ya, pa, la), (b, yb, pb, lb) = scored(9, 0), scored(14, 1)
    labels, predictions = np.concatenate([ya, yb]), np.concatenate([pa, pb])
    both = a + b
    assert (both.n, both.loss) == (23, pytest.approx(la + lb, rel=1e-5))
    assert both.accuracy == pytest.approx(accuracy_score(labels, predictions))
    assert both.macro_f1 == pytest.approx(f1_score(labels, predictions, average="macro"))


def test_evaluation_in_chunks_counts_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, *_ = scored(20)
    monkeypatch.setattr(client_module, "CHUNK", 7)
    parts, *_ = scored(20)
    assert (parts.n, parts.tp.tolist(), parts.fp.tolist(), parts.fn.tolist()) == (
        whole.n,
        whole.tp.tolist(),
        whole.fp.tolist(),
        whole.fn.tolist(),
    )
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)


class CountedLinear(Linear):
    """Counts the samples that it computes features of."""

    seen = 0

    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        self.seen += len(x)
        return super().features(weights, x, tokens)


@pytest.mark.parametrize(("name", "passes"), [("fedper", 2), ("fedrod", 2), ("lg-fedavg", 4), ("ditto", 4)])
def test_personal_models_with_the_same_body_share_features_of_pooled_data(name: str, passes: int) -> None:
    """Clients 0 and 1 have one body and their own heads, client 2 has another body, and so has client 3."""
    base, method, data = linear(), create(name), samples(30)
    model = CountedLinear(base.name, base.image, base.classes, base.weights)
    start = method.tuning.init(model, 0)
    own = near(start, 1)
    head = {n: p for n, p in own.items() if n.startswith(("head.", "own.weight", "own.bias"))}
    bodies = [start, {**start, **head}, own, own]
    if name == "lg-fedavg":  # the reverse: every client has its own body
        bodies = [near(start, seed) for seed in range(4)]
    pooled = Pooled(data)
    found = [pooled.score(method, model, Work(0, data, params, {}, {}), params) for params in bodies]
    assert model.seen == passes * len(data)
    for score, params in zip(found, bodies, strict=True):
        alone = evaluate(method, model, Work(0, data, params, {}, {}), params, data)
        assert (score.n, score.loss) == (alone.n, alone.loss)
        assert all((getattr(score, part) == getattr(alone, part)).all() for part in ("tp", "fp", "fn"))
