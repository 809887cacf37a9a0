"""Blocks of clients of different sizes on the linear model, and their training."""

from collections.abc import Sequence

import pytest
import torch

from promptfed.method import Method
from promptfed.models import Model
from promptfed.training import Trained, Work, train
from tiny import BODY, HEAD, ROUND, SEED, linear, near, samples

MODEL = linear()
WEIGHTS = (*BODY, *HEAD)
SIZES = (10, 3, 1, 7)
SMALL = {"batch_size": 4, "epochs": 2, "lr": 0.1}


def run(method: Method, block: Sequence[Work], model: Model = MODEL, round: int = ROUND) -> list[Trained]:
    return train(method, model, block, method.schedule(round), SEED, round)


def block_of(method: Method, sizes: Sequence[int] = SIZES, model: Model = MODEL) -> list[Work]:
    """Clients that differ in their initial weights, in what they received and in what they remember."""
    state = method.begin(model, method.tuning.init(model, SEED), 0)
    found = []
    for client, n in enumerate(sizes, start=1):
        init = near(method.tuning.init(model, SEED), client)
        down = near(method.down(state, client), 10 + client)
        data = samples(n, client, model.image, model.classes)
        found.append(
            Work(client, data, method.start(init, down, {}, {}), down, near(method.remembered(init), 20 + client))
        )
    return found


def agree(a: Trained, b: Trained, tolerance: float = 1e-5) -> None:
    assert a.params.keys() == b.params.keys()
    for name, p in a.params.items():
        torch.testing.assert_close(
            p, b.params[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-5)
    assert a.passes == b.passes
