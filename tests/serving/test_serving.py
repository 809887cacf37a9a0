"""What was trained predicts what the run's evaluation said, from its folder and from a file of its own."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from serving_runs import NAMES, RUNS, Runs, fingerprint
from typer.testing import CliRunner

from promptfed import UserError, serving
from promptfed.cli import results as command
from promptfed.clients.store import Store
from promptfed.clients.wire import pack, unpack
from promptfed.data.images import Resize, pixels
from promptfed.runs.record import Busy, Folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    return serving.export(runs["fedper"].folder, tmp_path_factory.mktemp("out") / "one.safetensors", client=1)


def scored(runs, name, stage="aggregated"):
    """-> client: what the run's result says of it, and its test images"""
    sites = runs.federation(name).sites
    rows = runs[name].numbers["clients"][stage]
    return {row["client"]: (row, [runs.files[i] for i in sites[row["client"]].test]) for row in rows}


def agrees(predictions, row):
    """Accuracy and mean cross-entropy, recomputed, are those of the evaluation."""
    truth = np.array([NAMES.index(Path(name).parent.name) for name in predictions.names])
    assert np.mean(predictions.indices == truth) == pytest.approx(row["accuracy"], abs=1e-9)
    loss = -np.log(predictions.probabilities[np.arange(len(truth)), truth]).mean()
    assert loss == pytest.approx(row["loss"], rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_a_client_predicts_what_its_evaluation_scored_also_from_a_file(runs, tmp_path, monkeypatch, name):
    folder = runs[name].folder
    before = fingerprint(folder)
    for client, (row, files) in scored(runs, name).items():
        model = serving.load(folder, client=client)
        found = model.predict(files)
        agrees(found, row)
        assert np.allclose(found.probabilities.sum(1), 1, atol=1e-5)
        assert model.card["metrics"]["aggregated"] == row
    assert fingerprint(folder) == before
    file = model.save(tmp_path / "away" / "model.safetensors")
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "elsewhere"))
    again = serving.load(file).predict(files)
    assert np.array_equal(again.probabilities, found.probabilities)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", RUNS)
def test_an_export_holds_nothing_of_other_clients(runs, tmp_path, name):
    for client in (0, 2):
        file = serving.export(runs[name].folder, tmp_path / f"{client}.safetensors", client=client)
        raw = file.read_bytes()
        hidden = runs.secrets(name, client)
        assert [key for key, secret in hidden.items() if secret in raw] == []
    if name in ("pfedpt", "fedper", "pfedpg", "fedem", "dp2fl", "dp2fl-sealed", "atpfl"):
        assert hidden
    if name in ("pfedpt", "fedper", "pfedpg", "fedem", "fedrod"):  # its own is there: the search finds what is there
        store = Store(runs[name].folder / "clients")
        own = {key: p.numpy().tobytes() for key, p in store.get(client, 99).items() if key.startswith("private/")}
        store.close()
        assert own
        assert all(secret in raw for secret in own.values())


def test_what_is_in_an_exported_file(runs, tmp_path):
    """Trained parameters, frozen weights from a seed, no pre-trained ones."""

    def names(run):
        file = serving.export(runs[run].folder, tmp_path / f"{run}.safetensors", client=0)
        assert json.loads(file.with_suffix(".json").read_text()) == unpack(file.read_bytes())[1]
        return set(load_file(file))

    assert {n.split("/")[0] for n in names("fedavg")} == {"params"}
    head = {f"params/{n}" for n in ("head.weight", "head.bias", "scale.mean", "scale.std")}
    assert {n for n in names("head-tune") if n.startswith("params/")} == head
    assert any(n.startswith("frozen/body.") for n in names("head-tune"))
    assert names("fedvpt") == {"params/tokens.0", *head}
    assert names("promptfl") == {"params/context"}
    assert names("zero-shot") == set()
    card = json.loads((tmp_path / "head-tune.json").read_text())
    assert card["classes"] == list(NAMES)
    assert card["image"] == [3, 16, 16]
    assert card["client"] == 0
    assert card["backbone"] == {"name": "cnn-code", "part": "whole", "frozen": None}
    assert card["method"]["name"] == "head-tune"
    assert card["round"] == 1
    assert card["normalisation"]["of"] == "dataset"
    assert {"format", "seed", "dataset", "preprocessing", "versions", "metrics", "site", "n_train"} <= card.keys()
    assert json.loads((tmp_path / "fedvpt.json").read_text())["normalisation"]["of"] == "backbone"


