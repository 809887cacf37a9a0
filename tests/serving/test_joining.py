"""A new site gets a model of its own from a finished run, which stays as it is."""

import json
import shutil

import numpy as np
import pytest
import typer
from PIL import Image
from serving_runs import NAMES, RUNS, Runs, fingerprint, pictures
from typer.testing import CliRunner

from promptfed import UserError, serving
from promptfed.cli import results as command
from promptfed.data.partitions import stratified
from promptfed.data.site_images import SPLIT
from promptfed.method import Method
from promptfed.runs import config as C
from promptfed.seeding import rng
from promptfed.serving import joining


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Three of the run's four classes."""
    return pictures(tmp_path_factory.mktemp("new") / "clinic", 10, 5, ("circle", "square", "star"))


def held_back(site):
    """The images that the new site holds back for testing, and their classes."""
    files = sorted(site.rglob("*.png"))
    labels = np.array([NAMES.index(file.parent.name) for file in files])
    test = np.sort(stratified([np.arange(len(files))], labels, SPLIT, rng(0, "join"))[0].test)
    return [files[i] for i in test], labels[test]


@pytest.mark.parametrize("name", RUNS)
def test_a_new_site_gets_its_own_model(runs, site, tmp_path, name):
    folder = runs[name].folder
    before = fingerprint(folder)
    joined = joining.join(folder, site, out=tmp_path / "joined")
    assert fingerprint(folder) == before
    numbers = json.loads((tmp_path / "joined" / "join.json").read_text())
    assert numbers == joined.numbers
    assert (numbers["client"], numbers["site"]) == (3, "clinic")
    assert (numbers["n_train"], numbers["n_val"], numbers["n_test"]) == (21, 3, 6)
    assert list(numbers["after"]["classes"]) == ["circle", "square", "star"]
    # The model that was written is the one that was scored.
    model = serving.load(tmp_path / "joined")
    files, labels = held_back(site)
    assert np.mean(model.predict(files).indices == labels) == pytest.approx(numbers["after"]["accuracy"])
    assert model.card["metrics"]["after"] == numbers["after"]
    assert model.card["client"] == 3
    raw = (tmp_path / "joined" / joining.MODEL).read_bytes()
    assert [key for key, secret in runs.secrets(name, 3).items() if secret in raw] == []
    with Image.open(tmp_path / "joined" / "join.png") as picture:
        assert 1100 <= picture.width <= 1600  # its labels take part of it
        assert 600 <= picture.height <= 1000
        assert len(picture.convert("RGB").resize((60, 60)).getcolors(3600) or []) > 3


def test_before_is_what_the_site_receives_and_training_helps(runs, site, tmp_path):
    """With a global model `before` is that model's score; more rounds go on from where one has ended."""
    files, labels = held_back(site)
    served = serving.load(runs["fedavg"].folder).predict(files)
    one = joining.join(runs["fedavg"].folder, site, out=tmp_path / "one")
    assert one.numbers["before"]["accuracy"] == pytest.approx(np.mean(served.indices == labels))
    many = joining.join(runs["fedavg"].folder, site, rounds=12, out=tmp_path / "many")
    assert many.numbers["before"] == one.numbers["before"]
    assert many.numbers["rounds"] == {"run": 1, "joined": 12}

    def loss(model):
        return -np.log(model.predict(files).probabilities[np.arange(len(labels)), labels]).mean()

    assert loss(many.model) < loss(one.model) < loss(serving.load(runs["fedavg"].folder))


def test_joining_twice_gives_the_same(runs, site, tmp_path):
    for name in ("pfedpt", "pfedpg"):
        files = [
            joining.join(runs[name].folder, site, out=tmp_path / f"{name}-{i}").folder / joining.MODEL for i in (0, 1)
        ]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_sent_to_nobody_is_not_clipped(runs, site, tmp_path):
    """A private run's settings concern updates that leave a site."""
    private = shutil.copytree(runs["fedavg"].folder, tmp_path / "private")
    config = C.make(C.read(private / "config.toml"), {"privacy": {"clip": 1e-6}})
    (private / "config.toml").write_text(C.dump(config.complete()))
    plain, joined = (
        joining.join(run, site, out=tmp_path / f"joined-{run.name}") for run in (runs["fedavg"].folder, private)
    )
    for name, p in plain.model.params.items():
        assert np.array_equal(p, joined.model.params[name])


