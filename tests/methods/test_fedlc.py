"""FedLC's calibrated cross-entropy against NumPy."""

import numpy as np
import pytest
import torch
from by_hand import MODEL, whole

from promptfed.methods import create
from promptfed.phases import Context
from tiny import arrays, features, numbers, samples, softmax


def test_logits_are_lowered_by_a_margin_that_falls_with_the_count() -> None:
    method = create("fedlc", {"tau": 2.0})
    counts = np.array([16.0, 81.0, 0.0])
    ctx = Context({}, {}, None, torch.tensor(97), torch.tensor([16, 81, 0]))
    p, (x, y) = numbers(MODEL.weights), arrays(samples(6, 1))
    y = np.minimum(y, 1)  # no sample of the absent class
    logits = features(p, x) @ p["head.weight"].T + p["head.bias"]
    assert counts[:2] ** -0.25 == pytest.approx([1 / 2, 1 / 3])
    share = softmax(logits[:, :2] - 2.0 * np.array([1 / 2, 1 / 3]))  # an absent class counts for nothing
    batch = whole()._replace(y=torch.from_numpy(y))
    loss, stats = method.loss(MODEL, dict(MODEL.weights), batch, ctx)
    assert loss.item() == pytest.approx(-np.log(share[np.arange(6), y]).mean(), rel=1e-5)
    assert stats == {}
