"""Tuning: what is searched, real trials in worker processes, resuming, and the file that compare runs."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from promptfed import compare, tune
from promptfed.errors import UserError
from promptfed.runs import comparison, record
from promptfed.runs import config as C
from promptfed.search import space as S
from promptfed.search import study
from promptfed.search import tune as T

TINY: dict[str, Any] = {
    "dataset": {"name": "digits", "limit": 120, "size": 16},
    "partition": {"name": "iid", "clients": 3},
    "method.epochs": 1,
    "rounds": 2,
    "engine.workers": 1,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def config(method: str, **settings: Any) -> C.Config:
    return C.make({"method": {"name": method, **settings}})


# ---- the space


def test_a_range_of_a_rate_is_searched_on_a_log_scale() -> None:
    found = S.parse(
        ["method.lr=0.001..0.1", "method.epochs=1..5", "method.optimizer=sgd|adam", "method.momentum=0..0.9"]
    )
    assert found["method.lr"] == S.Range(0.001, 0.1, log=True)
    assert found["method.lr"].at(0.5) == 0.01
    assert found["method.epochs"] == S.Range(1, 5, log=False, whole=True)
    assert found["method.optimizer"] == S.Choice(("sgd", "adam"))
    assert found["method.momentum"].at(0.5) == 0.45


def test_the_default_space_is_every_rate_of_the_rows_method_a_decade_to_each_side() -> None:
    assert S.of_rates(config("pfedpt", lr=0.02)) == {
        "method.lr": S.Range(0.002, 0.2, log=True),
        "method.prompt_lr": S.Range(0.1, 10.0, log=True),
    }
    assert set(S.of_rates(config("pfedpg"))) == {"method.lr", "method.server_lr"}
    assert S.of_rates(config("zero-shot")) == {}  # it has a rate, and trains nothing


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method.lrr=0.1..1", r'--space: method\.lrr is not a setting of any method .* did you mean "method\.lr"'),
        ("methd.lr=0.1..1", r"methd\.lr is not a setting"),
        ("method.lr=0.1", r'--space = "method\.lr=0\.1" must be of the form'),
        ("method.lr=1..0.1", r'--space = "method\.lr=1\.\.0\.1" must go from a number to a greater one'),
        ("method.lr=0..1", r"must begin above 0"),
        ("method.lr=a..b", r"must have two numbers"),
        ("method.momentum=0.5..1.5", r"method\.momentum = 1\.5 should be less than 1"),
        ("seed=0..5", r"--space: seed must be the same for every trial"),
        ("partition.seed=0..5", r"--space: partition\.seed must be the same for every trial"),
    ],
)
def test_a_space_that_cannot_be_searched_is_one_sentence(word: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says) as caught:
        tune(methods=["fedavg"], space=[word], out=tmp_path / "out", **TINY)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_budget_of_zero_and_an_empty_validation_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--trials = 0 must be at least 1"):
        tune(methods=["fedavg"], trials=0, out=tmp_path, **TINY)
    bare = {**TINY, "partition": {"name": "iid", "clients": 3, "split": (0.8, 0.0, 0.2)}}
    with pytest.raises(UserError, match=r"partition\.split = \[0\.8, 0\.0, 0\.2\]: no client has validation data"):
        tune(methods=["fedavg"], trials=1, out=tmp_path, **bare)
    assert not list(tmp_path.glob("tune.json"))  # the folder is not taken by a search that cannot begin


@pytest.mark.parametrize("name", ["table.json", "choice.json"])
def test_the_folder_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match="holds something else than this search; choose another --out"):
        tune(methods=["fedavg"], trials=1, out=tmp_path, **TINY)


def test_a_comparison_is_not_tuned_by_more_trials_than_it_was_run_with(tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "tune.json").write_text('{"trials": 2}')
    (tmp_path / "table.json").write_text("[]")
    said = r"^--tune = 3: .* holds a comparison that was tuned by 2 trials per row; choose another --out$"
    with pytest.raises(UserError, match=said):
        compare(methods=["fedavg"], tune=3, out=tmp_path, **TINY)


# ---- studies, without training


def trained(each: study.Study, score: Any, rounds: int = 4) -> None:
    """All trials, with values of a function in place of training."""
    while trial := each.ask():
        values = [score(trial.values["method.lr"]) * round / rounds for round in range(1, rounds)]
        if all(each.report(trial, round, value) for round, value in enumerate(values, 1)):
            each.tell(trial, "done", score(trial.values["method.lr"]))
        else:
            each.tell(trial, "pruned", None)


def near(rate: float) -> float:
    """Highest at 0.03."""

    return 1.0 / (1.0 + math.log(rate / 0.03) ** 2)


RATES: S.Space = {"method.lr": S.Range(0.0005, 0.05, log=True)}
OWN = {"method.lr": 0.005}


def optuna_study(folder: Path, count: int, seed: int = 0) -> study.Study:
    return study.Optuna(folder / "row", RATES, OWN, count, name="row", rounds=4, seed=seed)


def test_any_seed_can_be_searched_with(tmp_path: Path) -> None:
    trained(optuna_study(tmp_path, 6, seed=20261118), near)


def test_optuna_keeps_the_budget_prunes_and_goes_on_from_its_journal(tmp_path: Path) -> None:
    trained(optuna_study(tmp_path, 8), near)
    again = optuna_study(tmp_path, 12)
    assert len(again.trials()) == 8
    trained(again, near)
    trials = optuna_study(tmp_path, 12).trials()
    assert [trial.number for trial in trials] == list(range(12))
    assert trials[0].values == OWN  # the row's own values come first, then some below and above them
    assert [trial.values["method.lr"] for trial in trials[1:4]] == [0.001581, 0.01581, 0.0008891]
    assert {trial.state for trial in trials} == {"done", "pruned"}
    assert len({trial.values["method.lr"] for trial in trials}) == 12
    best = study.best(again)
    assert best
    assert best.value == max(near(trial.values["method.lr"]) for trial in trials if trial.state == "done")
    assert best.value > near(0.005)


def test_an_interrupted_trial_is_asked_for_again(tmp_path: Path) -> None:
    first = optuna_study(tmp_path, 2).ask()
    assert optuna_study(tmp_path, 2).ask() == first


def test_a_grid_has_the_rows_own_values_and_then_fills_the_space(tmp_path: Path) -> None:
    grid = study.Grid(tmp_path, RATES, OWN, 9)
    trained(grid, near)
    rates = [trial.values["method.lr"] for trial in grid.trials()]
    assert rates[0] == 0.005
    assert len(set(rates)) == 9
    assert all(any(low <= rate < low * 3.17 for rate in rates) for low in (0.0005, 0.0016, 0.005, 0.0158))
    assert [t.values for t in study.Grid(tmp_path, RATES, OWN, 12)._trials[:9]] == [t.values for t in grid.trials()]


# ---- the file for compare


FILE = """
rounds = 3
[method]
lr = 0.02
[dataset]
name = "digits"
limit = 120
[mini]
rounds = 1
seeds = [4]
[mini.method]
epochs = 1
[compare]
seeds = [0, 1]
[[compare.rows]]
label = "A"
method = { name = "fedprox", mu = 0.5 }
mini = { rounds = 2 }
[[compare.rows]]
method = "local"
seeds = [2]
[[compare.columns]]
label = "few"
partition = { name = "iid", clients = 2 }
[[compare.columns]]
label = "many"
rounds = 4
partition = { name = "iid", clients = 4 }
"""


@pytest.mark.parametrize("mini", [False, True])
@pytest.mark.parametrize("methods", [(), ("fedavg", "local")])
@pytest.mark.parametrize("seeds", [(), (7, 8)])
@pytest.mark.parametrize("settings", [{}, {"rounds": 5, "method.epochs": 2, "partition.clients": 3}])
def test_the_file_is_the_comparison_with_the_chosen_values(
    tmp_path: Path, mini: bool, methods: Any, seeds: Any, settings: dict[str, Any]
) -> None:
    (tmp_path / "file.toml").write_text(FILE)
    source = T.Source(tmp_path / "file.toml", settings, methods, seeds, mini)
    plan = T.prepare(source, trials=3, out=tmp_path / "out")
    chosen = {job.row.label: study.Trial(1, {"method.lr": 0.3 + i}) for i, job in enumerate(plan.jobs)}
    (tmp_path / "tuned.toml").write_text(C.dump(T.tuned_file(plan, chosen)))
    made = comparison.prepare(tmp_path / "tuned.toml", {}, out=tmp_path, mini=mini)
    given = {"methods": methods, "seeds": seeds, "out": tmp_path, "mini": mini}
    plain = comparison.prepare(tmp_path / "file.toml", settings, **given)
    assert [(job.row.label, job.row.place, job.seed) for job in made.jobs] == [
        (job.row.label, job.row.place, job.seed) for job in plain.jobs
    ]
    for tuned, job in zip(made.jobs, plain.jobs, strict=True):
        rate = chosen[job.row.label].values["method.lr"]
        assert tuned.config.complete() == S.overlaid(job.config, {"method.lr": rate}).complete()
    assert made.budget == "tuned: 3 trials per row on validation data"
    with pytest.raises(UserError, match=r"compare\.tuned: the settings were chosen at the"):
        comparison.prepare(tmp_path / "tuned.toml", {}, out=tmp_path, mini=not mini)


def test_the_file_says_what_its_centralised_row_tunes(tmp_path: Path) -> None:
    source = T.Source(None, TINY, ("head-tune", "centralised"), (), False)
    plan = T.prepare(source, trials=1, out=tmp_path / "out")
    chosen = {job.row.label: study.Trial(1, {"method.lr": 0.3}) for job in plan.jobs}
    (tmp_path / "tuned.toml").write_text(C.dump(T.tuned_file(plan, chosen)))
    made = comparison.prepare(tmp_path / "tuned.toml", {}, out=tmp_path)
    assert [job.row.label for job in made.jobs] == ["head-tune", "centralised+head"]
    assert made.budget == "tuned: 1 trial per row on validation data"


# ---- all of it


def test_a_search_chooses_by_validation_accuracy_and_is_resumed_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = ["head-tune", "local+head"]
    found = tune(methods=rows, trials=3, out=out, **TINY)
    for slug, label in (("head-tune", "head-tune"), ("local-head", "local+head")):
        folders = sorted((out / slug).glob("trial-*"))
        assert len(folders) == 3
        assert not any((folder / name).exists() for folder in folders for name in ("checkpoint.safetensors", "clients"))
        results = [record.read_result(folder) for folder in folders]
        values = [r["metrics"]["aggregated"]["last"]["val"] for r in results if r]
        assert found.best[label].value == max(values)
        assert found.best[label].number == values.index(max(values))
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/trial-*/rounds.jsonl")}
    more = tune(methods=rows, trials=4, out=out, **TINY)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    assert len(list(out.glob("*/trial-*"))) == 8

    file = tomllib.loads(more.file.read_text())
    assert set(file["compare"]["tuned"]["rows"]) == set(rows)
    results = compare(more.file, out=tmp_path / "compared")
    for label in rows:
        rate = results[label][0].numbers["config"]["method"]["lr"]
        assert rate == more.best[label].values["method.lr"]
    note = "tuned: 4 trials per row on validation data"
    assert note in (tmp_path / "compared" / "table.md").read_text().replace("Tuned", "tuned")
    assert all(row["scale"] == note for row in json.loads((tmp_path / "compared" / "table.json").read_text()))

    with pytest.raises(UserError, match=r'another comparison: its row "head-tune" has another rounds: 2, not 3'):
        tune(methods=rows, trials=4, out=out, **{**TINY, "rounds": 3})
    with pytest.raises(UserError, match=r'another comparison: its row "local\+head" is not in this one'):
        tune(methods=["head-tune"], trials=4, out=out, **TINY)
    with pytest.raises(UserError, match="--trials = 2 must be at least the 4"):
        tune(methods=rows, trials=2, out=out, **TINY)
    (out / T.ABOUT).unlink()
    with pytest.raises(UserError, match="holds something else than this search"):
        tune(methods=rows, trials=4, out=out, **TINY)


def test_rows_can_be_added_to_a_search_and_searched_by_themselves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rows = ["head-tune", "local+head", "class-mean"]
    first = tune(methods=rows, only="head-t", trials=1, out=out, **TINY)
    assert set(first.best) == {"head-tune"}
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["head-tune"]
    results = compare(first.file, only="head-t", out=tmp_path / "compared")
    assert {row["scale"] for row in results.table} == {"tuned: 1 trial per row on validation data"}

    rows.append("fedprox+head")  # with another space, and it is not touched by the rows' trials that are there
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/trial-*/rounds.jsonl")}
    space = ["method.lr=0.02..0.02001"]
    more = tune(methods=rows, only=["fedprox"], space=space, trials=1, out=out, **TINY)
    assert set(more.best) == {"fedprox+head"}
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    chosen = tomllib.loads(more.file.read_text())["compare"]["tuned"]["rows"]
    assert chosen["head-tune"] == S.table(first.best["head-tune"].values)
    assert chosen["fedprox+head"] == S.table(more.best["fedprox+head"].values)
    results = compare(more.file, out=tmp_path / "compared")
    scale = "tuned: 1 trial per row on validation data; not tuned: local+head, class-mean"
    assert {row["scale"] for row in results.table} == {scale}

    with pytest.raises(UserError, match=r"--trials = 2 must be 1, as for the rows that --only leaves out: head-tune$"):
        tune(methods=rows, only=["fedprox"], space=space, trials=2, out=out, **TINY)
    with pytest.raises(UserError, match=r'its row "head-tune" has another rounds: 2, not 3'):
        tune(methods=rows, only=["fedprox"], space=space, trials=1, out=out, **{**TINY, "rounds": 3})
    with pytest.raises(UserError, match=r'--only = "sgpt" must be part of the label of a row \(head-tune, '):
        tune(methods=rows, only=["sgpt"], trials=1, out=out, **TINY)
    with pytest.raises(UserError, match="no row trains anything"):
        tune(methods=rows, only=["class-mean"], trials=1, out=out, **TINY)
    assert tomllib.loads(more.file.read_text())["compare"]["tuned"]["rows"] == chosen


def test_a_comparison_tunes_the_rows_that_it_runs(tmp_path: Path) -> None:
    rows = ["head-tune", "local+head"]
    assert set(compare(methods=rows, only="local", tune=1, out=tmp_path, **TINY)) == {"local+head"}
    assert not (tmp_path / "tuning" / "head-tune").exists()
    assert set(compare(methods=rows, tune=1, out=tmp_path, **TINY)) == {"head-tune", "local+head"}
