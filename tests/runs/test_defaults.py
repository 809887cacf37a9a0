"""What a method runs on where nothing is said, and results that are none."""

import json

import pytest

import promptfed
from promptfed.cli.main import main
from promptfed.report.page import write
from promptfed.runs import comparison
from promptfed.runs import config as C
from promptfed.runs.record import unused

TINY = {"dataset": {"name": "digits", "limit": 60, "size": 16}, "partition": {"name": "iid", "clients": 2}}
FAILING = {**TINY, "backbone": "cnn-code", "rounds": 2, "engine": {"workers": 1}}


@pytest.mark.parametrize(
    ("method", "backbone", "dataset"),
    [
        ("pfedpt", "cnn", "digits"),
        ("fedvpt", "vit-mini", "shapes"),
        ("sgpt", "vit-mini", "shapes"),
        ("pfedpt-tokens", "vit-mini", "shapes"),
        ("promptfl", "clip-mini", "shapes"),
        ("zero-shot", "clip-mini", "shapes"),
        ("fedprox+maple", "clip-mini", "shapes"),
    ],
)
def test_a_method_brings_a_backbone_that_fits(method, backbone, dataset):
    config = C.make({"method": method})
    assert (config.backbone.name, config.dataset.name) == (backbone, dataset)
    assert C.make({"method": method, "backbone": "vit-tiny"}).dataset.name == "digits"
    named = C.make({"method": method, "dataset": "cifar10"})
    assert (named.backbone.name, named.dataset.name) == (backbone, "cifar10")


def test_methods_that_are_compared_run_on_the_same_data(tmp_path):
    plan = comparison.prepare(None, {}, methods=["pfedpt", "fedvpt", "promptfl"], out=tmp_path / "x")
    assert [job.config.backbone.name for job in plan.jobs] == ["vit-mini", "vit-mini", "clip-mini"]
    assert {job.config.dataset.name for job in plan.jobs} == {"shapes"}


def test_a_run_of_which_no_update_was_used_says_so_everywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    method = {"name": "fedavg", "lr": 1e20, "epochs": 1}
    with pytest.warns(UserWarning, match="no update used: every client failed in every round"):
        result = promptfed.run(**FAILING, method=method, out="run")
    assert unused(result.numbers)
    assert "no update used" in write([tmp_path / "run"], tmp_path / "page.html").read_text()
    words = ["dataset.limit=60", "dataset.size=16", "partition=iid", "partition.clients=2", "backbone=cnn-code"]
    words += ["rounds=1", "engine.workers=1", "method.epochs=1", "method.lr=1e20"]
    for command in (["run", "method=fedavg"], ["compare", "--methods", "fedavg,local"]):
        monkeypatch.setattr("sys.argv", ["promptfed", *command, *words, "--out", command[0] + "-out"])
        with pytest.raises(SystemExit) as left:
            main()
        assert "no update used" in str(left.value.code)  # and the exit code is 1
    assert "fedavg (no update used)" in (tmp_path / "compare-out/table.md").read_text()
    assert json.loads((tmp_path / "compare-out/table.json").read_text())[0]["unused"]
