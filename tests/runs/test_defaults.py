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


def test_what_is_not_trained_is_evaluated_once_and_has_no_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    small = {"dataset": {"name": "shapes", "limit": 80}, "partition": {"name": "iid", "clients": 2}}
    result = promptfed.run(method="zero-shot", **small, rounds=3, engine={"workers": 1}, out=tmp_path / "run")
    assert [line["round"] for line in result.rounds if "aggregated" in line] == [3]
    said = capsys.readouterr().err
    assert "loss" not in said
    assert "slow" not in said


def test_an_unfinished_run_and_a_wrong_device_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    promptfed.run(**{**FAILING, "rounds": 1}, method={"name": "fedavg", "epochs": 1}, out=folder)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1", "rounds = 5"))
    with pytest.warns(UserWarning, match="is not finished: round 1 of 5"):
        promptfed.load(folder)
    with pytest.raises(promptfed.UserError, match='--device = "gpu" is unknown'):
        promptfed.load(folder, device="gpu")
