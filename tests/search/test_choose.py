"""Choosing a method: the race against the clock, its ranking, and the file that run takes."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from promptfed import choose, run
from promptfed.errors import UserError
from promptfed.runs import config as C
from promptfed.search import choose as ch
from promptfed.search import race as rc
from promptfed.search.workers import Pool

TINY: dict[str, Any] = {
    "dataset": {"name": "shapes", "limit": 160},
    "partition": {"name": "iid", "clients": 3},
    "backbone": "vit-mini",
    "method.epochs": 1,
    "engine.workers": 1,
    "rounds": 4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


# ---- before the first round


def test_a_budget_of_zero_a_full_folder_and_an_empty_validation_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--minutes = 0 must be greater than 0"):
        choose(minutes=0, out=tmp_path / "out", **TINY)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not empty; choose another --out"):
        choose(minutes=1, out=tmp_path, **TINY)
    bare = {**TINY, "partition": {"name": "iid", "clients": 3, "split": (0.8, 0.0, 0.2)}}
    with pytest.raises(UserError, match=r"partition\.split = \[0\.8, 0\.0, 0\.2\]: no client has validation data"):
        choose(minutes=1, out=tmp_path / "out", **bare)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("backbone", "usual", "left_out"),
    [
        ("clip-mini", ch._FOR_CLIP, {"fedprox+maple"}),  # its prompts are deeper than the model
        ("vit-mini", ch._FOR_VIT, set()),
        ("cnn", ch._FROM_SCRATCH, set()),
        ("vit-tiny", ch._FROM_SCRATCH, set()),
    ],
)
def test_the_usual_candidates_fit_their_backbones(
    backbone: str, usual: tuple[str, ...], left_out: set[str], tmp_path: Path
) -> None:
    plan = ch.prepare(None, {**TINY, "backbone": backbone}, out=tmp_path)
    assert set(plan.left_out) == left_out
    assert set(plan.candidates) == set(usual) - left_out


def test_a_candidate_that_is_named_must_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no text tower"):
        ch.prepare(None, TINY, methods=["head-tune", "promptfl"], out=tmp_path)


def test_a_candidate_that_trains_on_validation_data_is_refused(tmp_path: Path) -> None:
    given = {**TINY, "backbone": "clip-mini"}
    with pytest.raises(UserError, match='"dp2fl" uses validation data in training, and candidates are ranked on these'):
        ch.prepare(None, given, methods=["promptfl", "dp2fl"], out=tmp_path)


# ---- the race, without training


def arm(name: str, vals: list[float], round: int = 2, factor: float = 1.0, seconds: float = 1.0) -> rc.Arm:
    made = rc.Arm(name, factor, C.make({"method": {"name": "fedavg"}}), Path(name), done=round, train=seconds)
    made.vals[round] = dict(enumerate(vals))
    return made


def race(tmp_path: Path, arms: list[rc.Arm], minutes: float = 1.0, rounds: int = 9) -> rc.Race:
    pool = Pool("cpu", tmp_path / "log")
    pool.size = 1
    made = rc.Race({}, rounds, 60 * minutes, tmp_path, pool, time.monotonic())
    made.arms, made._load, made._complete = arms, 0.0, rounds
    return made


def test_the_best_are_kept_with_two_methods_among_them() -> None:
    arms = [arm("a", [0.9]), arm("a", [0.8], factor=3.0), arm("a", [0.7], factor=0.1), arm("b", [0.1])]
    assert [(one.name, one.factor) for one in rc._best(arms, 3)] == [("a", 1.0), ("a", 3.0), ("b", 1.0)]
    assert [one.name for one in rc._best(arms, 1)] == ["a", "b"]


def test_a_candidate_too_slow_for_the_budget_is_told_so(tmp_path: Path) -> None:
    found = race(tmp_path, [arm("quick", [0.5]), arm("slow", [0.9], seconds=30.0)])
    found._drop_slow()
    assert [one.name for one in found.arms] == ["quick"]
    assert found.left_out == {"slow": "too slow for the budget of 1.0 min: 3 of its 9 rounds would take about 1.5 min"}
    with pytest.raises(UserError, match=r"--minutes = 1 is too short for every candidate \(slow: too slow"):
        race(tmp_path, [arm("slow", [0.9], seconds=30.0)])._drop_slow()


def test_a_candidate_that_gets_only_part_of_its_rounds_stays_in_the_race(tmp_path: Path) -> None:
    found = race(tmp_path, [arm("quick", [0.5]), arm("slow", [0.9], seconds=15.0)])  # 9 rounds in 135 s, 3 in 45
    found._drop_slow()
    assert {one.name for one in found.arms} == {"quick", "slow"}
    chosen, rung = found._fitting(rc._ordered(found.arms), 9, share=60.0)  # two, up to a round that there is time for
    assert ({one.name for one in chosen}, rung) == ({"quick", "slow"}, 5)


def test_cheap_candidates_get_more_learning_rates_than_there_is_time_for_all(tmp_path: Path) -> None:
    found = race(tmp_path, [arm("slow", [0.9], seconds=9.0), arm("quick", [0.5], seconds=0.1)])
    found._candidates = {one.name: one.config for one in found.arms}
    made = found._variants(3, share=60.0)
    assert [one.name for one in made if one.name == "quick"] == ["quick"] * 4
    assert len(made) == 5  # 27 s for each of the slow one's


def trained(found: rc.Race, best: float) -> list[float]:
    """The factors that a race tries beyond those it has, if accuracy falls with the distance to the best one."""
    tried = []

    def train(arms: list[rc.Arm], rounds: int, seconds: float) -> None:
        for one in arms:
            tried.append(one.factor)
            one.vals[rounds] = {0: 0.9 - 0.1 * abs(np.log(one.factor / best))}

    found._candidates = {one.name: one.config for one in found.arms}
    found._train = train  # type: ignore[method-assign, assignment]
    found._further(found.arms, 2, share=30.0)
    return tried


@pytest.mark.parametrize(
    ("best", "beyond"),
    [(1.0, []), (10.0, [30.0]), (80.0, [30.0, 90.0, 270.0]), (0.1, [0.1 / 3]), (1 / 90, [0.1 / 3, 0.1 / 9, 0.1 / 27])],
)
def test_further_learning_rates_follow_until_the_best_one_is_not_at_the_edge(
    tmp_path: Path, best: float, beyond: list[float]
) -> None:
    arms = [arm("a", [0.9 - 0.1 * abs(np.log(factor / best))], factor=factor) for factor in (1.0, 10.0, 0.1)]
    found = race(tmp_path, [*arms, arm("b", [0.1])])
    assert trained(found, best) == pytest.approx(beyond)
    assert found._edge(max(found.arms, key=lambda one: one.value())) == ""


def test_further_learning_rates_that_there_is_no_time_for_are_not_tried(tmp_path: Path) -> None:
    arms = [arm("a", [0.9], factor=3.0, seconds=20.0), arm("a", [0.5], seconds=20.0)]
    found = race(tmp_path, arms)
    assert trained(found, 100.0) == []
    assert found.ranking()[0].edge == "highest"


def test_what_is_planned_fits_the_time(tmp_path: Path) -> None:
    arms = [arm(name, [0.5]) for name in "abcd"]
    found = race(tmp_path, arms)
    chosen, rung = found._fitting(arms, 9, share=20.0)  # 7 s each: two fit into 17
    assert (len(chosen), rung) == (2, 9)
    chosen, rung = found._fitting(arms, 9, share=10.0)  # two up to an earlier round
    assert (len(chosen), rung) == (2, 6)
    assert found._fitting(arms, 9, share=1.0) == ([], 0)


def test_the_ranking_says_what_the_clients_can_tell(tmp_path: Path) -> None:
    lead, noise = np.linspace(0.6, 0.9, 30), np.tile([0.04, -0.04], 15)
    arms = [
        arm("far", list(lead - 0.2 + noise)),
        arm("near", list(lead - 0.002 + noise)),
        arm("lead", list(lead)),
        arm("lead", list(lead - 0.3), factor=3.0),
    ]
    ranked = race(tmp_path, arms).ranking()
    assert [(one.method, one.word) for one in ranked] == [
        ("lead", ""),
        ("near", "cannot be told apart"),
        ("far", "behind"),
    ]
    assert ranked[2].behind
    assert ranked[2].behind.low < 0.2 < ranked[2].behind.high
    said = ch.Chosen(tmp_path, ranked, {}, 9, 1.0).sentences()
    assert said[1] == "Its learning rate is the lowest of 2 tried: a further one may be better."
    assert said[2] == "Accuracies are the best of up to 2 learning rates on the same validation data, one seed."
    assert "cannot tell it from near:" in said[3]


def test_a_rung_that_was_not_completed_by_all_ranks_nobody(tmp_path: Path) -> None:
    """Else the first to end it, the cheapest, would be chosen."""
    good, cheap = arm("good", [0.9, 0.9]), arm("cheap", [0.5, 0.52])
    cheap.vals[4] = {0: 0.55, 1: 0.55}
    found = race(tmp_path, [good, cheap])
    found._complete = 2
    assert [(one.method, one.rounds) for one in found.ranking()] == [("good", 2), ("cheap", 2)]


def test_one_that_was_ahead_before_it_was_given_up_is_told(tmp_path: Path) -> None:
    first, other = arm("first", [0.5, 0.52]), arm("other", [0.9, 0.91])
    first.vals[9] = {0: 0.7, 1: 0.7}
    said = ch.Chosen(tmp_path, race(tmp_path, [first, other]).ranking(), {}, 9, 1.0).sentences()
    assert said[1] == "After fewer rounds other had been ahead of it."
    assert not any("cannot tell" in sentence for sentence in said)


# ---- what is given


def test_settings_go_to_the_candidates_that_have_them(tmp_path: Path) -> None:
    plan = ch.prepare(None, {**TINY, "method": {"tokens": 3}}, methods=["head-tune", "fedvpt"], out=tmp_path / "a")
    assert plan.candidates["fedvpt"].method.method.tuning.tokens == 3
    with pytest.raises(UserError, match=r"^method\.tokens is not a setting of any method that is compared"):
        ch.prepare(None, {**TINY, "method": {"tokens": 3}}, methods=["head-tune"], out=tmp_path / "b")
    with pytest.raises(UserError, match=r'^method\.name = "pfedpg" is what is chosen: name candidates with --methods$'):
        ch.prepare(None, {**TINY, "method": "pfedpg"}, methods=["head-tune"], out=tmp_path / "c")
    assert list(ch.prepare(None, TINY, methods="head-tune, local+head", out=tmp_path / "d").candidates) == [
        "head-tune",
        "local+head",
    ]


def test_a_candidate_that_has_no_time_left_does_not_end_the_race(tmp_path: Path) -> None:
    arms = [arm("slow", [0.9], seconds=30.0), arm("fast", [0.5], seconds=0.1), arm("other", [0.4], seconds=0.1)]
    chosen, to = race(tmp_path, arms)._fitting(arms, 3, share=10.0)
    assert [one.name for one in chosen] == ["fast", "other"]
    assert to == 3


# ---- all of it


def test_a_choice_is_made_in_time_and_its_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rc, "_FACTORS", (1.0, 3.0))
    # Far more time than is needed: what is done must not depend on how busy the machine is.
    found = choose(methods=["class-mean", "head-tune", "local+head"], minutes=30, out=tmp_path / "out", **TINY)
    assert found.seconds < 30 * 60
    assert found.ranking[0].rounds == 4
    values = [one.val for one in found.ranking]
    assert {one.method for one in found.ranking} == {"class-mean", "head-tune", "local+head"}
    assert values[0] == max(one.val for one in found.ranking if one.rounds == found.ranking[0].rounds)
    written = json.loads((tmp_path / "out" / ch.RANKING).read_text())
    assert [row["method"] for row in written["ranking"]] == [one.method for one in found.ranking]
    assert not list((tmp_path / "out").glob("*/checkpoint.safetensors"))
    result = run(found.file, out=tmp_path / "run")
    assert result.numbers["method"] == found.ranking[0].method
    assert result.numbers["rounds"] == 4
    assert result.metrics["val"] == pytest.approx(found.ranking[0].val)  # the same run as in the race


def test_ctrl_c_ends_the_race_and_keeps_its_ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rc.Race._train

    def train(self: rc.Race, arms: list[rc.Arm], rounds: int, seconds: float) -> None:
        if rounds > 1:
            raise KeyboardInterrupt
        whole(self, arms[:2], rounds, seconds)

    monkeypatch.setattr(rc.Race, "_train", train)
    names = ["class-mean", "head-tune", "local+head"]
    found = ch.execute(ch.prepare(None, TINY, methods=names, minutes=30, out=tmp_path / "out"))
    assert {one.method for one in found.ranking} == {"class-mean", "head-tune"}
    assert found.left_out == {"local+head": "its first round was not completed"}
    assert found.sentences()[0].endswith("the ranking is that of an unfinished race.")
    assert json.loads((tmp_path / "out" / ch.RANKING).read_text())["stopped"]
    assert C.read(found.file)["rounds"] == 4
    with pytest.raises(KeyboardInterrupt):  # a script does not go on as if nothing had happened
        choose(methods=names, minutes=30, out=tmp_path / "again", **TINY)
    assert (tmp_path / "again" / ch.CHOSEN).exists()


def test_a_budget_that_is_too_short_for_every_candidate_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--minutes = 0\.002 is too short for every candidate \(head-tune: .*; local"):
        choose(methods=["head-tune", "local+head"], minutes=0.002, out=tmp_path / "out", **TINY)


@pytest.mark.parametrize(("backbone", "scratch"), [("cnn", True), ("vit-mini", False), ("clip-mini", False)])
def test_candidates_are_told_and_what_a_backbone_from_scratch_leaves_out(
    backbone: str, scratch: bool, tmp_path: Path
) -> None:
    plan = ch.prepare(None, {"backbone": backbone, "dataset": "shapes"}, out=tmp_path / "choice")
    said = plan.sentence()
    assert said.startswith(f"candidates on {backbone}: {', '.join(plan.candidates)}")
    assert ("set backbone.name to a pre-trained model" in said) is scratch
