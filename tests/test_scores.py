"""Scores of an evaluation against scikit-learn and by hand."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score

from client_blocks import MODEL
from promptfed import training as client_module
from promptfed.methods import create
from promptfed.scoring import Score, evaluate
from promptfed.training import Work
from tiny import CLASSES, arrays, linear, numbers, samples


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
