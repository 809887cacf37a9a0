"""Tables of a comparison and of a run, from results made by hand."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from promptfed.runs import tables
from promptfed.runs.api import Result


def scores(mean: float, clients: int, of: int = 10, **where: Any) -> dict[str, Any]:
    local = {"mean": mean, "std": 0.1, "worst": mean / 2, "weighted": mean}
    numbers = {"local": local, "global": mean, "macro_f1": mean, "clients": clients, "of": of, "val": None}
    return {**(where or {"round": 3}), **numbers}


def numbers(trained: int = 1, there: int = 10, rounds: int = 3) -> dict[str, Any]:
    aggregated = {
        "last": scores(0.225, there),
        "mean_of_last_10": scores(0.2, there - 0.5 * (there < 10), rounds=list(range(1, rounds + 1))),  # type: ignore[arg-type]
    }
    return {
        "method": "fedavg",
        "seed": 0,
        "rounds": rounds,
        "dataset": {"name": "digits"},
        "metrics": {"aggregated": aggregated, "after_local": {"last": scores(0.85, trained)}},
        "communication": {"per_client_and_round": {"up": 5, "down": 5, "parameters_up": 1}},
        "passes": {"train": 70, "adapt_last": 0},
        "seconds": {"train": 1.0, "evaluate": 1.0},
    }


def shown(what: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def compared(**changes: Any) -> dict[str, list[Result]]:
    return {"AdaIN, CIFAR-10": [Result(Path("x"), numbers(**changes))]}


# ---- whose numbers they are


def test_a_run_tells_of_how_many_clients_each_number_is() -> None:
    lines = {line.split("│")[1].strip(): line for line in shown(tables.outcome(numbers())).splitlines() if "│" in line}
    assert "10 of 10" in lines["aggregated, last"]
    assert "1 of 10" in lines["after local, last"]


def test_a_client_that_was_away_at_an_evaluation_is_seen() -> None:
    said = shown(tables.outcome(numbers(there=9)))
    assert "9 of 10" in said
    assert "8.5 of 10" in said  # on average over the rounds of a mean
    (row,) = tables.table(compared(there=9))
    assert tables.cells(row)[2] == "22.5 (9 of 10)"


def test_accuracy_after_local_training_is_marked_where_it_is_not_of_all_clients() -> None:
    (part,), (whole,) = tables.table(compared()), tables.table(compared(trained=10))
    place = tables.HEADERS.index("trained")
    assert tables.cells(part)[place] == "85.0 (1 of 10)"
    assert tables.cells(whole)[place] == "85.0"
    assert part["clients"] == {"local": {"n": 10, "of": 10}, "after_local": {"n": 1, "of": 10}}
    assert "85.0 (1 of 10)" in shown(tables.comparison([part]))


def test_of_several_seeds_the_fewest_clients_are_told() -> None:
    runs = [Result(Path("x"), numbers(trained=n)) for n in (4, 2, 3)]
    (row,) = tables.table({"fedavg": runs})
    assert row["clients"]["after_local"] == {"n": 2, "of": 10}


def test_results_of_before_clients_were_counted_are_shown_as_they_are() -> None:
    old = numbers()
    for stage in old["metrics"].values():
        for found in stage.values():
            del found["of"]
    (row,) = tables.table({"fedavg": [Result(Path("x"), old)]})
    assert tables.cells(row)[tables.HEADERS.index("trained")] == "85.0"
    assert "aggregated, last" in shown(tables.outcome(old))


# ---- what a reader must know


def test_tables_say_what_they_show_and_what_to_report(tmp_path: Path) -> None:
    rows = tables.save(compared(), tmp_path)
    for said in (shown(tables.comparison(rows)), (tmp_path / "table.md").read_text()):
        assert "As aggregated" in said
        assert "±: sample deviation over seeds" in said
        assert "What to report" in said
    said = shown(tables.outcome(numbers()))
    assert "std, worst: over clients" in said
    assert "To report: aggregated, last, over several seeds" in said


def test_a_small_scale_is_told_in_every_table(tmp_path: Path) -> None:
    scale = "at the small scale of pfedpg/table4.toml: digits, 2 rounds; labels are those of the full scale"
    places = {"AdaIN, CIFAR-10": ("AdaIN", "CIFAR-10")}
    rows = tables.save(compared(), tmp_path, places, scale)
    assert scale in shown(tables.comparison(rows))
    assert (tmp_path / "table.md").read_text().startswith("At" + scale[2:])
    assert json.loads((tmp_path / "table.json").read_text())[0]["scale"] == scale
    (line,) = csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text()))
    assert line["dataset"] == "digits"
    assert (line["trained"], line["clients trained"]) == ("85.0", "1 of 10")
    assert "scale" not in tables.save(compared(), tmp_path, places)[0]


@pytest.mark.parametrize(("rounds", "words"), [(1, "1 round"), (2, "2 rounds")])
def test_one_round_is_not_rounds(rounds: int, words: str) -> None:
    assert shown(tables.outcome(numbers(rounds=rounds))).splitlines()[0] == f"fedavg, seed 0, {words}"


def test_a_title_is_not_folded_to_the_width_of_a_narrow_table() -> None:
    rows = tables.table(compared(), {"AdaIN, CIFAR-10": ("AdaIN", "CIFAR-10")})
    lines = shown(tables.comparison(rows), 100).splitlines()
    assert lines[0] == "accuracy in %, of the last round; local: mean over clients"
    assert max(len(line) for line in lines if "AdaIN" in line) < len(lines[0])
