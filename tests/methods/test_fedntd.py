"""FedNTD's not-true distillation against a loop over samples and classes."""

import math

import pytest
from by_hand import MODEL, context, whole

from promptfed.methods import create
from tiny import CLASSES, arrays, cross_entropy, features, near, numbers, samples


def test_only_the_other_classes_are_distilled() -> None:
    method = create("fedntd", {"beta": 0.7, "temperature": 2.0})
    received = near(MODEL.weights, 1, 0.5)
    x, y = arrays(samples(6, 1))
    sides = []
    for p in (numbers(received), numbers(MODEL.weights)):
        logits = features(p, x) @ p["head.weight"].T + p["head.bias"]
        rows = []
        for row, label in zip(logits, y, strict=True):
            others = {c: math.exp(row[c] / 2.0) for c in range(CLASSES) if c != label}
            rows.append({c: e / sum(others.values()) for c, e in others.items()})
        sides.append(rows)
    kl = [sum(g[c] * math.log(g[c] / own[c]) for c in g) for g, own in zip(*sides, strict=True)]
    assert max(kl) > 1e-3
    batch, ctx = whole(), context(method, received)
    params = dict(MODEL.weights)
    batch = batch._replace(extra=method.sample_constants(MODEL, params, batch, ctx))
    loss, _ = method.loss(MODEL, params, batch, ctx)
    expected = cross_entropy(numbers(MODEL.weights), x, y) + 0.7 * sum(kl) / len(kl)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