# ---- the global model


@pytest.mark.parametrize("name", ["fedavg", "sgpt", "fedrod", "dp2fl", "dp2fl-sealed", "zero-shot"])
def test_the_global_model_is_the_one_that_was_scored(runs, tmp_path, name):
    stage = "common" if name in ("fedrod", "dp2fl", "dp2fl-sealed") else "aggregated"
    model = serving.load(serving.export(runs[name].folder, tmp_path, common=True))
    assert model.card["client"] is None
    for row, files in scored(runs, name, stage).values():
        agrees(model.predict(files), row)
    assert model.card["metrics"][stage]["local"] == runs[name].numbers["metrics"][stage]["last"]["local"]


@pytest.mark.parametrize("name", ["pfedpt", "fedper", "fedbabu", "pfedpg", "fedem", "head-tune+ft"])
def test_personal_methods_have_no_global_model(runs, name):
    method = RUNS[name]["method"]["name"].replace("+", r"\+")
    with pytest.raises(UserError, match=f'"{method}" has no global model'):
        serving.load(runs[name].folder, common=True)
    with pytest.raises(UserError, match=r"client must be given, 0 to 2"):
        serving.load(runs[name].folder)


def test_without_a_client_one_global_model_is_meant(runs):
    assert serving.load(runs["fedavg"].folder).card["client"] is None


# ---- images


def test_all_kinds_of_images_give_the_same(runs, exported, tmp_path):
    model = serving.load(exported)
    files = runs.files[:7]
    expected = model.predict(files)
    assert expected.names == tuple(map(str, files))
    assert expected.probabilities.shape == (7, 4)
    stored = np.stack([pixels(Image.open(file), 3, Resize((16, 16))) for file in files])
    whole = np.stack([np.asarray(Image.open(file)) for file in files])  # (N, 32, 40, 3)
    for file in files:
        folder = tmp_path / "some" / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder)
    (tmp_path / "some" / "notes.txt").write_text("no image")
    kinds = [
        stored,
        stored.transpose(0, 2, 3, 1),
        whole,
        whole.transpose(0, 3, 1, 2),
        [Image.open(file) for file in files],
        [str(file) for file in files],
        list(whole),
        str(tmp_path / "some"),
        [tmp_path / "some" / files[0].parent.name],
    ]
    for kind in kinds:
        assert np.allclose(model.predict(kind).probabilities, expected.probabilities, atol=1e-6)
    for batch in (1, 3):
        assert np.allclose(model.predict(files, batch).probabilities, expected.probabilities, atol=1e-5)
    top = expected.top(2)
    assert [ranked[0][0] for ranked in top] == expected.labels
    assert all(len(ranked) == 2 and ranked[0][1] >= ranked[1][1] for ranked in top)


def test_any_mode_and_size_is_brought_into_shape(runs, exported):
    model = serving.load(exported)
    odd = [
        Image.new(mode, size) for mode, size in (("L", (5, 90)), ("RGBA", (300, 7)), ("P", (16, 16)), ("I;16", (9, 9)))
    ]
    assert model.predict(odd).probabilities.shape == (4, 4)
    assert len(model.predict(np.zeros((2, 9, 9, 1), np.uint8))) == 2
    assert len(model.predict(Image.new("RGB", (16, 16)))) == 1


def test_a_prediction_depends_on_the_image_not_on_the_batch(runs):
    """More images than an evaluation takes at a time; the prompt of this run moves with the place in an evaluation."""
    model = serving.load(runs["pfedpt"].folder, client=0)
    many = [Image.open(runs.files[0])] * 140
    whole, parts = model.predict(many), model.predict(many, batch=50)
    assert np.allclose(whole.probabilities, parts.probabilities, atol=1e-5)
    assert not np.allclose(whole.probabilities[0], whole.probabilities[139], atol=1e-5)


def test_corrupt_images_are_named_and_skipped(runs, exported, tmp_path):
    model = serving.load(exported)
    broken = tmp_path / "broken.png"
    broken.write_bytes(runs.files[0].read_bytes()[:200])
    with pytest.warns(UserWarning, match=r"1 corrupt image \(.*broken.png\) skipped"):
        found = model.predict([runs.files[0], broken, runs.files[1]])
    assert found.names == (str(runs.files[0]), str(runs.files[1]))
    assert found.skipped == (str(broken),)
    with pytest.raises(UserError, match=r"broken.png\), and no other"):
        model.predict(broken)


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ("nowhere.png", '"nowhere.png" does not exist'),
        ([], "no images given"),
        (np.zeros((2, 8, 8), np.uint8), "must be uint8"),
        (np.zeros((2, 8, 8, 3)), "must be uint8"),
        (np.zeros((2, 5, 8, 8), np.uint8), "with 1, 3 or 4 channels"),
        ([3], r"images\[0\] is int"),
    ],
)
def test_what_is_no_image_is_told(exported, images, says):
    with pytest.raises(UserError, match=says):
        serving.load(exported).predict(images)


