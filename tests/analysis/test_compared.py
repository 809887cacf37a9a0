"""Analyses of a comparison, on results made by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from analysed import made

from promptfed import UserError
from promptfed.analysis import Options, compared, make
from promptfed.cli.results import analyse
from promptfed.runs import config as C


def comparison(out: Path) -> Path:
    """Of results that were never run: two kinds of prompts, three sizes, two seeds, and a method without a prompt."""
    rows = [("FedAvg", "fedavg", {}, 0.3)]
    rows += [(f"padding {p}", "pfedpt", {"prompt_size": p}, 0.4 + p / 20) for p in (1, 2, 4)]
    rows += [(f"patch {p}", "pfedpt", {"prompt_size": p, "prompt": "fixed-patch"}, 0.7 - p / 20) for p in (2, 4)]
    for label, method, settings, accuracy in rows:
        for seed in (0, 1):
            folder = out / f"{label.lower().replace(' ', '-')}-seed{seed}"
            folder.mkdir(parents=True)
            config = C.make({"method": {"name": method, **settings}, "seed": seed, "dataset": {"name": "digits"}})
            (folder / "config.toml").write_text(C.dump(config.complete()))
            local = {"mean": accuracy + seed / 10, "worst": accuracy - 0.1, "std": 0.0, "weighted": accuracy}
            wide = None if label == "patch 4" else accuracy - 0.05
            numbers = {"metrics": {"aggregated": {"last": {"round": 1, "local": local, "global": wide}}}}
            (folder / "result.json").write_text(
                json.dumps({"method": method, "seed": seed, "communication": {}, "passes": {}, **numbers})
            )
    (out / "table.json").write_text(json.dumps([{"label": label} for label, *_ in rows]))
    return out


def test_scatter_of_all_runs(tmp_path):
    rows = made(comparison(tmp_path / "all"), "scatter", tmp_path)
    assert [row["label"] for row in rows[::2]] == ["FedAvg", *(f"padding {p}" for p in (1, 2, 4)), "patch 2", "patch 4"]
    first = rows[2]
    assert (first["global"], first["worst"]) == (repr(0.45 - 0.05), repr(0.45 - 0.1))
    text = json.loads((tmp_path / "scatter.json").read_text())["text"]
    assert "of 10 runs" in text
    assert "2 without global accuracy left out" in text


def test_axes_of_the_scatter_stay_within_per_cent(tmp_path):
    folder = comparison(tmp_path / "all")
    for file in folder.glob("*/result.json"):  # no worst client has anything right
        numbers = json.loads(file.read_text())
        numbers["metrics"]["aggregated"]["last"] |= {"local": {"mean": 0.5, "worst": 0.0}, "global": 0.99}
        file.write_text(json.dumps(numbers))
    chart = compared.scatter(compared.read(folder), Options()).picture
    encoding = chart.to_dict()["layer"][0]["encoding"]
    assert [encoding[axis]["scale"]["domain"] for axis in "xy"] == [[97, 100], [0, 2]]


def test_a_damaged_table_and_a_file_in_the_way_are_named(tmp_path):
    folder = comparison(tmp_path / "all")
    with pytest.raises(UserError, match=r"^--out = .*/table.json. is not a folder$"):
        make(folder, out=folder / "table.json")
    (folder / "table.json").write_text("[")
    with pytest.raises(UserError, match=r"all/table.json. is not the table of a comparison"):
        make(folder)


def test_sweep_over_kind_and_size(tmp_path):
    rows = made(comparison(tmp_path / "all"), "sweep", tmp_path)
    kinds = [("fedavg", ""), *(("padding", p) for p in "124"), *(("fixed-patch", p) for p in "24")]
    assert {(row["kind"], row["size"]) for row in rows} == set(kinds)
    text = json.loads((tmp_path / "sweep.json").read_text())["text"]
    assert "padding 65.0 % at 4; fixed-patch 65.0 % at 2" in text  # means over seeds


def test_a_sweep_needs_different_prompts(tmp_path):
    folder = comparison(tmp_path / "all")
    for one in folder.glob("p*"):
        shutil.rmtree(one)
    with pytest.raises(UserError, match="at two sizes"):
        make(folder, ["sweep"])


def add(folder: Path, label: str, method: str, settings: dict[str, Any]) -> None:
    """One more run, of a method on a frozen model."""
    one = shutil.copytree(folder / "fedavg-seed0", folder / f"{label}-seed0")
    backbone = {"backbone": {"name": "clip-mini"}, "dataset": {"name": "shapes"}}
    config = C.make({"method": {"name": method, **settings}, **backbone})
    (one / "config.toml").write_text(C.dump(config.complete()))


def test_clients_of_a_comparison_have_no_names(tmp_path):
    with pytest.raises(UserError, match='client = "clean" must be a number'):
        analyse(comparison(tmp_path / "all"), ["scatter"], tmp_path, ["clean"])


def test_prompts_of_one_size_each_are_no_sweep(tmp_path):
    """Pixels, tokens and context vectors are not the same thing in other sizes."""
    folder = comparison(tmp_path / "all")
    for one in (*folder.glob("patch*"), *folder.glob("padding-1*"), *folder.glob("padding-2*")):
        shutil.rmtree(one)
    add(folder, "vpt", "fedvpt", {"tokens": 5})
    add(folder, "text", "promptfl", {"context": 3})
    with pytest.raises(UserError, match="at two sizes"):
        make(folder, ["sweep"])


def test_a_sweep_shows_what_was_swept_and_what_has_no_prompt(tmp_path):
    folder = comparison(tmp_path / "all")
    add(folder, "vpt", "fedvpt", {"tokens": 5})
    add(folder, "sgpt", "sgpt", {})
    found = compared.sweep(compared.read(folder), Options())
    (panel,) = found.picture.to_dict()["hconcat"]
    level, _, line, _ = panel["layer"]
    labels = ["pfedpt: padding", "pfedpt: fixed-patch", "fedavg (no prompt)"]
    assert line["encoding"]["color"]["scale"]["domain"] == labels
    assert line["encoding"]["x"]["title"] == "size of the prompt (pixels)"
    assert level["mark"]["type"] == "rule"
    add(folder, "vpt-more", "fedvpt", {"tokens": 9})
    found = compared.sweep(compared.read(folder), Options())
    panels = found.picture.to_dict()["hconcat"]
    titles = [panel["layer"][-1]["encoding"]["x"]["title"] for panel in panels]
    assert titles == [f"size of the prompt ({unit})" for unit in ("pixels", "tokens")]


def test_sgpt_is_swept_over_the_last_layer_with_prompts():
    settings = {"name": "sgpt", "group_layers": [3, 4], "shared_layers": [0, 1, 2], "training": "bcd"}
    unit = "last layer with prompts"
    assert compared.prompt(settings, several=False) == ("group prompts", unit, 5)
    alone = {**settings, "training": "shared", "group_layers": []}
    assert compared.prompt(alone, several=False) == ("shared prompts", unit, 3)


def test_sgpts_sweep_draws_the_number_of_its_paper(tmp_path):
    """Of its one model on all clients' data, the mean of the last ten rounds."""
    folder = comparison(tmp_path / "all")
    for layers, ten in ((1, 0.5), (2, 0.7)):
        add(folder, f"shared-{layers}", "sgpt", {"training": "shared", "shared_layers": list(range(layers))})
        file = folder / f"shared-{layers}-seed0" / "result.json"
        numbers = json.loads(file.read_text())
        found = numbers["metrics"]["aggregated"]
        found["mean_of_last_10"] = {**found["last"], "rounds": [1], "global": ten}
        file.write_text(json.dumps(numbers))
    runs = [one for one in compared.read(folder) if one.label.startswith("shared")]
    found = compared.sweep(runs, Options())
    assert found.text.startswith("Accuracy on all clients' test data, mean of the last ten rounds")
    assert "shared prompts 70.0 % at 2" in found.text
    (panel,) = found.picture.to_dict()["hconcat"]
    assert panel["layer"][-1]["encoding"]["y"]["title"] == "test accuracy, all clients' data (%)"


def test_each_clients_accuracy_and_f1_over_the_runs_of_a_method(tmp_path):
    folder = comparison(tmp_path / "all")
    for i, file in enumerate(sorted(folder.glob("*/result.json"))):
        scores = [{"client": c, "accuracy": 0.1 * c + 0.01 * i, "macro_f1": None if c else 0.5} for c in (0, 1)]
        file.write_text(json.dumps({**json.loads(file.read_text()), "clients": {"aggregated": scores}}))
    rows = made(folder, "clients", tmp_path)
    assert [(row["method"], row["client"], row["runs"]) for row in rows] == [
        (method, str(client), runs) for method, runs in (("fedavg", "2"), ("pfedpt", "10")) for client in (0, 1)
    ]
    assert float(rows[1]["accuracy"]) == pytest.approx(10.5)
    assert float(rows[2]["macro_f1"]) == 50
