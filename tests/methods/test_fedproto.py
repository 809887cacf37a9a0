"""FedProto's prototypes: sums over samples, the server's means, and the distance to them in the loss."""

from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import MODEL, B, whole

from promptfed.clients.messages import Train, read_update
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.phases import Context, Update
from promptfed.precision import reduced
from tiny import CLASSES, arrays, cross_entropy, features, numbers, samples, toy_host

WIDTH = 4


def test_the_loss_adds_the_distance_of_each_samples_features_to_the_prototype_of_its_class() -> None:
    method = create("fedproto", {"lamda": 0.3})
    g = np.random.default_rng(0)
    prototypes = torch.from_numpy(g.normal(size=(CLASSES, WIDTH)).astype(np.float32))
    down = {"prototypes": prototypes, "known": torch.tensor([1.0, 0.0, 1.0])}
    ctx = Context(down, {}, None, torch.tensor(6), torch.ones(CLASSES))
    x, y = arrays(samples(6, 1))
    z = features(numbers(MODEL.weights), x)
    here = [c for c in range(CLASSES) if (y == c).any()]
    assert {0, 2} & set(here)
    far = sum(((z[i] - prototypes[c].numpy()) ** 2).sum() / WIDTH for i, c in enumerate(y) if c != 1) / 6
    loss, stats = method.loss(MODEL, dict(MODEL.weights), whole(), ctx)
    assert loss.item() == pytest.approx(cross_entropy(numbers(MODEL.weights), x, y) + 0.3 * far, rel=1e-5)
    for c in range(CLASSES):
        assert stats["seen"][c] == (y == c).sum()
        np.testing.assert_allclose(stats["sum"][c].numpy(), z[y == c].sum(0), atol=1e-5)


def test_sums_are_in_single_precision() -> None:
    ctx = Context(
        {"prototypes": torch.zeros(CLASSES, WIDTH), "known": torch.zeros(CLASSES)},
        {},
        None,
        torch.tensor(6),
        torch.ones(CLASSES),
    )
    with reduced(torch.device("cpu"), "bf16"):
        _, stats = create("fedproto").loss(MODEL, dict(MODEL.weights), whole(), ctx)
    assert {s.dtype for s in stats.values()} == {torch.float32}


def answer(*rows: tuple[float, float]) -> dict[str, torch.Tensor]:
    """One feature: its sum and number of samples, for each class."""
    return {"sum": torch.tensor([[s] for s, _ in rows]), "seen": torch.tensor([n for _, n in rows])}


def test_the_server_takes_the_mean_over_all_samples_of_a_class() -> None:
    method = create("fedproto")
    state = {"prototypes": torch.tensor([[0.0], [7.0], [0.0]]), "known": torch.tensor([0.0, 1.0, 0.0])}
    updates = [
        Update(0, {}, {}, 4, answer((8.0, 4), (0.0, 0), (0.0, 0))),
        Update(1, {}, {}, 1, answer((5.0, 1), (0.0, 0), (0.0, 0))),
    ]
    assert all(method.unusable(state, update) == "" for update in updates)
    new = method.aggregate(state, updates)
    assert new["prototypes"].flatten().tolist() == pytest.approx([13 / 5, 7, 0])
    assert new["known"].tolist() == [1, 1, 0]


def test_answers_that_cannot_be_aggregated() -> None:
    method = create("fedproto")
    state = {"prototypes": torch.zeros(2, 1), "known": torch.zeros(2)}
    good = answer((1.0, 1), (1.0, 1))
    for stats in ({}, {**good, "sum": torch.zeros(3, 1)}, {**good, "more": torch.zeros(1)}):
        assert method.unusable(state, Update(0, {}, {}, 1, stats)) == "no prototypes, or of another shape"
    negative = answer((1.0, -1), (1.0, 1))
    assert method.unusable(state, Update(0, {}, {}, 1, negative)) == "negative numbers of samples"


def test_no_weight_is_sent(tmp_path: Path) -> None:
    method = create("fedproto", {"batch_size": B, "epochs": 1})
    host = toy_host(method, tmp_path)
    state = method.begin(MODEL, host.init, 0)
    _, (blob,) = host.train([[host.work(1, method.down(state, 1), 1)]], Train(round=1, score=False))
    up, stats = read_update(blob)
    assert up == {}
    assert {name: tuple(s.shape) for name, s in stats.items()} == {"sum": (CLASSES, WIDTH), "seen": (CLASSES,)}
    assert stats["seen"].sum() == 6
    host.store.close()


def test_features_that_are_not_trained_are_refused() -> None:
    with pytest.raises(UserError, match='FedProto needs a tuning with a "body"'):
        create("fedproto+head")
