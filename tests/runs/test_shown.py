"""Numbers that a comparison file asks for, and rows that show another model of the same runs."""

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from promptfed.errors import UserError
from promptfed.runs import comparison, rows, shown, tables
from promptfed.runs.api import Result
from promptfed.runs.shown import Asked, View


def run(accuracies: list[float], seed: int = 0, names: str = "abc", **more: Any) -> Result:
    """One client per site, with these accuracies in the last round; ten points less in the mean of the last ten."""
    mean = sum(accuracies) / len(accuracies)

    def stage(less: float) -> dict[str, Any]:
        local = {"mean": mean - less, "std": 0.12, "worst": min(accuracies) - less, "weighted": 0.25}
        return {"local": local, "global": mean - less, "macro_f1": 0.33, "val": None, "clients": 3, "clustering": 0.6}

    clients = [{"client": i, "accuracy": a, "n_test": 10} for i, a in enumerate(accuracies)]
    common = {**stage(0.2), "global": None}
    numbers = {
        "method": "pfedpg",
        "seed": seed,
        "rounds": 20,
        "dataset": {"name": "office"},
        "config": {"partition": {"name": "domain"}, "method": {}},
        "sites": [{"client": i, "name": name} for i, name in enumerate(names)],
        "metrics": {"aggregated": {"last": stage(0), "mean_of_last_10": stage(0.1)}, "common": {"last": common}},
        "clients": {"aggregated": clients, "common": [{**c, "accuracy": c["accuracy"] - 0.2} for c in clients]},
        "communication": {"per_client_and_round": {"up": 5, "down": 5, "parameters_up": 7680}},
        "passes": {"train": 70, "adapt_last": 0},
        "seconds": {"train": 1.0, "evaluate": 1.0},
    }
    return Result(Path("x"), {**numbers, **more})


def row(show: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    (found,) = tables.table({"x": [run([0.5, 0.7, 0.9], **more)]}, asked=Asked(show))
    return found


def shown_in(what: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


@pytest.mark.parametrize(
    ("key", "cell"),
    [
        ("local_of_last_10", "60.0"),
        ("worst_of_last_10", "40.0"),
        ("global_of_last_10", "60.0"),
        ("weighted", "25.0"),
        ("spread", "12.0"),
        ("clustering", "60.0"),
        ("diff", "-20.0"),
        ("parameters_up", "7,680"),
    ],
)
def test_a_number_that_is_asked_for_is_a_column(key: str, cell: str) -> None:
    head = shown.SHOWN[key][0]
    sheet = tables.sheets([row((key,))])[0]
    assert sheet.lines[0][sheet.heads.index(head)] == cell
    assert head not in tables.sheets([row()])[0].heads


def test_each_domain_is_a_column_with_the_mean_of_its_clients() -> None:
    assert shown.cells(row(), "domains") == {"a": "50.0", "b": "70.0", "c": "90.0"}
    shared = [{"client": i, "name": name} for i, name in enumerate(("art-0", "art-1", "web"))]
    assert shown.cells(row(sites=shared), "domains") == {"art": "60.0", "web": "90.0"}
    other = {"config": {"partition": {"name": "dirichlet"}, "method": {}}}
    assert shown.cells(row(**other), "domains") == {}


def test_a_table_with_columns_has_a_sheet_for_each_number(tmp_path: Path) -> None:
    results = {f"{name}, {column}": [run([0.5, 0.7, 0.9])] for name in ("A", "B") for column in ("one", "two")}
    places = {label: tuple(label.split(", ")) for label in results}
    found = tables.save(results, tmp_path, places, asked=Asked(("macro_f1", "domains")))  # type: ignore[arg-type]
    first, second = tables.sheets(found)[:2]
    assert first.title == "macro F1 in %, mean over clients"
    assert first.lines == [("A", "33.0", "33.0"), ("B", "33.0", "33.0")]
    assert second.heads == ("method", "one: a", "one: b", "one: c", "two: a", "two: b", "two: c")
    said = shown_in(tables.comparison(found))
    assert "macro F1 in %" in said
    assert "one: b" in said
    assert next(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))["domains_b_mean"] == "0.7"
    usual = [sheet.title for sheet in tables.sheets(tables.table(results, places))]  # type: ignore[arg-type]
    assert "macro F1 in %, mean over clients" in usual


SPEC = {
    "rows": [{"label": "pFedPG", "method": {"name": "pfedpg", "basis": True}}],
    "views": [{"label": "P_base", "of": "pFedPG", "stage": "common"}],
    "show": ["local"],
}


def test_a_view_shows_another_stage_of_the_same_runs() -> None:
    wanted = shown.wanted(SPEC, rows.rows(SPEC))
    assert wanted == Asked(("local",), (View("P_base", "pFedPG", "common"),))
    own, base = tables.table({"pFedPG": [run([0.5, 0.7, 0.9])]}, asked=wanted)
    assert (own["label"], base["label"]) == ("pFedPG", "P_base")
    assert base["local"]["mean"] == pytest.approx(own["local"]["mean"] - 0.2)
    assert base["domains"]["a"]["mean"] == pytest.approx(0.3)
    assert base["view"] == {"of": "pFedPG", "stage": "common"}
    assert Asked.told([own, base]) == wanted
    in_columns = {**SPEC, "columns": [{"label": "C"}]}
    (view,) = shown.wanted(in_columns, rows.rows(in_columns)).views
    assert (view.label, view.of, view.place) == ("P_base, C", "pFedPG, C", ("P_base", "C"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"show": "local"}, r"compare.show = 'local' must be a list"),
        ({"show": ["accuracy"]}, r'compare.show = "accuracy" is unknown .*clustering'),
        ({"views": [{"label": "x", "of": "pFedPG"}]}, r"compare.views: each needs label, of and stage"),
        ({"views": [{"label": "x", "of": "FedAvg", "stage": "common"}]}, r'compare.views: of = "FedAvg" is unknown'),
        ({"views": [{"label": "x", "of": "pFedPG", "stage": "best"}]}, r'compare.views: stage = "best" is unknown'),
        ({"views": [{"label": "pFedPG", "of": "pFedPG", "stage": "common"}]}, r'"pFedPG" is the label of a row'),
    ],
)
def test_what_cannot_be_shown_is_told(change: dict[str, Any], words: str) -> None:
    spec = {**SPEC, **change}
    with pytest.raises(UserError, match=words):
        shown.wanted(spec, rows.rows(spec))


