"""Accuracy by round, from rounds made by hand and from kept results."""

import csv
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.errors import UserError
from promptfed.runs import comparison, curves
from promptfed.runs.api import Result

KEPT = Path(__file__).parents[2] / "experiments" / "evidence" / "cifar10-label"


def run(seed: int, accuracies: dict[int, float], common: bool = False) -> Result:
    """Evaluated in these rounds only; `common`: also on all clients' test data, where it is .1 better."""

    def line(number: int) -> dict[str, Any]:
        mean = accuracies.get(number)
        whole = {"global": mean + 0.1} if common and mean is not None else {"global": None}
        summary = {"local": {"mean": mean, "worst": 0.0}, **whole}
        return {"round": number, **({"aggregated": {"summary": summary}} if mean is not None else {})}

    return Result(Path("x"), {"seed": seed}, [line(number) for number in range(1, max(accuracies) + 1)])


ROWS = [{"label": "own"}, {"label": "one"}, {"label": "ceiling", "reference": "ceiling"}]


def test_each_round_has_mean_and_deviation_over_the_seeds_that_all_have_it() -> None:
    results = {
        "ceiling": [run(0, {2: 0.9})],
        "one": [run(0, {2: 0.25, 4: 0.5}, common=True)],
        "own": [run(0, {2: 0.2, 4: 0.6}), run(1, {2: 0.4, 4: 0.8, 6: 0.9})],
    }
    local, whole = curves.by_round(results, ROWS)
    assert local.heads == ("method", "round 2", "round 4")
    assert local.lines == [
        ("own", "30.0 ±14.1", "70.0 ±14.1"),
        ("one", "25.0", "50.0"),
        ("ceiling", "90.0", "-"),
    ]
    assert local.references == 1
    assert whole.lines == [("one", "35.0", "60.0")], "the others have no model for all"
    assert whole.references == 0


@pytest.mark.parametrize("rounds", [1, 8, 9, 40, 100])
def test_of_many_rounds_a_few_are_shown_with_the_last(rounds: int) -> None:
    results = {"own": [run(0, {number: number / 100 for number in range(1, rounds + 1)})]}
    (sheet,) = curves.by_round(results, ROWS[:1])
    at = [int(head.removeprefix("round ")) for head in sheet.heads[1:]]
    assert at[-1] == rounds
    assert len(at) == rounds if rounds <= 8 else 4 < len(at) <= 8
    assert len({later - earlier for earlier, later in pairwise(at)}) <= 1, "evenly spread"
    assert len(curves.records(results)) == rounds, "programs get all"


def test_the_last_round_of_kept_results_is_that_of_their_table() -> None:
    found = comparison.read(KEPT)
    local, _ = curves.by_round(found, found.table)
    last = {line[0]: [cell for cell in line if cell != "-"][-1] for line in local.lines}
    for row in found.table:
        spread = "" if row["local"]["std"] is None else f" ±{100 * row['local']['std']:.1f}"
        assert last[row["label"]] == f"{100 * row['local']['mean']:.1f}{spread}"


def test_the_command_prints_people_and_programs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = CliRunner().invoke(app, ["table", str(KEPT), "--rounds"])
    assert shown.exit_code == 0
    assert "local accuracy in %, mean over clients, by round" in shown.output
    (line,) = [line for line in shown.output.split("accuracy on all")[0].splitlines() if " FedEM " in line]
    printed = CliRunner().invoke(app, ["table", str(KEPT), "--rounds", "--csv"]).stdout
    records = [row for row in csv.DictReader(io.StringIO(printed)) if row["label"] == "FedEM"]
    assert line.split()[1:] == ["-", "-", *(f"{100 * float(row['local_mean']):.1f}" for row in records)]
    marked = CliRunner().invoke(app, ["table", str(KEPT), "--rounds", "--markdown"]).output
    assert "| method | round 1 | round 8 | round 10 | round 20 | round 30 | round 40 |" in marked


def test_rounds_are_not_compared_and_may_not_have_been_kept(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["table", str(KEPT), "--rounds", "--against", "SGPT"])
    assert isinstance(refused.exception, UserError)
    assert "--against" in str(refused.exception)
    brief = [{**json.loads(line), "rounds": []} for line in (KEPT / "results.jsonl").read_text().splitlines()]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in brief))
    (tmp_path / "table.json").write_bytes((KEPT / "table.json").read_bytes())
    found = comparison.read(tmp_path)
    with pytest.raises(UserError, match="were not kept"):
        curves.by_round(found, found.table)
