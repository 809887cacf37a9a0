"""Tables of a comparison and of a run, from results made by hand."""

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from promptfed.errors import UserError
from promptfed.runs import sheets, tables
from promptfed.runs.api import Result
from promptfed.runs.comparison import Compared


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
    assert tables.cells(row)[tables.HEADERS.index("local")] == "22.5 (9 of 10)"


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
    assert (line["after_local_mean"], line["clients_after_local_n"], line["clients_after_local_of"]) == (
        "0.85",
        "1",
        "10",
    )
    assert "scale" not in tables.save(compared(), tmp_path, places)[0]


@pytest.mark.parametrize(("rounds", "words"), [(1, "1 round"), (2, "2 rounds")])
def test_one_round_is_not_rounds(rounds: int, words: str) -> None:
    assert shown(tables.outcome(numbers(rounds=rounds))).splitlines()[0] == f"fedavg, seed 0, {words}"


def test_a_title_is_not_folded_to_the_width_of_a_narrow_table() -> None:
    rows = tables.table(compared(), {"AdaIN, CIFAR-10": ("AdaIN", "CIFAR-10")})
    lines = shown(tables.comparison(rows), 100).splitlines()
    assert lines[0] == "accuracy in %, of the last round; local: mean over clients"
    assert max(len(line) for line in lines if "AdaIN" in line) < len(lines[0])


# ---- one meaning per table


def row(label: str, accuracies: list[float], own: bool = False, **more: Any) -> Result:
    """A run whose clients reached these accuracies."""
    found = {**numbers(there=len(accuracies)), **more}
    mean = sum(accuracies) / len(accuracies)
    last = {**scores(mean, len(accuracies)), "val": 0.35, "macro_f1": 0.133, "global_macro_f1": 0.524}
    last |= {"global": 0.2 if own else mean}
    clients = [
        {"client": i, "n_test": 10, "accuracy": a, **({"global_accuracy": 0.2} if own else {})}
        for i, a in enumerate(accuracies)
    ]
    return Result(Path(label), {**found, "metrics": {"aggregated": {"last": last}}, "clients": {"aggregated": clients}})


LOW, HIGH, SAME = [0.3, 0.4, 0.5, 0.4], [0.8, 0.9, 0.9, 0.8], [0.32, 0.38, 0.5, 0.42]


def rows_of_all_kinds() -> dict[str, list[Result]]:
    sgd, adam = ({"config": {"method": {"name": "x", "lr": lr, "epochs": 1}}} for lr in (0.05, 0.001))
    return {
        "zero-shot": [row("z", SAME, method="zero-shot", passes={"train": 0, "adapt_last": 0}, **sgd)],
        "base_1": [row("b", LOW, **sgd)],
        "personal": [row("p", HIGH, own=True, **sgd)],
        "same": [row("s", SAME, **adam)],
    }


def test_differences_name_their_column_and_their_meaning() -> None:
    found = tables.table(rows_of_all_kinds(), against="base_1")
    told = {one["label"]: one["against"] for one in found if "against" in one}
    assert {label: (one["column"], one["word"]) for label, one in told.items()} == {
        "personal": ("local", "ahead"),
        "same": ("global", "cannot be told apart"),
        "zero-shot": ("global", "cannot be told apart"),
    }
    also = {one["label"]: one["global_against"] for one in found if "global_against" in one}
    assert list(also) == ["personal"], "own models and one model are also compared on all clients' test data"
    assert (also["personal"]["mean"], also["personal"]["word"]) == (pytest.approx(0.2 - 0.4), "behind")
    said = shown(tables.comparison(found))
    assert "differences to base_1 in points, paired by seed and client; bootstrap over clients" in said
    assert "There is one seed: the intervals are over clients only" in said
    line = next(line for line in said.splitlines() if "personal" in line and "ahead" in line)
    assert re.search(r"personal +local +\+45\.0 \[\+\d\d\.\d, \+\d\d\.\d\] ahead", line)
    assert "differences" not in shown(tables.comparison(tables.table(rows_of_all_kinds())))


def test_rows_without_a_common_seed_are_not_compared() -> None:
    results = {"base": [row("b", LOW)], "other": [row("o", HIGH, seed=7)]}
    found = tables.table(results, against="base")
    assert found[1]["against"] == {"row": "base", "word": "cannot be paired"}
    assert "cannot be paired" in shown(tables.comparison(found))


def test_in_a_table_with_columns_each_is_compared_with_the_row_of_its_column() -> None:
    results = {f"{one}, {column}": [row(one, a)] for column in "AB" for one, a in (("x", LOW), ("y", HIGH))}
    places = {label: (label[0], label[-1]) for label in results}
    found = tables.table(results, places, against="x")
    assert [one.get("against", {}).get("row") for one in found] == [None, "x, A", None, "x, B"]


def test_a_kind_of_model_has_its_f1_and_validation_accuracy_is_everywhere(tmp_path: Path) -> None:
    found = tables.save(rows_of_all_kinds(), tmp_path)
    sheet = tables.sheets(found)[0]
    line = dict(zip(sheet.heads, next(line for line in sheet.lines if line[0] == "base_1"), strict=True))
    assert (line["local F1"], line["global F1"], line["val"], line["models"]) == ("13.3", "52.4", "35.0", "one")
    assert [one["models"] for one in found] == ["one", "own", "one", "one"]
    assert "| val |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text())[0]["val"] == {"mean": 0.35, "std": None}
    assert next(iter(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text()))))["val_mean"] == "0.35"
    said = shown(tables.outcome(rows_of_all_kinds()["base_1"][0].numbers))
    assert all(value in said for value in ("13.3%", "52.4%", "35.0%"))


