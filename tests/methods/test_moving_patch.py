"""A patch that moves with the batch lies at the same place in the features that a loss is contrasted with."""

import pytest
import torch

from promptfed import models
from promptfed.methods import create
from promptfed.phases import Batch
from promptfed.seeding import rng
from promptfed.training import Work, batches, context, train
from tiny import IMAGE, ROUND, SEED, linear, near, samples

CLIP_IMAGE = (3, 32, 32)
CASES = {
    "moon+pt": (linear(), IMAGE, {"prompt_size": 2, "prompt_epochs": 0}),
    "atpfl": (models.build("clip-mini", CLIP_IMAGE, 3, 0, ("circle", "square", "star")), CLIP_IMAGE, {"context": 2}),
}


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_references_have_the_patch_where_the_batch_has_it(name: str, clients: int) -> None:
    model, image, settings = CASES[name]
    # So slow that the parameters stay: what is recorded is the loss at what was received.
    method = create(name, {"prompt": "random-patch", "batch_size": 3, "epochs": 1, "lr": 1e-12, **settings})
    init = near(method.tuning.init(model, 0), 1, scale=1.0)
    memory = method.remembered(near(init, 2, scale=1.0))
    block = [Work(i, samples(7 - 2 * i, i, image), init, init, memory) for i in range(clients)]
    (phase,) = method.schedule(ROUND)
    done = train(method, model, block, [phase], SEED, ROUND)
    for work, found in zip(block, done, strict=True):
        ctx = context(work, model, phase)
        ctx.reference.update(method.client_constants(model, init, ctx))
        noise, total = rng(SEED, ROUND, work.client, "noise", 0), 0.0
        for index in batches(len(work.samples), phase, rng(SEED, ROUND, work.client, "batches", 0)):
            at = torch.from_numpy(index)
            batch = Batch(work.samples.images(at), work.samples.y[at], None, torch.from_numpy(noise.random(2, "f")), {})
            extra = method.sample_constants(model, init, batch, ctx)
            total += len(index) * float(method.loss(model, init, batch._replace(extra=extra), ctx)[0])
        assert found.loss == pytest.approx(total / len(work.samples), rel=1e-5)
