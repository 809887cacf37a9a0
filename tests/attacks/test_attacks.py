"""Attacks: what malicious clients send, and what it does to a small federation."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from promptfed.attacks import bench, outcome
from promptfed.attacks.base import TARGET
from promptfed.attacks.label_flip import LabelFlip
from promptfed.attacks.outcome import Cell
from promptfed.attacks.page import page as render
from promptfed.attacks.pixel_trigger import SHARE, PixelTrigger, stamped
from promptfed.attacks.prompt_backdoor import LIMIT, PromptBackdoor
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
    plan = bench.prepare(None, SMALL, ["scaled"], ["mean", "median"], 0.2, [], tmp_path)
    cells = bench.execute(plan, Console(quiet=True))
    found = {(cell.attack, cell.defence): cell.accuracy for cell in cells}
    assert found["scaled", "mean"] < found["none", "mean"] - 0.1
    assert found["scaled", "median"] > found["scaled", "mean"] + 0.1
    assert all(cell.success is None for cell in cells), "it wants no class in particular"
    assert (tmp_path / "attacks.md").read_text() == outcome.table(cells)
    assert "scaled" in (tmp_path / "attacks.html").read_text()


def test_a_backdoor_shows_with_its_trigger_only(tmp_path: Path) -> None:
    plan = bench.prepare(None, {**SMALL, "rounds": 2}, ["prompt-backdoor"], ["mean"], 0.4, [3], tmp_path)
    clean, attacked = bench.execute(plan, Console(quiet=True))
    assert attacked.success is not None
    assert attacked.chance is not None
    assert attacked.success > attacked.chance + 0.3, "the trigger alone does not do it"
    assert attacked.accuracy > clean.accuracy - 0.2
    rows = json.loads((tmp_path / "attacks.json").read_text())["rows"]
    assert [(row["attack"], row["seed"]) for row in rows] == [("none", 3), ("prompt-backdoor", 3)]
    assert rows[1]["success"] == attacked.success
    with (tmp_path / "attacks.csv").open() as file:
        assert [row["success"] for row in csv.DictReader(file)] == ["", str(attacked.success)]


def test_labels_of_malicious_clients_are_flipped_in_training_only(tmp_path: Path) -> None:
    before = tiny_federation(tmp_path)
    after = LabelFlip().poisoned(before, [1])
    last = len(before.dataset.classes) - 1
    index = before.sites[1].train
    assert (after.dataset.labels[index] == last - before.dataset.labels[index]).all()
    others = np.delete(np.arange(len(before.dataset.labels)), index)
    assert (after.dataset.labels[others] == before.dataset.labels[others]).all()
    _, wanted = LabelFlip().aimed(before.dataset.images[:3], np.array([0, 1, 3]), 4)
    assert wanted.tolist() == [3, 2, 0]


def test_a_share_of_malicious_images_carries_the_patch_and_the_target(tmp_path: Path) -> None:
    before = tiny_federation(tmp_path)
    after = PixelTrigger().poisoned(before, [0, 2])
    changed = np.flatnonzero((after.dataset.images != before.dataset.images).any((1, 2, 3)))
    own = [site.train for site in (before.sites[0], before.sites[2])]
    assert len(changed) == sum(int(SHARE * len(index)) for index in own)
    assert set(changed) <= set(np.concatenate(own))
    assert (after.dataset.images[changed] == stamped(before.dataset.images[changed])).all()
    assert (after.dataset.labels[changed] == TARGET).all()
    assert after.dataset.fingerprint != before.dataset.fingerprint, "features of clean images are cached"


def test_a_learned_trigger_stays_within_its_limit() -> None:
    attack, images = PromptBackdoor(), np.full((1, 3, 4, 4), 250, np.uint8)
    attack.trigger = torch.full((3, 4, 4), LIMIT)
    shown, wanted = attack.aimed(images, np.array([2]), 4)
    assert shown.dtype == np.uint8
    assert (shown == 255).all()
    assert wanted.tolist() == [TARGET]


def test_tables_have_means_over_seeds() -> None:
    cells = [
        Cell("none", "mean", 0, 0.6),
        Cell("none", "mean", 1, 0.8),
        Cell("label-flip", "mean", 0, 0.5, 0.2, 0.1),
        Cell("label-flip", "mean", 1, 0.7, 0.4, 0.1),
    ]
    assert outcome.table(cells) == (
        "| accuracy | mean |\n|---|---|\n| none | 70.0 |\n| label-flip | 60.0 (-10.0) |\n\n"
        "| success | mean |\n|---|---|\n| label-flip | 30.0 (10.0) |\n"
    )
    page = render(cells, {"method": "promptfl", "dataset": "shapes", "share": 0.2})
    assert "--share: 0.300" in page, "the colour of a success of 30 %"
    assert "--share: 0.143" in page, "a seventh of the accuracy is lost"
    assert "http" not in page.replace("http-equiv", ""), "it loads nothing"


def test_false_losses_weigh_more_and_a_limit_takes_that_away(tmp_path: Path) -> None:
    given = {**SMALL, "method": {"name": "dp2fl", "epochs": 1, "depth": 1}, "backbone": "clip-mini"}
    given["dataset"] = {"name": "shapes", "limit": 100}
    found = {}
    for liars in (0.0, 0.2):
        given["method"] = {**given["method"], "liars": liars}
        plan = bench.prepare(None, given, ["false-losses"], ["mean"], 0.2, [], tmp_path / str(liars))
        found[liars] = bench.execute(plan, Console(quiet=True))[1]
    lying, limited = found[0.0], found[0.2]
    assert lying.weight_own is not None
    assert limited.weight_own is not None
    assert lying.weight_own > 0.4, "one of five, backwards"
    assert limited.weight_own < lying.weight_own - 0.1
    assert lying.weight_shared == pytest.approx(1 / 4), "at most 1 / (K - 1)"


@pytest.mark.parametrize(
    ("attacks", "defences", "share", "why"),
    [
        (["scale"], [], 0.2, '--attacks = "scale"'),
        ([], [], 0.5, "--share = 0.5 must be above 0 and below 0.5"),
        ([], ["sum"], 0.2, "aggregation.name"),
        (["false-losses"], [], 0.2, '--attacks = "false-losses" cannot be tried on "promptfl"'),
    ],
)
def test_what_cannot_be_attacked_is_one_sentence(
    attacks: list[str], defences: list[str], share: float, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        bench.prepare(None, {}, attacks, defences, share, [], tmp_path)
    assert why in str(error.value)