def test_a_private_prompt_is_trained_for_the_site(runs, site, tmp_path):
    joined = joining.join(runs["pfedpt"].folder, site, out=tmp_path / "joined")
    prompt = joined.model.params["prompt.patch"]
    others = [serving.load(runs["pfedpt"].folder, client=i).params["prompt.patch"] for i in range(3)]
    assert not any(np.array_equal(prompt, other) for other in others)


def test_mistakes_are_one_sentence_and_leave_nothing_behind(runs, site, tmp_path):
    folder, out = runs["fedper"].folder, tmp_path / "out"

    def refused(says, data, **how):
        with pytest.raises(UserError, match=says) as told:
            joining.join(how.pop("run", folder), data, **{"out": out, **how})
        assert "\n" not in str(told.value)
        assert not out.exists()

    refused("is not a folder", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused(r"must hold images as class/\*.jpg", tmp_path / "empty")
    for style in ("ink", "oil"):
        pictures(tmp_path / "deep" / style, 1, 0)
    refused(r"must hold images as class/\*.jpg", tmp_path / "deep")
    (tmp_path / "typo" / "cirle").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "typo" / "cirle" / "0.png")
    refused('class = "cirle" is unknown; did you mean "circle"', tmp_path / "typo")
    refused("rounds = 0 must be at least 1", site, rounds=0)
    refused("is not the folder of a run", site, run=tmp_path)
    (tmp_path / "broken" / "star").mkdir(parents=True)
    (tmp_path / "broken" / "star" / "0.png").write_bytes(b"no image")
    refused(r'--data = ".*broken": 1 corrupt image \(star/0.png\), and no other', tmp_path / "broken")
    joining.join(folder, site, out=tmp_path / "there")
    with pytest.raises(UserError, match="is not empty: choose another folder"):
        joining.join(folder, site, out=tmp_path / "there")


def test_other_spelling_and_a_corrupt_image(runs, tmp_path):
    data = pictures(tmp_path / "site", 4, 1, ("ring", "star"))
    (data / "ring").rename(data / "RING")
    (data / "star" / "bad.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="1 corrupt image"):
        joined = joining.join(runs["fedper"].folder, data, out=tmp_path / "out")
    assert joined.numbers["skipped"] == ["star/bad.png"]
    assert set(joined.numbers["after"]["classes"]) <= {"ring", "star"}


def test_a_site_too_small_to_be_tested(runs, tmp_path):
    data = pictures(tmp_path / "site", 1, 1, ("ring",))
    joined = joining.join(runs["fedper"].folder, data, out=tmp_path / "out")
    assert joined.numbers["after"] == {"accuracy": None, "macro_f1": None, "classes": {}}
    assert (tmp_path / "out" / "join.png").exists()


def test_the_command(runs, site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    for made in (command.join, command.predict):
        app.command()(made)
    said = CliRunner().invoke(app, ["join", str(runs["fedper"].folder), "--data", str(site), "--rounds", "2"])
    assert said.exit_code == 0, said.output
    out = tmp_path / "runs" / "fedper-join-clinic"
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "model.json", "join.json", "join.png"}
    assert all(word in said.stdout for word in ("circle", "before", "after", "join.png"))
    again = CliRunner().invoke(app, ["predict", str(out), str(site), "--format", "json"])
    assert len(json.loads(again.stdout)) == 30


def test_an_aggregate_that_is_not_finite_is_refused_as_in_a_run(runs, site, tmp_path, monkeypatch):
    name = next(iter(RUNS))
    folder = runs[name].folder
    broken = lambda self, state, mean: {key: p * float("nan") for key, p in state.items()}  # noqa: E731
    monkeypatch.setattr(Method, "merge", broken)
    with pytest.raises(UserError, match=r'^the new site cannot train with ".*": aggregated to something not finite$'):
        joining.join(folder, site, out=tmp_path / "joined")
    assert not (tmp_path / "joined").exists()