def test_references_are_last_and_apart(tmp_path: Path) -> None:
    found = tables.save(rows_of_all_kinds(), tmp_path)
    assert [sheet.references for sheet in tables.sheets(found)] == [1, 1]
    assert all(sheet.lines[-1][0] == "zero-shot" for sheet in tables.sheets(found))
    text = (tmp_path / "table.md").read_text()
    assert text.index("References:") < text.index("| zero-shot |")
    assert "not ranked" in shown(tables.comparison(found))


def test_settings_of_the_optimiser_that_differ_are_beside_the_cost() -> None:
    sheet = tables.cost(tables.table(rows_of_all_kinds()))
    assert sheet.heads == ("method", "bytes", "passes", "lr")
    assert {line[0]: line[-1] for line in sheet.lines} == {
        "base_1": "0.05", "personal": "0.05", "same": "0.001", "zero-shot": "-",
    }  # fmt: skip


def test_rows_with_different_optimisers_are_told_how_to_get_one_unless_they_are_tuned() -> None:
    def said(scale: str, *kinds: str) -> bool:
        rows = {kind: [row(kind, SAME, config={"method": {"name": "x", "optimizer": kind}})] for kind in kinds}
        return "Optimisers differ" in shown(tables.comparison(tables.table(rows, scale=scale)))

    assert said("", "sgd", "adam")
    assert not said("", "sgd")
    assert not said("tuned: 4 trials per row on validation data", "sgd", "adam")


def test_cells_of_the_csv_are_numbers(tmp_path: Path) -> None:
    results = {"a": [row("a", LOW), row("a", SAME, seed=1)], "b": [row("b", HIGH)]}
    results["b"][0].numbers["communication"] = {
        "per_client_and_round": {"up": 103.6, "down": 0.0, "parameters_up": 3.0}
    }
    tables.save(results, tmp_path, against="b")
    words = {"label", "models", "dataset", "against_row", "against_column", "against_word"}
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    for line in lines:
        assert all(float(value) or True for key, value in line.items() if key not in words and value)
    assert [(line["bytes"], line["passes"], line["local_std"] != "") for line in lines] == [
        ("10", "70", True), ("104", "70", False),
    ]  # fmt: skip


def test_a_narrow_terminal_says_which_columns_it_leaves_out() -> None:
    found = tables.table(rows_of_all_kinds())
    narrow = " ".join(shown(tables.comparison(found), 50).split())
    table, note = narrow.split("not shown for lack of width, see table.md:")
    assert "global F1" not in table
    assert note.startswith(" global F1")
    assert "not shown" not in shown(tables.comparison(found), 120)


# ---- formats


def test_latex_is_escaped_and_has_the_rules_of_booktabs() -> None:
    results = {"50 % of a_b & {c}": [row("a", LOW)], "[x] ~^\\": [row("b", HIGH)], **rows_of_all_kinds()}
    found = tables.table(results, against="base_1")
    text = sheets.latex(tables.sheets(found), notes=tables.notes(found))
    assert "50 \\% of a\\_b \\& \\{c\\} & one & 40.0" in text
    assert "{}[x] \\textasciitilde{}\\textasciicircum{}\\textbackslash{} & one" in text
    for part in text.split("\\begin{tabular}")[1:]:
        body = part.split("\\end{tabular}")[0]
        assert [body.count(f"\\{rule}rule") for rule in ("top", "mid", "bottom")] == [1, 2, 1], "references apart"
        widths = {line.count(" & ") for line in body.splitlines() if line.endswith("\\\\")}
        assert widths == {body.splitlines()[0].count("r")}
    assert "FedVPT-D & $-$3.1 $\\pm$0.2" in sheets.latex([sheets.Sheet("t", ("a", "b"), [("FedVPT-D", "-3.1 ±0.2")])])


def test_bars_in_labels_do_not_end_cells_of_markdown() -> None:
    assert "| a\\|b | 1 |" in sheets.markdown([sheets.Sheet("t", ("x", "y"), [("a|b", "1")])])


def test_frames_have_the_names_of_the_csv() -> None:
    pandas = pytest.importorskip("pandas")
    results = rows_of_all_kinds()
    compared = Compared(results, tables.table(results, against="base_1"))
    frame = compared.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["label"]) == ["base_1", "personal", "same", "zero-shot"]
    assert frame["local_mean"].tolist()[:2] == pytest.approx([0.4, 0.85])
    assert frame["against_word"].tolist()[1] == "ahead"
    clients = results["personal"][0].frame()
    assert clients["accuracy"].tolist() == HIGH
    assert set(clients["stage"]) == {"aggregated"}


def test_a_comparison_is_printed_as_its_tables() -> None:
    results = rows_of_all_kinds()
    lines = repr(Compared(results, tables.table(results, against="base_1"))).splitlines()
    assert lines[0].startswith("accuracy in %")
    assert any(line.split()[:1] == ["personal"] and "85.0" in line for line in lines)
    assert any("ahead" in line and "personal" in line for line in lines)
    assert max(map(len, lines)) <= 120


def test_without_pandas_a_frame_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas, which is not installed"):
        Result(Path("x"), {"clients": {}}).frame()