def test_a_folder_without_images_is_told(exported, tmp_path):
    with pytest.raises(UserError, match="holds no images"):
        serving.load(exported).predict(tmp_path)
    with pytest.raises(UserError, match="batch = 0 must be 1 to 128"):
        serving.load(exported).predict(tmp_path, batch=0)


# ---- what can go wrong


def test_impossible_requests_are_one_sentence(runs, exported, tmp_path):
    folder = runs["fedper"].folder
    for client in (-1, 3):
        with pytest.raises(UserError, match=f"client = {client} must be 0 to 2"):
            serving.load(folder, client=client)
    with pytest.raises(UserError, match="cannot both be asked for"):
        serving.load(folder, client=1, common=True)
    with pytest.raises(UserError, match="does not exist; allowed"):
        serving.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither the folder of a run nor holds one exported model"):
        serving.load(tmp_path)
    with pytest.raises(UserError, match="holds the model of client 1 only"):
        serving.load(exported, client=0)
    with pytest.raises(UserError, match="holds the model of client 1 only"):
        serving.load(exported, common=True)
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        serving.export(folder, tmp_path / "model.bin", client=0)
    with pytest.raises(UserError, match="cannot be written"):
        serving.export(folder, "/proc/nowhere/model.safetensors", client=0)
    for file in ("checkpoint.safetensors", "config.toml"):
        with pytest.raises(UserError, match="is not an exported model"):
            serving.load(folder / file)


def test_a_client_has_a_number_and_a_name(runs, exported):
    folder = runs["fedper"].folder
    assert [serving.load(folder, client=who).card["client"] for who in (1, "1", "client-1")] == [1, 1, 1]
    assert [serving.load(exported, client=who).card["site"] for who in (1, "1", "client-1")] == ["client-1"] * 3
    with pytest.raises(UserError, match=r'client = "clinet-1" is unknown; did you mean "client-1"\?'):
        serving.load(folder, client="clinet-1")
    with pytest.raises(UserError, match="holds the model of client 1 only"):
        serving.load(exported, client="client-0")


def test_of_a_folder_of_runs_one_must_be_named(runs):
    folder = runs["fedper"].folder
    with pytest.raises(UserError, match=rf"holds runs, as a comparison does: name one of them \({folder.parent}/"):
        serving.load(folder.parent, client=0)


def test_an_exported_model_is_found_by_its_card_and_its_folder(exported):
    for path in (exported, str(exported), exported.with_suffix(".json"), exported.parent):
        assert serving.load(path, client=1).classes == NAMES


def changed(file, out, **card):
    tensors, note = unpack(file.read_bytes())
    out.write_bytes(pack(tensors, {**note, **card}))
    return out


def test_a_file_that_does_not_fit_is_refused(runs, exported, tmp_path):
    card = unpack(exported.read_bytes())[1]
    out = tmp_path / "changed.safetensors"
    with pytest.raises(UserError, match="is of format 9"):
        serving.load(changed(exported, out, format=9))
    with pytest.raises(UserError, match="is damaged"):
        serving.load(changed(exported, out, method={**card["method"], "name": "fedavg+pt"}))
    with pytest.raises(UserError, match="is damaged"):
        serving.load(changed(exported, out, image="small"))
    with pytest.raises(UserError, match="backbone= says where it is"):
        serving.load(changed(exported, out, backbone={**card["backbone"], "name": "/models/gone"}))
    save_file({"weight": load_file(exported)["params/head.bias"]}, out)
    with pytest.raises(UserError, match="is not an exported model"):
        serving.load(out)


def test_frozen_weights_must_be_those_of_the_training(runs, tmp_path):
    file = serving.export(runs["promptfl"].folder, tmp_path / "text.safetensors", client=0)
    card = unpack(file.read_bytes())[1]
    other = changed(file, tmp_path / "other.safetensors", backbone={**card["backbone"], "frozen": "00"})
    with pytest.raises(UserError, match="was trained with other weights"):
        serving.load(other)
    gone = changed(file, tmp_path / "gone.safetensors", backbone={**card["backbone"], "name": "/models/gone"})
    assert serving.load(gone, backbone="clip-mini").classes == NAMES