FILE = """
rounds = 1
dataset = { name = "shapes", limit = 96, size = 32 }
partition = { name = "domain", clients = 0 }
backbone = "vit-mini"
engine = { workers = 1 }
eval = { after_local = "none", pooled = "never" }

[compare]
show = ["local", "domains"]

[[compare.rows]]
label = "pFedPG"
method = { name = "pfedpg", basis = true, epochs = 1, server_lr = 50.0 }

[[compare.views]]
label = "P_base"
of = "pFedPG"
stage = "common"
"""


def test_a_comparison_with_a_view_trains_once_and_is_read_back(tmp_path: Path) -> None:
    file, out = tmp_path / "table.toml", tmp_path / "out"
    file.write_text(FILE)
    found = comparison.execute(comparison.prepare(file, {}, out=out))
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["pfedpg-seed0"]
    assert list(found.results) == ["pFedPG"]
    assert [one["label"] for one in found.table] == ["pFedPG", "P_base"]
    result = json.loads((out / "pfedpg-seed0" / "result.json").read_text())
    assert found.table[1]["local"]["mean"] == result["metrics"]["common"]["last"]["local"]["mean"]
    assert len(found.table[0]["domains"]) == 8
    assert result["server"]["prompt_rms"] > 0
    assert "on the server: prompt rms" in shown_in(tables.outcome(result))
    assert comparison.read(out).table == found.table
    against_the_view = comparison.read(out, "P_base").table[0]["against"]
    assert against_the_view["row"] == "P_base"
    assert against_the_view["mean"] == pytest.approx(found.table[0]["local"]["mean"] - found.table[1]["local"]["mean"])
    assert comparison.prepare(file, {}, out=out, against="P_base").against == "P_base"
    again = copy.deepcopy(comparison.execute(comparison.prepare(file, {}, out=out)).table)
    assert again == found.table
