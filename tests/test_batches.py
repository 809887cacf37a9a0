"""Batches: which samples are drawn, and what a loss sees of them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from client_blocks import MODEL, block_of, run
from promptfed.methods import create
from promptfed.phases import Batch, Phase
from promptfed.seeding import rng
from promptfed.training import Samples, Work, batches, train
from tiny import CLIENT, ROUND, SEED, samples

# ---- batches


def drawn(n: int, **phase: int) -> list[np.ndarray]:
    return list(batches(n, Phase({}, 4, **phase), rng(0)))


def test_an_epoch_visits_every_sample_once_and_ends_with_a_short_batch() -> None:
    found = drawn(10, epochs=3)
    assert [len(index) for index in found] == [4, 4, 2] * 3
    epochs = [np.concatenate(found[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(10))


@pytest.mark.parametrize(("n", "sizes"), [(8, [4, 4]), (3, [3]), (1, [1]), (5, [4, 1])])
def test_batches_of_one_epoch(n: int, sizes: list[int]) -> None:
    assert [len(index) for index in drawn(n, epochs=1)] == sizes


def test_steps_go_on_over_epochs_and_stop_exactly() -> None:
    found = drawn(10, steps=5)
    assert [len(index) for index in found] == [4, 4, 2, 4, 4]
    assert sorted(np.concatenate(found[:3]).tolist()) == list(range(10))
    assert len(set(np.concatenate(found[3:]).tolist())) == 8
    assert [len(index) for index in drawn(10, steps=1)] == [4]
    assert [len(index) for index in drawn(1, steps=6)] == [1] * 6


def test_nothing_is_drawn_without_samples_epochs_or_steps() -> None:
    assert drawn(0, epochs=3) == drawn(0, steps=3) == drawn(10, epochs=0) == []


@pytest.mark.parametrize("other", [(SEED + 1, ROUND, CLIENT), (SEED, ROUND + 1, CLIENT), (SEED, ROUND, CLIENT + 1)])
def test_batches_depend_on_seed_round_and_client(other: tuple[int, int, int]) -> None:
    method = create("fedavg", {"epochs": 1, "batch_size": 4, "lr": 0.2})

    def once(seed: int, round: int, client: int) -> Tensor:
        one = Work(client, samples(12), dict(MODEL.weights), {}, {})
        return train(method, MODEL, [one], method.phases(round), seed, round)[0].params["head.weight"]

    assert torch.equal(once(SEED, ROUND, CLIENT), once(SEED, ROUND, CLIENT))
    assert not torch.allclose(once(SEED, ROUND, CLIENT), once(*other), atol=1e-5)


def test_training_does_not_depend_on_the_global_random_state() -> None:
    method = create("pfedpt", {"prompt": "random-patch", "prompt_size": 2, "batch_size": 4})
    one = block_of(method)[0]
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = run(method, [one])[0]
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    again = run(method, [one])[0]
    assert all(torch.equal(p, again.params[name]) for name, p in first.params.items())


# ---- batches as a loss sees them


def test_images_are_normalised_channel_by_channel() -> None:
    x = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    data = Samples(
        x, torch.tensor([0]), torch.tensor([51.0, 102.0]).reshape(2, 1, 1), torch.tensor([51.0, 153.0]).reshape(2, 1, 1)
    )
    assert data.images(slice(None)).flatten().tolist() == [-1, 1]


def test_the_mean_of_a_batch_leaves_padding_out() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, 100.0])
    batch = Batch(values, values, torch.tensor([1.0, 1.0, 1.0, 0.0]), values, {})
    assert batch.mean(values).item() == 3
    assert batch._replace(weight=None).mean(values).item() == 27.25
    assert batch._replace(weight=torch.zeros(4)).mean(values).item() == 0


def test_halves_are_the_even_and_the_odd_samples() -> None:
    batch = Batch(
        torch.arange(5) * 10,
        torch.arange(5),
        torch.tensor([1.0, 1, 1, 1, 0]),
        torch.zeros(2),
        {"z": torch.arange(5) + 50},
    )
    for which, places in ((0, [0, 2, 4]), (1, [1, 3])):
        half = batch.half(which)  # type: ignore[arg-type]
        assert half.y.tolist() == places
        assert half.x.tolist() == [10 * i for i in places]
        assert half.extra["z"].tolist() == [50 + i for i in places]
        assert half.weight.tolist() == [0.0 if i == 4 else 1.0 for i in places]
    assert batch._replace(weight=None).half(1).weight is None


def test_a_lone_sample_is_both_halves_of_a_padded_batch() -> None:
    batch = Batch(
        torch.arange(5), torch.arange(5), torch.tensor([1.0, 0, 0, 0, 0]), torch.zeros(2), {"z": torch.arange(5)}
    )
    for which in (0, 1):
        half = batch.half(which)  # type: ignore[arg-type]
        for values in (half.x, half.y, half.extra["z"]):
            assert half.mean(values + 10.0).item() == 10
        assert half.weight.sum().item() == 1
