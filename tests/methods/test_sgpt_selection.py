"""SGPT: what a sample's query is, and which group it selects."""

from typing import Any

import numpy as np
import pytest
import torch
from sgpt_toy import DEPTH, MODEL, SMALL, WIDTH, G, W, context, cosines, small, some, whole

from promptfed.methods.sgpt.features import SharedGroup

# ---- the query


def test_the_query_is_cls_of_the_model_without_prompts() -> None:
    x = whole().x
    h = MODEL.embed(W, x)
    after = []
    for i in range(DEPTH):
        h = MODEL.block(W, f"body.blocks.{i}", h)
        after.append(h[:, 0])
    queries = {
        (): MODEL.features(W, x),
        (("query", 3),): MODEL.norm(W, after[2]),
        (("query", 3), ("query_norm", False)): after[2],
        (("query", 3), ("query_relu", True)): MODEL.norm(W, after[2]).clamp(min=0),
        (("query_relu", True),): MODEL.features(W, x).clamp(min=0),
        (("query", DEPTH), ("query_norm", False)): after[-1],
    }
    names = set()
    for settings, expected in queries.items():
        tuning = SharedGroup(**SMALL, **dict(settings))
        torch.testing.assert_close(tuning.frozen(MODEL, x)["query"], expected, rtol=1e-5, atol=1e-6)
        names.add(tuning.frozen_name(MODEL))
    assert len(names) == len(queries)
    assert SharedGroup.images


def test_every_sample_selects_the_nearest_key() -> None:
    """Eq. 5."""
    method, batch = small(), whole(20)
    params = {**some(method), "keys": torch.randn(G, WIDTH, generator=torch.Generator().manual_seed(2)) * 5}
    expected = cosines(batch.frozen["query"], params["keys"]).argmax(1)
    found = method.tuning.select(MODEL, params, batch)
    np.testing.assert_array_equal(found, expected)
    assert len(set(expected)) > 1
    seen = whole(20, frozen=False)  # its query is computed then
    expected = cosines(MODEL.features(W, seen.x), params["keys"]).argmax(1)
    np.testing.assert_array_equal(method.tuning.select(MODEL, params, seen), expected)
    skewed = context(counts=(1000, 0, 0, 0), own=(1, 0, 0, 0))
    assert torch.equal(found, method.assign(MODEL, params, batch, skewed)), "what was selected before changed Eq. 5"


# ---- selection in training

# Cosines of two samples to the keys; rows 2 and 3 are far from everything.
NEAR = torch.tensor([[0.9, 0.8, 0.2, 0.0], [0.1, 0.6, 0.5, -1.0]])


@pytest.mark.parametrize(
    ("settings", "counts", "own", "expected"),
    [
        # Before the first selection: Eq. 5.
        ({}, (0, 0, 0, 0), None, [0, 1]),
        ({}, (0, 0, 0, 0), (0, 0, 0, 0), [0, 1]),
        # q = .9005, .1005, .0005, .0005: -.1 q = -.090, -.2 q = -.0201, -.8 q = -.0004, -1 q = -.0005
        #                                 -.9 q = -.810, -.4 q = -.0402, -.5 q = -.00025, -2 q = -.001
        ({}, (90, 10, 0, 0), None, [2, 2]),
        # q = .95, .15, .05, .05: -.095, -.03, -.04, -.05; -.855, -.06, -.025, -.1
        ({"floor": 0.05}, (90, 10, 0, 0), None, [1, 2]),
        # No floor: what was never selected wins with a score of zero, the first such group.
        ({"floor": 0.0}, (90, 10, 0, 0), None, [2, 2]),
        # The client's own selections alone: q = .0005, .5005, .5005, .0005: -.00005, ..., -.0005; -.0005, ..., -.001
        ({}, (0, 0, 0, 0), (0, 3, 3, 0), [0, 0]),
        # and added to the server's: (20, 20, 20, 20) / 80 is the same for all, which is Eq. 5 again.
        ({}, (20, 0, 20, 10), (0, 20, 0, 10), [0, 1]),
        # (10, 50, 30, 10) / 100: -.01, -.1, -.24, -.1; -.09, -.2, -.15, -.2
        ({"floor": 0.0}, (10, 20, 20, 0), (0, 30, 10, 10), [0, 0]),
        ({"calibrate": False}, (90, 10, 0, 0), (5, 5, 0, 0), [0, 1]),
    ],
)
def test_selection_in_training_is_weighed_by_earlier_ones(
    settings: dict[str, Any], counts: Any, own: Any, expected: list[int]
) -> None:
    """Below Eq. 6: argmax (cos - 1) q_g."""
    batch = whole(2)
    assert small(**settings).choose(NEAR, batch, context(counts=counts, own=own)).tolist() == expected


def test_frequencies_count_the_server_and_the_client_itself() -> None:
    method = small(floor=0.01)
    found = method.frequency(context(counts=(6, 0, 2, 0), own=(0, 1, 1, 0)))
    np.testing.assert_allclose(found, np.array([6, 1, 3, 0]) / 10 + 0.01, rtol=1e-6)
    np.testing.assert_array_equal(method.frequency(context()), np.ones(G))


def test_a_batch_may_take_the_group_of_most_of_its_samples() -> None:
    """Padding has no vote, and ties go to the first group."""
    scores = torch.eye(G)[torch.tensor([3, 1, 1, 3, 3])]
    batch, method = whole(5), small(majority=True)
    assert method.choose(scores, batch, context()).tolist() == [3] * 5
    padded = batch._replace(weight=torch.tensor([1.0, 1, 1, 0, 0]))
    assert method.choose(scores, padded, context()).tolist() == [1] * 5
    tied = batch._replace(weight=torch.tensor([1.0, 1, 1, 1, 0]))
    assert method.choose(scores, tied, context()).tolist() == [1] * 5
    assert method.count(torch.tensor([1] * 5), padded).tolist() == [0, 3, 0, 0]
    # Only in training.
    params = some(method)
    expected = cosines(whole(20).frozen["query"], params["keys"]).argmax(1)
    assert len(set(expected)) > 1
    np.testing.assert_array_equal(method.tuning.select(MODEL, params, whole(20)), expected)
