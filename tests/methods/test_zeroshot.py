"""Zero-shot: CLIP as it comes."""

import numpy as np
import pytest
import torch

from promptfed import models
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.models.vit import vit
from promptfed.testing import Case, tiny_federation


def test_zero_shot_is_clips_own_prediction_and_sends_nothing(tmp_path) -> None:
    model = models.build("clip-mini", (3, 32, 32), 4, 0, ("circle", "square", "star", "ring"))
    case = Case(create("zero-shot"), model, tiny_federation(tmp_path, size=32))
    line = case.run(rounds=1).lines[0]
    assert line["bytes"]["up"] == line["bytes"]["down"] == line["passes"] == 0
    data = case.federation.dataset
    test = np.concatenate([site.test for site in case.federation.sites])
    assert model.preprocess is not None
    with case.clients() as (_, host):
        x = host.samples(test).frozen["features"]
    with torch.no_grad():
        right = model.classify(model.weights, x).argmax(1).numpy() == data.labels[test]
    assert line["aggregated"]["summary"]["local"]["weighted"] == pytest.approx(right.mean())


def test_zero_shot_needs_a_clip() -> None:
    with pytest.raises(UserError, match="cannot predict untrained: a CLIP is needed"):
        create("zero-shot").tuning.check(vit((3, 8, 8), 4, 0, width=8, depth=1, heads=1))
