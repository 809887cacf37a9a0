"""What a client's training reports, and what a method's loss and steps are told."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client_blocks import MODEL, WEIGHTS, block_of, run
from promptfed.method import Method
from promptfed.methods import create
from promptfed.models import Model
from promptfed.params import Params
from promptfed.phases import Batch, Context, Phase
from promptfed.training import Work
from tiny import (
    BODY,
    CLASSES,
    HEAD,
    ROUND,
    arrays,
    cross_entropy,
    descend,
    gradients,
    numbers,
    plan,
    same,
    samples,
    work,
)


def test_the_loss_is_the_mean_over_the_samples_of_the_last_phase() -> None:
    """Each batch counts by its length, at the parameters it was met with."""
    method = create("fedrep", {"batch_size": 4, "epochs": 2, "head_epochs": 1, "lr": 0.1, "head_lr": 0.3})
    one = work(MODEL.weights, 10)
    x, y = arrays(one.samples)
    p = descend(numbers(MODEL.weights), one.samples, plan(10, 4, 1, number=0), dict.fromkeys(HEAD, 0.3))
    total = 0.0
    for index in plan(10, 4, 2, number=1):
        total += len(index) * cross_entropy(p, x[index], y[index])
        p = descend(p, one.samples, [index], dict.fromkeys(BODY, 0.1))
    done = run(method, [one])[0]
    assert done.loss == pytest.approx(total / 20, rel=1e-5)
    assert done.passes == 10 + 20


class Counting(Method):
    """Sends the number of samples and of labels it has met."""

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        weight = torch.ones(len(batch.y)) if batch.weight is None else batch.weight
        labels = (nn.functional.one_hot(batch.y, CLASSES) * weight[:, None]).sum(0)
        counts = {"samples": weight.sum(), "labels": labels, "steps": torch.ones(()), "n": ctx.n + 0.0 * weight.sum()}
        return super().loss(model, params, batch, ctx)[0], counts

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(("head",)), self.phase(("body",)))


@pytest.mark.parametrize("sizes", [(10,), (10, 3, 0, 5)])
def test_stats_are_summed_over_steps_and_phases_of_each_client_alone(sizes: tuple[int, ...]) -> None:
    method = Counting(epochs=2, batch_size=4)
    block = block_of(method, sizes)
    for one, done in zip(block, run(method, block), strict=True):
        n = len(one.samples)
        steps = 2 * 2 * -(-n // 4)
        if n:
            assert done.stats["samples"].item() == done.passes == 4 * n
            assert done.stats["labels"].tolist() == (4 * np.bincount(one.samples.y, minlength=CLASSES)).tolist()
            assert done.stats["steps"].item() == steps
            assert done.stats["n"].item() == n * steps
        else:
            assert all(not v.any() for v in done.stats.values())


class Noisy(Method):
    """Sends the noise of its batches, each phase under a name of its own."""

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        noise = {f"{ctx.phase.name} sum": batch.noise, f"{ctx.phase.name} squares": batch.noise.square()}
        return super().loss(model, params, batch, ctx)[0], noise

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(("head",), name="head"), self.phase(("body",), name="body"))


def test_every_batch_has_noise_of_its_own() -> None:
    """Drawn anew by client, round, phase and step: a random patch moves every batch."""
    method = Noisy(epochs=8, batch_size=4)
    block = block_of(method, (8, 8))
    found = run(method, block) + run(method, block, round=ROUND + 1)
    sums = [done.stats[f"{phase} sum"] for done in found for phase in ("head", "body")]
    squares = [done.stats[f"{phase} squares"] for done in found for phase in ("head", "body")]
    for total, square in zip(sums, squares, strict=True):
        variance = square / 16 - (total / 16) ** 2  # of a uniform number: 1/12
        assert ((total > 0) & (total < 16)).all()
        assert (variance > 0.02).all()
    values = torch.cat(sums)
    assert len(values.unique()) == len(values) == 16


class Curious(Method):
    """Looks at what it is told about the client."""

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        return super().loss(model, params, batch, ctx)[0] * ctx.n * ctx.label_counts[0] * ctx.down["scale"], {}


@pytest.mark.parametrize("k", [1, 2])
def test_a_loss_sees_the_numbers_of_its_own_client(k: int) -> None:
    block = []
    for client, n in enumerate((6, 9)[:k], start=1):
        block.append(Work(client, samples(n, client), dict(MODEL.weights), {"scale": torch.tensor(0.1 * client)}, {}))
    method = Curious(epochs=1, batch_size=100, lr=0.01)
    for one, done in zip(block, run(method, block), strict=True):
        x, y = arrays(one.samples)
        assert (y == 0).sum() > 0
        factor = 0.01 * len(y) * (y == 0).sum() * 0.1 * one.client
        g = gradients(numbers(MODEL.weights), x, y)
        same(done.params, {name: p - factor * g[name] for name, p in numbers(MODEL.weights).items()})


class Halved(Method):
    """Descends half the gradient."""

    def step(self, grad: Any, params: Params, phase: Phase, normal: Any) -> Params:
        return {name: g / 2 for name, g in grad(params).items()}


def test_a_method_may_take_steps_of_its_own() -> None:
    method = Halved(epochs=2, batch_size=4, lr=0.2)
    block = block_of(method, (10, 3))
    for one, done in zip(block, run(method, block), strict=True):
        steps = plan(len(one.samples), 4, 2, client=one.client)
        same(done.params, descend(numbers(one.params), one.samples, steps, dict.fromkeys(WEIGHTS, 0.1)))