def test_a_file_does_not_choose_which_code_runs(runs, exported, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("from promptfed.methods.shared_body import FedPer as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    card = unpack(exported.read_bytes())[1]
    file = changed(exported, tmp_path / "m.safetensors", method={**card["method"], "name": "stranger:Mine"})
    with pytest.raises(UserError, match="import stranger first"):
        serving.load(file)
    assert "stranger" not in sys.modules
    assert serving.load(file, trust=True).classes == NAMES
    assert serving.load(file).classes == NAMES  # it is imported now


def test_a_run_that_goes_on_is_not_read(runs):
    folder = Folder(runs["fedper"].folder)
    try:
        with pytest.raises(Busy, match="still going on"):
            serving.load(runs["fedper"].folder, client=0)
    finally:
        folder.close()


def test_a_run_of_a_given_federation(runs, tmp_path):
    import promptfed
    from promptfed.testing import tiny_federation

    federation = tiny_federation(tmp_path)
    settings = {
        "method": {"name": "fedper", "epochs": 1},
        "backbone": "cnn-code",
        "rounds": 1,
        "engine": {"workers": 1},
    }
    result = promptfed.run(**settings, federation=federation, out=tmp_path / "run")
    model = serving.load(tmp_path / "run", client=0)
    test = federation.sites[0].test
    found = model.predict(federation.dataset.images[test])
    expected = result.numbers["clients"]["aggregated"][0]["accuracy"]
    assert np.mean(found.indices == federation.dataset.labels[test]) == pytest.approx(expected)


# ---- commands


@pytest.fixture
def call(monkeypatch):
    app = typer.Typer()
    for made in (command.predict, command.export):
        app.command()(made)
    monkeypatch.setenv("COLUMNS", "200")

    def of(*words, error=None):
        result = CliRunner().invoke(app, [str(word) for word in words])
        if error:
            assert isinstance(result.exception, UserError)
            assert error in str(result.exception)
            assert "\n" not in str(result.exception)
        else:
            assert result.exit_code == 0, result.output
        return result.stdout

    return of


def test_predict_in_all_formats(runs, call, tmp_path, monkeypatch):
    folder, files = runs["fedper"].folder, runs.files[:3]
    expected = serving.load(folder, client=2).predict(files)
    told = json.loads(call("predict", folder, "--client", 2, *files, "--format", "json", "--top", 2))
    assert [one["image"] for one in told] == list(map(str, files))
    assert [one["label"] for one in told] == expected.labels
    assert all(len(one["top"]) == 2 for one in told)
    rows = list(csv.DictReader(io.StringIO(call("predict", folder, *files, "--client", 2, "--format", "csv"))))
    assert len(rows) == 9
    assert [row["class"] for row in rows if row["rank"] == "1"] == expected.labels
    monkeypatch.chdir(runs.data.parent)  # long paths are folded
    said = call("predict", folder, "--client", 2, runs.data.name, "--batch", 16)
    assert said.count(".png") == 60
    assert all(name in said for name in NAMES)
    file = call("export", folder, "--client", 2, "--out", tmp_path / "two.safetensors").split()[0]
    assert json.loads(call("predict", file, *files, "--format", "json", "--top", 2)) == told
    told = json.loads(call("predict", runs["fedavg"].folder, "--global", files[0], "--top", 9, "--format", "json"))
    assert sorted(entry["class"] for entry in told[0]["top"]) == sorted(NAMES)


def test_mistakes_of_commands(runs, call):
    folder, file = runs["fedper"].folder, runs.files[0]
    call("predict", folder, "--client", 7, file, error="client = 7 must be 0 to 2")
    call("predict", folder, file, error="client must be given, 0 to 2")
    call("predict", folder, "--global", file, error="has no global model")
    call("predict", folder, "--client", 0, file, "--format", "xml", error="--format")
    call("predict", folder, "--client", 0, "nowhere", error="does not exist")
    call("export", folder, "--client", 9, error="client = 9 must be 0 to 2")


def test_exports_lie_in_the_run_unless_told_otherwise(runs, call):
    said = call("export", runs["fedavg"].folder, "--global")
    file = runs["fedavg"].folder / "exports" / "global.safetensors"
    assert str(file) in said
    assert file.exists()
    assert file.with_suffix(".json").exists()
