"""Attacks: what malicious clients send, and what it does to a small federation."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from promptfed.attacks import bench
from promptfed.attacks.label_flip import flipped
from promptfed.attacks.untargeted import UNTARGETED
from promptfed.errors import UserError
from promptfed.testing import tiny_federation

CHANGES = np.random.default_rng(0).normal(1, 0.5, (10, 4))
BAD = [1, 6]
HONEST = np.delete(CHANGES, BAD, 0)


def forged(name: str) -> np.ndarray:
    malicious = torch.tensor([i in BAD for i in range(10)])
    return UNTARGETED[name](torch.from_numpy(CHANGES), malicious, torch.Generator().manual_seed(0)).numpy()


def test_own_changes_are_sent_backwards() -> None:
    assert forged("sign-flip") == pytest.approx(-CHANGES[BAD])
    assert forged("scaled") == pytest.approx(-100 * CHANGES[BAD])


def test_noise_is_a_hundred_times_as_long_as_an_honest_change() -> None:
    typical = sorted(np.linalg.norm(HONEST, axis=1))[3]  # the lower of the two in the middle
    assert np.linalg.norm(forged("gaussian"), axis=1) == pytest.approx([100 * typical] * 2)


def test_a_little_is_enough() -> None:
    # Of 10, a majority of 6 needs 4 honest supporters: z with P(Z < z) = (8 - 4) / 8 is 0 ...
    assert forged("alie") == pytest.approx(np.tile(HONEST.mean(0), (2, 1)))


def test_the_mean_of_all_points_backwards() -> None:
    # (8 m - 12 m) / 10
    everything = np.concatenate([HONEST, forged("ipm")])
    assert everything.mean(0) == pytest.approx(-0.4 * HONEST.mean(0))


def test_no_forged_change_is_farther_than_honest_ones_are_from_each_other() -> None:
    most = max(math.dist(a, b) for a in HONEST for b in HONEST)
    one = forged("min-max")[0]
    assert max(math.dist(one, a) for a in HONEST) == pytest.approx(most, rel=1e-3)
    assert (one < HONEST.mean(0)).all()


SMALL = {
    "method": {"name": "head-tune", "epochs": 2},
    "backbone": "vit-mini",
    "dataset": {"name": "shapes", "limit": 160},
    "partition": {"name": "iid", "clients": 5},
    "rounds": 1,
}


def test_a_long_update_ruins_the_mean_and_not_the_median(tmp_path: Path) -> None:
    plan = bench.prepare(None, SMALL, ["scaled"], ["mean", "median"], 0.2, tmp_path)
    found = bench.execute(plan, Console(quiet=True))
    assert found["scaled"]["mean"] < found["none"]["mean"] - 0.1
    assert found["scaled"]["median"] > found["scaled"]["mean"] + 0.1
    assert (tmp_path / "attacks.md").read_text() == bench.table(found)


def test_labels_of_malicious_clients_are_flipped_in_training_only(tmp_path: Path) -> None:
    before = tiny_federation(tmp_path)
    after = flipped(before, [1])
    last = len(before.dataset.classes) - 1
    index = before.sites[1].train
    assert (after.dataset.labels[index] == last - before.dataset.labels[index]).all()
    others = np.delete(np.arange(len(before.dataset.labels)), index)
    assert (after.dataset.labels[others] == before.dataset.labels[others]).all()


@pytest.mark.parametrize(
    ("attacks", "defences", "share", "why"),
    [
        (["scale"], [], 0.2, '--attacks = "scale"'),
        ([], [], 0.5, "--share = 0.5 must be above 0 and below 0.5"),
        ([], ["sum"], 0.2, "aggregation.name"),
    ],
)
def test_what_cannot_be_attacked_is_one_sentence(
    attacks: list[str], defences: list[str], share: float, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        bench.prepare(None, {}, attacks, defences, share, tmp_path)
    assert why in str(error.value)
