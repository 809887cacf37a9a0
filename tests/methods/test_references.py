"""What others are measured by: the class mean, and training on all data in one place."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import promptfed
from fitting import check_result
from promptfed.errors import UserError
from promptfed.methods import create, reference
from promptfed.runs import build
from promptfed.runs import config as C
from promptfed.runs.opened import Run
from promptfed.testing import check_method

SMALL = {
    "dataset": {"name": "shapes", "limit": 128},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 3},
    "backbone": "vit-mini",
    "seed": 3,
    "engine": {"workers": 1, "device": "cpu"},
}


@pytest.mark.parametrize("backbone", ["cnn", "vit-mini", "clip-mini"])
def test_class_mean_is_a_method(backbone: str) -> None:
    check_method("class-mean", backbone)


@pytest.mark.parametrize("name", ["centralised", "centralised+head"])
def test_centralised_is_a_method(name: str) -> None:
    check_method(name)


def test_the_class_mean_is_that_of_all_data_in_one_place(tmp_path: Path) -> None:
    result = promptfed.run(method="class-mean", rounds=2, out=tmp_path / "run", **SMALL)
    check_result(result)
    run = Run(tmp_path / "run")
    model, data = run.model, run.federation.dataset
    scale = model.preprocess or data
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (scale.mean, scale.std))
    with torch.no_grad():
        z = model.features(model.weights, (torch.from_numpy(np.array(data.images)) / 255 - mean) / std)
    train = np.concatenate([site.train for site in run.federation.sites])
    y = torch.from_numpy(data.labels)
    means = torch.stack([z[train][y[train] == c].double().mean(0) for c in range(model.classes)])
    params = run.params(0)
    torch.testing.assert_close(params["head.weight"].double() / 2, means, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(-params["head.bias"].double(), means.square().sum(1), rtol=1e-5, atol=1e-5)
    test = np.concatenate([site.test for site in run.federation.sites])
    right = torch.cdist(z[test].double(), means).argmin(1) == y[test]
    assert result.metrics["global"] == pytest.approx(float(right.float().mean()))
    assert result.numbers["passes"]["train"] == 0
    assert result.numbers["communication"]["per_client_and_round"]["parameters_up"] == 0


def test_newcomers_are_counted(tmp_path: Path) -> None:
    whole = promptfed.run(method="class-mean", rounds=2, out=tmp_path / "a", **SMALL)
    late = promptfed.run(method="class-mean", rounds=2, join={"clients": 1, "round": 2}, out=tmp_path / "b", **SMALL)
    assert late.metrics["clients"] == 2
    a, b = (Run(result.folder).params(0)["head.weight"] for result in (whole, late))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["class-mean+ft", "class-mean+pt", "centralised+ft", "centralised+pt"])
def test_references_take_no_plug_in_of_a_client(name: str) -> None:
    with pytest.raises(UserError, match=r"^method.name: [^\n]+$"):
        create(name)


# ---- centralised


def test_all_training_data_are_at_one_client_and_the_split_is_kept(tmp_path: Path) -> None:
    runs = {
        name: promptfed.run(method={"name": name, "epochs": 1}, rounds=2, out=tmp_path / name, **SMALL)
        for name in ("centralised+head", "head-tune")
    }
    ours, theirs = runs.values()
    files = [(result.folder / "partition.json").read_bytes() for result in runs.values()]
    assert files[0] == files[1]
    assert ours.numbers["sites"] == theirs.numbers["sites"]
    assert ours.numbers["passes"]["train"] == theirs.numbers["passes"]["train"], "a round with all clients"
    assert ours.metrics["clients"] == theirs.metrics["clients"] == 3
    lines = [json.loads(line) for line in (ours.folder / "rounds.jsonl").read_text().splitlines()]
    assert all(line["clients"] == [0] for line in lines)


def test_it_is_training_on_the_pooled_data(tmp_path: Path) -> None:
    """The same as FedAvg of a single client that holds all training data."""
    config = C.make({"method": {"name": "centralised+head", "epochs": 1}, "rounds": 2, **SMALL})
    ours = build.assemble(config)
    one = promptfed.Federation(ours.federation.dataset, ours.held.sites[:1], {"name": "one"})
    pooled = promptfed.run(
        method={"name": "head-tune", "epochs": 1}, rounds=2, out=tmp_path / "one", federation=one, **SMALL
    )
    made = promptfed.run(method={"name": "centralised+head", "epochs": 1}, rounds=2, out=tmp_path / "all", **SMALL)
    a, b = (Run(result.folder).state["head.weight"] for result in (pooled, made))
    assert torch.equal(a, b)


def test_newcomers_data_are_nobodys() -> None:
    config = C.make({"method": "centralised", "join": {"clients": [0]}, **SMALL})
    parts = build.assemble(config)
    drawn, held = parts.federation.sites, parts.held.sites
    assert [len(site.train) for site in held] == [0, len(drawn[1].train) + len(drawn[2].train), 0]
    assert all(
        np.array_equal(a.test, b.test) and np.array_equal(a.val, b.val) for a, b in zip(drawn, held, strict=True)
    )


def test_data_do_not_leave_their_sites_over_flower() -> None:
    with pytest.raises(UserError, match=r'^method.name = "centralised": training data would have to leave .*$'):
        C.make({"method": "centralised", "engine": "flower"})
    with pytest.raises(UserError, match=r'^privacy.clip: "centralised" pools'):
        C.make({"method": "centralised", "privacy": {"clip": 1.0}})


# ---- in tables


def test_references_are_last_and_every_row_tells_how_far_it_is_from_the_ceiling(tmp_path: Path) -> None:
    promptfed.compare(
        methods=["class-mean", "centralised+head", "head-tune"], method={"epochs": 1}, rounds=1, out=tmp_path, **SMALL
    )
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["label"] for row in rows] == ["head-tune", "class-mean", "centralised+head"]
    assert [row.get("reference") for row in rows] == [None, "other", "ceiling"]
    ceiling = rows[2]["local"]["mean"]
    assert [row["to_ceiling"] for row in rows] == [row["local"]["mean"] - ceiling for row in rows]
    text = (tmp_path / "table.md").read_text()
    assert text.index("| head-tune |") < text.index("References") < text.index("| class-mean |")
    lines = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [line["reference"] for line in lines] == ["", "other", "ceiling"]
    assert float(lines[2]["to_ceiling"]) == 0


def test_the_page_ranks_no_reference(tmp_path: Path) -> None:
    from promptfed.report.gather import gather
    from promptfed.report.page import write as page_of
    from promptfed.report.page.table import results

    promptfed.compare(methods=["class-mean", "centralised+head", "head-tune"], rounds=1, out=tmp_path, **SMALL)
    lines = {line.label: line for line in results(gather([tmp_path]))["tables"]["last"]}
    assert {label for label, line in lines.items() if line.reference} == {"class-mean", "centralised+head"}
    assert lines["centralised+head"].ceiling is not None
    assert lines["centralised+head"].ceiling.text == "+0.0"
    assert not any(cell.kind == "best" for line in lines.values() if line.reference for cell in line.cells)
    page = page_of([tmp_path], tmp_path / "report.html").read_text()
    assert page.count('<tbody class="apart"') == 1
    assert "To ceiling" in page


def test_which_methods_are_references() -> None:
    assert all(reference(name) for name in ("zero-shot", "class-mean", "centralised", "centralised+vpt"))
    assert not any(reference(name) for name in ("fedavg", "head-tune", "local", "my_module:Mine"))
