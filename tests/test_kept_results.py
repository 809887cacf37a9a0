"""scripts/keep_results.py, and the results that are kept with the experiments."""

import json
import re
import runpy
from datetime import date
from pathlib import Path

import pytest

import promptfed
from promptfed.runs import tables
from promptfed.runs.api import Result
from promptfed.runs.shown import Asked

ROOT = Path(__file__).parents[1]
KEPT = sorted(file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "experiments").rglob("results.jsonl"))
keep = runpy.run_path(str(ROOT / "scripts" / "keep_results.py"))["keep"]


def read(folder):
    """-> results by label, as tables take them, and rounds by (label, seed)."""
    results, rounds = {}, {}
    for line in (folder / "results.jsonl").read_text().splitlines():
        run = json.loads(line)
        results.setdefault(run["label"], []).append(Result(folder, run["result"]))
        rounds[run["label"], run["seed"]] = run["rounds"]
    return results, rounds


def test_a_comparison_is_kept_and_read_back(tmp_path):
    out, kept = tmp_path / "runs", tmp_path / "kept"
    made = promptfed.compare(
        methods=["fedavg", "local"],
        seeds=[0, 1],
        out=out,
        dataset={"name": "digits", "limit": 60},
        partition={"name": "iid", "clients": 2},
        method={"epochs": 1},
        rounds=2,
        eval={"every": 2},
        engine={"workers": 1},
    )
    keep(out, kept, {})
    assert {file.name for file in kept.iterdir()} == {"table.md", "table.json", "results.jsonl", "kept.json"}
    about = json.loads((kept / "kept.json").read_text())
    assert date.fromisoformat(about["date"])
    assert about["commit"] is None or re.fullmatch("[0-9a-f]{7,}", about["commit"])
    results, rounds = read(kept)
    assert {label: [run.numbers for run in runs] for label, runs in results.items()} == {
        label: [run.numbers for run in runs] for label, runs in made.items()
    }
    assert tables.table(results) == json.loads((kept / "table.json").read_text())
    assert list(rounds) == [("fedavg", 0), ("fedavg", 1), ("local", 0), ("local", 1)]
    for (label, seed), kept_lines in rounds.items():
        lines = (out / f"{label}-seed{seed}" / "rounds.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in lines]
        for line in lines:
            for stage in ("aggregated", "after_local"):
                assert ("clients" in line.get(stage, {})) is (stage in line)
                line.get(stage, {}).pop("clients", None)
        assert kept_lines == lines
        assert [line["clients"] for line in kept_lines] == [[0, 1]] * 2, "who took part"


def test_brief_results_have_a_table_and_no_rounds(tmp_path):
    settings = {"dataset": {"name": "digits", "limit": 60}, "partition": {"name": "iid", "clients": 2}, "rounds": 1}
    promptfed.compare(
        methods=["fedavg"], out=tmp_path / "runs", method={"epochs": 1}, engine={"workers": 1}, **settings
    )
    keep(tmp_path / "runs", tmp_path / "kept", {}, brief=True, made_by="0123abc")
    assert json.loads((tmp_path / "kept" / "kept.json").read_text())["commit"] == "0123abc"
    results, rounds = read(tmp_path / "kept")
    assert rounds == {("fedavg", 0): []}
    assert tables.table(results) == json.loads((tmp_path / "kept" / "table.json").read_text())


def test_rows_that_were_run_again_take_the_place_of_the_kept_ones(tmp_path):
    settings = {
        "dataset": {"name": "digits", "limit": 60},
        "partition": {"name": "iid", "clients": 2},
        "engine": {"workers": 1},
        "rounds": 1,
    }
    promptfed.compare(methods=["fedavg", "local"], out=tmp_path / "first", method={"epochs": 1}, **settings)
    keep(tmp_path / "first", tmp_path / "kept", {}, brief=True, made_by="0123abc")
    before = (tmp_path / "kept" / "results.jsonl").read_text().splitlines()
    promptfed.compare(methods=["local"], out=tmp_path / "again", method={"epochs": 3}, **settings)
    keep(tmp_path / "again", tmp_path / "kept", {}, brief=True, made_by="4567def", update=True)
    after = (tmp_path / "kept" / "results.jsonl").read_text().splitlines()
    assert after[0] == before[0]
    assert json.loads(after[1])["result"]["config"]["method"]["epochs"] == 3
    about = json.loads((tmp_path / "kept" / "kept.json").read_text())
    assert about["commit"] == "0123abc"
    assert {label: made for label, (_, made) in about["later"].items()} == {"local": "4567def"}
    promptfed.compare(methods=["local"], seeds=[1], out=tmp_path / "more", method={"epochs": 3}, **settings)
    keep(tmp_path / "more", tmp_path / "kept", {}, brief=True, made_by="89abcde", update=True)
    about = json.loads((tmp_path / "kept" / "kept.json").read_text())
    assert {label: made for label, (_, made) in about["later"].items()} == {"local": "4567def", "seed 1": "89abcde"}
    results, rounds = read(tmp_path / "kept")
    assert list(rounds) == [("fedavg", 0), ("local", 0), ("local", 1)]
    assert tables.table(results) == json.loads((tmp_path / "kept" / "table.json").read_text())
    file = tmp_path / "other.toml"
    file.write_text(
        '[[compare.rows]]\nlabel = "fedprox"\nmethod.name = "fedprox"\n'
        '[[compare.views]]\nlabel = "its clients"\nof = "fedprox"\nstage = "after_local"\n'
    )
    after_local = {"eval": {"after_local": "participants"}}
    promptfed.compare(file, out=tmp_path / "other", method={"epochs": 1}, **after_local, **settings)
    with pytest.raises(SystemExit, match="has no row fedprox to update"):
        keep(tmp_path / "other", tmp_path / "kept", {}, update=True)
    keep(tmp_path / "other", tmp_path / "kept", {}, brief=True, made_by="cdef012", update=True, add=True)
    results, rounds = read(tmp_path / "kept")
    assert list(rounds) == [("fedavg", 0), ("local", 0), ("local", 1), ("fedprox", 0)]
    table = json.loads((tmp_path / "kept" / "table.json").read_text())
    assert [row["label"] for row in table if "view" in row] == ["its clients"]
    assert tables.table(results, asked=Asked.told(table)) == table
    assert json.loads((tmp_path / "kept" / "kept.json").read_text())["later"]["fedprox"][1] == "cdef012"


def test_no_path_of_the_machine_is_kept(tmp_path):
    run = tmp_path / "runs" / "fedavg-ft-seed0"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"seed": 0, "config": {"dataset": {"name": "/my/data"}}}))
    (run / "rounds.jsonl").write_text("")
    (tmp_path / "runs" / "table.json").write_text('[{"label": "FedAvg+ft"}]')
    (tmp_path / "runs" / "table.md").write_text("| FedAvg+ft |")
    with pytest.raises(SystemExit, match=r"results\.jsonl would hold the path /my/data .* --replace /my/data=NAME"):
        keep(tmp_path / "runs", tmp_path / "kept", {})
    assert not (tmp_path / "kept").exists()
    keep(tmp_path / "runs", tmp_path / "kept", {"/my/data": "cifar10"})
    (line,) = (tmp_path / "kept" / "results.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "label": "FedAvg+ft",
        "seed": 0,
        "result": {"seed": 0, "config": {"dataset": {"name": "cifar10"}}},
        "rounds": [],
    }


@pytest.mark.parametrize("folder", KEPT)
def test_kept_results_make_the_kept_table(folder):
    results, rounds = read(ROOT / folder)
    rows = json.loads((ROOT / folder / "table.json").read_text())
    places = {row["label"]: (row["row"], row["column"]) for row in rows if "column" in row}
    remade = {row["label"]: row for row in tables.table(results, places, asked=Asked.told(rows))}
    rows = [{key: row[key] for key in row if key != "scale" and "against" not in key} for row in rows]  # of the command
    assert [{key: remade[row["label"]][key] for key in row} for row in rows] == rows
    assert set(remade) == {row["label"] for row in rows}
    file = ROOT / folder / "kept.json"
    brief = file.exists() and json.loads(file.read_text()).get("brief", False)
    for label, runs in results.items():
        for run in runs:
            assert len(rounds[label, run.numbers["seed"]]) == (0 if brief else run.numbers["rounds"])
