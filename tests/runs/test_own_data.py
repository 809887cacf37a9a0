"""Runs and comparisons of data that the caller gives, as docs/add-a-dataset.md does."""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import promptfed
from promptfed.analysis import make
from promptfed.cli.main import main
from promptfed.data import Dataset, Federation, Partition, federate
from promptfed.errors import UserError
from promptfed.report.page import write
from promptfed.runs.opened import Run

SETTINGS = {"method": {"name": "fedavg", "epochs": 1}, "backbone": "cnn-code", "rounds": 1, "engine": {"workers": 1}}


class Halves(Partition, kind="halves"):
    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(dataset)), self.clients)


class Mine(promptfed.FedAvg):
    pass


@pytest.fixture
def federation(tmp_path, monkeypatch) -> Federation:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 60)
    images = rng.integers(0, 120, (60, 3, 16, 16), dtype=np.uint8)
    images[labels == 1, :, 8:] += 100
    bands = Dataset.from_arrays("bands", images, labels, ("upper", "lower"))
    return federate(bands, Halves(clients=3), seed=0)


def test_what_is_recorded_is_what_was_given(federation):
    result = promptfed.run(**SETTINGS, federation=federation)
    assert result.folder.name == "fedavg-bands-seed0"
    config = tomllib.loads((result.folder / "config.toml").read_text())
    assert config["dataset"]["name"] == str(federation.dataset.path)
    assert config["dataset"]["digest"] == federation.dataset.fingerprint
    assert config["partition"] == {"name": "file", "file": str(result.folder.absolute() / "partition.json")}
    assert Run(result.folder).title == "fedavg on bands, halves, 3 clients, seed 0"


def test_everything_works_on_such_a_run(federation, monkeypatch, tmp_path):
    result = promptfed.run(**SETTINGS, federation=federation, out="mine")
    test = federation.sites[0].test
    found = promptfed.load("mine").predict(federation.dataset.images[test])
    expected = result.numbers["clients"]["aggregated"][0]["accuracy"]
    assert np.mean(found.indices == federation.dataset.labels[test]) == pytest.approx(expected)
    assert promptfed.export("mine").exists()
    assert make("mine", ["leakage"]).files
    page = write([tmp_path / "mine"], tmp_path / "page.html").read_text()
    assert "bands, halves, 3 clients" in page
    assert str(federation.dataset.path) in page  # in the configuration that repeats it
    for words in (["--resume", "rounds=2", "--out", "mine"], ["mine/config.toml", "--out", "again"]):
        monkeypatch.setattr(sys, "argv", ["promptfed", "run", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code
    assert json.loads((tmp_path / "mine/result.json").read_text())["rounds"] == 2
    assert json.loads((tmp_path / "again/result.json").read_text())["dataset"]["name"] == "bands"


def test_resumed_with_other_data_it_is_refused(federation):
    promptfed.run(**SETTINGS, federation=federation, out="mine")
    assert promptfed.run(rounds=2, federation=federation, out="mine", resume=True).numbers["rounds"] == 2
    data = federation.dataset
    other = Dataset.from_arrays("bands", 255 - data.images, data.labels, data.classes)
    with pytest.raises(UserError, match='"bands" does not have the images of the run in "mine"'):
        promptfed.run(rounds=3, federation=federate(other, Halves(clients=3), 0), out="mine", resume=True)


def test_a_dataset_that_left_the_cache_is_named(federation):
    promptfed.run(**SETTINGS, federation=federation, out="mine")
    shutil.rmtree(federation.dataset.path)
    with pytest.raises(UserError, match=r'dataset.name = ".*bands-.*" is no longer in the image cache'):
        promptfed.load("mine")


def test_a_comparison_of_a_federation_and_of_classes(federation, monkeypatch):
    module = ModuleType("own_methods")
    module.Mine = Mine
    monkeypatch.setitem(sys.modules, "own_methods", module)
    monkeypatch.setattr(Mine, "__module__", "own_methods")
    settings = {**SETTINGS, "method": {"epochs": 1}}
    results = promptfed.compare(methods=["local", Mine], federation=federation, out="both", **settings)
    assert set(results) == {"local", "Mine"}
    assert {run.numbers["dataset"]["name"] for runs in results.values() for run in runs} == {"bands"}
    splits = [Federation.load(runs[0].folder / "partition.json", federation.dataset) for runs in results.values()]
    for split in splits:
        assert [site.train.tolist() for site in split.sites] == [site.train.tolist() for site in federation.sites]
    again = promptfed.compare(methods=["local", Mine], federation=federation, out="both", **settings)
    assert [run.numbers for runs in again.values() for run in runs] == [
        run.numbers for runs in results.values() for run in runs
    ]
    # Another split of the same data is another comparison.
    other = federate(federation.dataset, Halves(clients=2), 0)
    with pytest.raises(UserError, match="holds another partition"):
        promptfed.compare(methods=["local", Mine], federation=other, out="both", **settings)


def test_a_dataset_in_place_of_its_name(federation):
    partition = {"name": "iid", "clients": 2}
    result = promptfed.run(**SETTINGS, dataset=federation.dataset, partition=partition, out="run")
    assert result.numbers["dataset"]["name"] == "bands"
    results = promptfed.compare(
        methods=["local"],
        out="both",
        dataset=federation.dataset,
        partition=partition,
        **{**SETTINGS, "method": {"epochs": 1}},
    )
    assert results["local"][0].numbers["dataset"]["fingerprint"] == federation.dataset.fingerprint
    # What was decoded before is not resized.
    own = {"name": str(federation.dataset.path), "size": 8}
    with pytest.raises(UserError, match=r"dataset.size = 8 cannot be applied"):
        promptfed.run(**SETTINGS, dataset=own, partition=partition)


def test_a_dataset_by_its_name_alone(federation):
    assert promptfed.load_dataset("digits").name == "digits"


def test_one_class_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    alone = Dataset.from_arrays("alone", np.zeros((9, 3, 16, 16), np.uint8), np.zeros(9, np.int64), ("upper",))
    with pytest.raises(
        UserError, match=r'^dataset\.name = "alone" has one class only: two are the least to tell apart$'
    ):
        promptfed.run(**SETTINGS, dataset=alone, partition={"name": "iid", "clients": 2}, out=tmp_path / "run")


class Leaves:
    """A view that leaves in the middle of a round."""

    def begin(self, round, clients):
        if round == 3:
            raise KeyboardInterrupt

    def on_notice(self, notice): ...

    def end(self, line): ...


def test_a_finished_run_that_goes_on_is_not_finished_until_it_ends(federation):
    promptfed.run(**SETTINGS, federation=federation, out="mine")
    with pytest.raises(KeyboardInterrupt):
        promptfed.run(out="mine", resume=True, rounds=4, view=Leaves())
    assert Run(Path("mine")).result is None
    assert promptfed.run(out="mine", resume=True, rounds=4).numbers["rounds"] == 4
