"""Each analysis against numbers that are computed otherwise."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch.nn import functional as F
from typer.testing import CliRunner

import promptfed
from promptfed import UserError, build, models
from promptfed import config as C
from promptfed.analysis import ANALYSES, Options, make
from promptfed.analysis.attention import attention_map, different, grad_cam, look
from promptfed.analysis.colours import pure
from promptfed.analysis.command import analyse
from promptfed.analysis.groups import agreement, assigned
from promptfed.analysis.helps import data_prompt, kind
from promptfed.analysis.leakage import inferred
from promptfed.analysis.opened import Opened
from promptfed.client import context
from promptfed.frozen import normalisation
from promptfed.method import Batch, Phase
from promptfed.models.base import Model
from promptfed.tuning import Full
from promptfed.wire import unpack


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def made(folder: Path, name: str, out: Path, options: Options | None = None) -> list[dict[str, str]]:
    """The rows of one analysis, whose picture and caption are looked at."""
    files = make(folder, [name], out, options).files[name]
    assert [file.name for file in files[:2]] == [f"{name}.png", f"{name}.csv"]
    with Image.open(files[0]) as image:
        assert 700 <= image.width <= 1700
        assert 300 <= image.height <= 1600
        assert len(image.convert("RGB").resize((80, 80)).getcolors(6400) or []) > 3
    caption = json.loads((out / f"{name}.json").read_text())
    assert set(caption) == {"title", "text"}
    assert "nan" not in caption["text"]
    return read(files[1])


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def columns(row: dict[str, str], start: str) -> np.ndarray:
    return np.array([float(value) for key, value in row.items() if key.startswith(f"{start} ")])


# ---- attention


class Toy(Model):
    """A convolution, the mean over places, a linear head."""

    def features(self, weights, x, tokens=None):
        return F.conv2d(x, weights["body.conv"]).mean((2, 3))


def toy() -> Toy:
    g = torch.Generator().manual_seed(0)
    shapes = {"body.conv": (3, 2, 2, 2), "head.weight": (4, 3), "head.bias": (4,)}
    return Toy("toy", (2, 5, 6), 4, {name: torch.randn(shape, generator=g) for name, shape in shapes.items()})


def test_grad_cam_of_a_model_that_is_differentiated_by_hand():
    model, x, y = toy(), torch.randn(2, 2, 5, 6), torch.tensor([1, 3])
    seen = look(Full(), model, dict(model.weights), Batch(x, y, None, torch.zeros(2), {}), None)
    w, kernel = model.weights["head.weight"].numpy(), model.weights["body.conv"].numpy()
    for n in range(2):
        layer = np.zeros((3, 4, 5))
        for i in range(4):
            for j in range(5):
                layer[:, i, j] = (kernel * x[n, :, i : i + 2, j : j + 2].numpy()).sum((1, 2, 3))
        # The score is sum_k w_ck mean(A_k) + b_c: its slope in A_k is w_ck / 20 everywhere.
        expected = np.maximum((w[int(y[n])][:, None, None] / 20 * layer).sum(0), 0)
        np.testing.assert_allclose(seen.maps[n], expected, atol=1e-6)
    assert not seen.prompt.any()


def test_grad_cam_weighs_channels_by_their_mean_slope():
    layer = torch.tensor([[[[1.0, -2.0]], [[3.0, 4.0]]]], requires_grad=True)
    score = (layer * torch.tensor([[[[1.0, 3.0]], [[-1.0, 0.0]]]])).sum()
    np.testing.assert_allclose(grad_cam(score, layer), [[[2 - 1.5, 0]]])


def test_attention_is_that_of_the_tokens_that_are_read():
    tower = models.vit((3, 8, 12), 2, 0, patch=4, depth=1, width=8, heads=2)
    g = np.random.default_rng(0)
    q, k = g.normal(size=(1, 2, 1, 4)), g.normal(size=(1, 2, 1 + 3 + 6, 4))
    maps, prompt = attention_map(torch.from_numpy(q), torch.from_numpy(k), tower)
    scores = np.exp(np.einsum("bhqd,bhkd->bhqk", q, k) / 2)
    weights = (scores / scores.sum(-1, keepdims=True)).mean((1, 2))[0]
    np.testing.assert_allclose(maps[0], weights[4:].reshape(2, 3))
    np.testing.assert_allclose(prompt, [weights[1:4].sum()])


def test_images_of_different_classes_come_first():
    labels = np.array([0, 0, 0, 1, 1, 2])
    assert different(labels, np.arange(6), 4).tolist() == [0, 3, 5, 1]


@pytest.mark.parametrize(("name", "cells"), [("pfedpt", 2 * 2), ("vpt", 4 * 4), ("dp2fl", 4 * 4)])
def test_attention_of_a_run(finished, tmp_path, name, cells):
    folder = finished(name)
    rows = made(folder, "attention", tmp_path, Options((1,), 3))
    opened = Opened(folder)
    if name != "pfedpt":
        by_image = [[row for row in rows if row["image"] == image] for image in {row["image"] for row in rows}]
        for part in by_image:  # attention is a distribution over cls, prompts and patches
            assert 0 < sum(float(row["with"]) for row in part) + float(part[0]["attention_to_prompt"]) < 1
            assert float(part[0]["attention_to_prompt"]) > 0
    assert len(rows) == min(3, len(opened.federation.sites[1].test)) * cells
    assert {int(row["image"]) for row in rows} <= set(opened.federation.sites[1].test.tolist())
    work, params = opened.own(1)
    index = np.unique([int(row["image"]) for row in rows])
    best = opened.probabilities(work, params, opened.host.samples(index)).argmax(1)
    classes = opened.federation.dataset.classes
    expected = {str(i): classes[b] for i, b in zip(index, best, strict=True)}
    assert {row["image"]: row["predicted_with"] for row in rows} == expected
    opened.close()


# ---- pure colours


def test_pure_colours():
    colours = pure(5, (3, 4, 6))
    assert colours.shape == (5, 3, 4, 6)
    assert (colours == colours[:, :, :1, :1]).all()
    assert len(np.unique(colours[:, :, 0, 0], axis=0)) == 5
    assert pure(3, (1, 2, 2))[:, 0, 0, 0].tolist() == [0, 128, 255]


def test_features_of_pure_colours(finished, tmp_path):
    rows = made(finished("pfedpt"), "colours-tsne", tmp_path, Options((0, 2, 3), 6))
    assert list(rows[0]) == ["client", "colour", "x", "y"]
    assert [row["client"] for row in rows] == ["0"] * 6 + ["2"] * 6 + ["3"] * 6
    assert all(np.isfinite([float(row["x"]), float(row["y"])]).all() for row in rows)


def test_similarity_of_predicted_classes_and_own_labels(finished, tmp_path):
    rows = made(finished("pfedpt"), "colours-labels", tmp_path, Options(images=7))
    opened = Opened(finished("pfedpt"))
    counts = opened.federation.label_counts("train")
    mean, std = normalisation(opened.model, opened.federation.dataset, torch.device("cpu"))
    x = (torch.from_numpy(pure(7, opened.model.image)).float() - mean) / std
    own = [columns(row, "labels") for row in rows]
    for client, row in enumerate(rows):
        np.testing.assert_allclose(own[client], counts[client] / counts[client].sum())
        _, params = opened.own(client)
        canvas = opened.method.tuning.canvas(opened.model, params, torch.zeros(2))
        said = opened.model.classify(params, opened.model.features(params, x + canvas)).softmax(1).mean(0).numpy()
        np.testing.assert_allclose(columns(row, "predicted"), said, atol=1e-6)
        others = [cos(said, own[j]) for j in range(4) if j != client]
        assert float(row["similarity_own"]) == pytest.approx(cos(said, own[client]), abs=1e-5)
        assert float(row["similarity_others"]) == pytest.approx(np.mean(others), abs=1e-5)
        bare = opened.model.classify(params, opened.model.features(params, x)).softmax(1).mean(0).numpy()
        assert float(row["similarity_own_without_prompt"]) == pytest.approx(cos(bare, own[client]), abs=1e-5)
    opened.close()


# ---- what is on record


def recorded(folder: Path, out: Path) -> Path:
    """A copy of a run without models, with how far its clients moved."""
    for name in ("config.toml", "partition.json", "result.json"):
        shutil.copy(folder / name, out / name)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    moved = [
        [{"client": 0, "roles": {"private": 1.0, "body": 0.5}}, {"client": 2, "roles": {"private": 3.0, "body": 0.5}}],
        [{"client": 1, "roles": {"private": 0.5, "body": 0.25}}],
    ]
    for line, values in zip(lines, moved, strict=True):
        line["moved"] = values
    (out / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def test_drift_is_what_rounds_say(finished, tmp_path):
    folder = recorded(finished("pfedpt"), tmp_path)
    rows = made(folder, "drift", tmp_path / "analysis")
    assert list(rows[0]) == ["round", "client", "role", "moved"]
    private = [(row["round"], row["client"], float(row["moved"])) for row in rows if row["role"] == "private"]
    assert private == [("1", "0", 1.0), ("1", "2", 3.0), ("2", "1", 0.5)]
    text = json.loads((tmp_path / "analysis" / "drift.json").read_text())["text"]
    assert "private 2 in round 1, 0.5 in round 2" in text  # means
    assert len(made(folder, "drift", tmp_path / "analysis", Options((2,)))) == 2


def test_clients_of_all_stages(finished, tmp_path):
    rows = made(finished("pfedpt"), "clients", tmp_path)
    result = json.loads((finished("pfedpt") / "result.json").read_text())["clients"]
    assert {row["stage"] for row in rows} == {"aggregated", "after_local", "after_local_all"} == set(result)
    for stage, clients in result.items():
        own = [float(row["accuracy"]) for row in rows if row["stage"] == stage]
        assert own == [one["accuracy"] for one in clients]


def test_partition(finished, tmp_path):
    rows = made(finished("pfedpt"), "partition", tmp_path)
    opened = Opened(finished("pfedpt"))
    for split in ("train", "val", "test"):
        counts = np.array([int(row[split]) for row in rows]).reshape(4, 10)
        np.testing.assert_array_equal(counts, opened.federation.label_counts(split))


# ---- leakage


def uploads(folder: Path, out: Path) -> dict[int, dict[str, torch.Tensor]]:
    """What clients send in the round after the last, by the run's own engine on a copy."""
    shutil.copytree(folder, out)
    parts = build.assemble(C.make(C.read(out / "config.toml")), partition=out / "partition.json")
    state, note = unpack((out / "checkpoint.safetensors").read_bytes())
    clients = build.clients(parts, out)
    sent = {client: parts.method.down(state, client) for client in clients.ids()}
    updates, _ = clients.train(sent, note["round"] + 1, score=False)
    clients.close()
    return {update.client: update.up for update in updates}


@pytest.mark.parametrize("name", ["pfedpt", "fedavg"])
def test_leakage_is_that_of_what_is_uploaded(finished, tmp_path, name):
    rows = made(finished(name), "leakage", tmp_path / "out")
    sent = uploads(finished(name), tmp_path / "copy")
    opened = Opened(finished(name))
    data = opened.federation.dataset
    index = np.sort(np.concatenate([site.test for site in opened.federation.sites]))
    x = opened.samples(data.images[index]).images(slice(None))
    counts = opened.federation.label_counts("train")
    for row in rows:
        client = int(row["client"])
        with torch.no_grad():
            up = sent[client]
            said = opened.model.classify(up, opened.model.features(up, x)).softmax(1).numpy()
        guess = np.mean([said[data.labels[index] == c].mean(0) for c in np.unique(data.labels[index])], axis=0)
        np.testing.assert_allclose(columns(row, "upload"), guess, atol=1e-5)
        assert float(row["similarity_upload"]) == pytest.approx(cos(guess, counts[client]), abs=1e-5)
        assert float(row["similarity_uniform"]) == pytest.approx(cos(np.ones(10), counts[client]), abs=1e-6)
        same = row["similarity_complete"] == row["similarity_upload"]
        assert same is (name == "fedavg")  # which has nothing private
    opened.close()


def test_every_class_counts_alike():
    said = np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    np.testing.assert_allclose(inferred(said, np.array([3, 3, 3, 7])), [0.5, 0.5])


# ---- groups


def test_groups_of_a_run(finished, tmp_path):
    folder = finished("sgpt")
    rows = made(folder, "groups", tmp_path, Options(other=finished("sgpt-again")))
    opened = Opened(folder)
    data, keys = opened.federation.dataset, F.normalize(opened.state["keys"], dim=1)
    counts = np.zeros((5, len(data.domains)), int)
    for site in opened.federation.sites:
        x = opened.samples(data.images[site.test]).images(slice(None))
        query = opened.model.features(opened.model.weights, x)
        for group, domain in zip((query @ keys.T).argmax(1).tolist(), data.domain[site.test], strict=True):
            counts[group, domain] += 1
    assert [int(row["test_samples"]) for row in rows] == counts.ravel().tolist()
    text = json.loads((tmp_path / "groups.json").read_text())["text"]
    summary = json.loads((folder / "result.json").read_text())["metrics"]["aggregated"]["last"]
    assert f"Clustering accuracy against domains: {100 * summary['clustering']:.1f} %" in text
    assert "in sgpt-again" in text
    stability = read(tmp_path / "groups-stability.csv")
    assert [row["client"] for row in stability] == [str(client) for client in range(8)]
    assert all(0 <= float(row["kept"]) <= 1 for row in stability)
    opened.close()


def test_agreement_takes_the_best_matching_of_groups():
    a = np.array([0, 0, 0, 1, 1, 2])
    assert agreement(a, (a + 1) % 3) == 1
    assert agreement(a, np.array([1, 1, 0, 0, 0, 0])) == pytest.approx(4 / 6)


def test_other_runs_must_have_the_same_test_data(finished, tmp_path):
    with pytest.raises(UserError, match="has other test data"):
        make(finished("sgpt"), ["groups"], tmp_path, Options(other=finished("pfedpt")))


# ---- selection over rounds


def selecting(tmp_path, tables, of):
    """A folder with what clients selected, by round: tables[round][client]."""
    folder = shutil.copytree(of, tmp_path / "run")
    lines = [
        {"round": round, "aggregated": {"clients": [{"client": c, "groups": g} for c, g in chosen.items()]}}
        for round, chosen in tables.items()
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_selections_over_rounds(finished, tmp_path):
    tables = {2: {0: [4, 0, 6], 1: [3]}, 4: {0: [2, 8], 1: [0, 3]}, 6: {0: [2, 7, 1], 1: [0, 3]}}
    rows = made(selecting(tmp_path, tables, of=finished("sgpt")), "selection", tmp_path / "out")
    first = [(int(row["group"]), float(row["mean"]), float(row["std"])) for row in rows if row["client"] == "0"]
    assert first == [
        (0, pytest.approx(8 / 3), pytest.approx(np.sqrt(8 / 9))),
        (1, 5.0, pytest.approx(np.sqrt(38 / 3))),
        (2, pytest.approx(7 / 3), pytest.approx(np.sqrt(62 / 9))),
    ]
    changes = read(tmp_path / "out" / "selection-changes.csv")
    found = {(row["client"], row["round"]): float(row["changed_at_least"]) for row in changes}
    expected = {("0", "4"): 0.8, ("0", "6"): 0.1, ("1", "4"): 1.0, ("1", "6"): 0.0}
    assert found == pytest.approx(expected)  # 2 leave the first group and 6 the third; then one goes back
    assert [row["majority_group"] for row in changes] == ["1", "1", "1", "1"]
    text = json.loads((tmp_path / "out" / "selection.json").read_text())["text"]
    assert "at least 47.5 % of a client's test samples" in text
    assert "at the last one 5.0 %" in text
    assert "50 % of the clients have another group" in text


def test_selections_of_one_client_and_of_one_that_is_not_on_record(finished, tmp_path):
    folder = selecting(tmp_path, {1: {0: [4], 1: [3], 2: [1]}, 2: {0: [2, 2], 1: [3]}}, of=finished("sgpt"))
    rows = made(folder, "selection", tmp_path / "out", Options(clients=(1,)))
    assert {row["client"] for row in rows} == {"1"}
    with pytest.raises(UserError, match=r"--client = 2 must be one that was evaluated at least twice \(0, 1\)"):
        make(folder, ["selection"], tmp_path / "out", Options(clients=(2,)))


def test_what_is_recorded_of_selections_are_the_final_ones_of_the_run(finished, tmp_path):
    opened = Opened(finished("sgpt"))
    for one in opened.run.lines[-1]["aggregated"]["clients"]:
        groups = assigned(opened, *opened.own(one["client"]))
        assert one["groups"] == np.bincount(groups).tolist()
    opened.close()


# ---- who helps whom


@pytest.mark.parametrize("name", ["dp2fl", "sealed"])
def test_weights_are_those_of_the_next_round(finished, tmp_path, name):
    rows = made(finished(name), "helps", tmp_path / "out")
    opened = Opened(finished(name))
    old = {client: data_prompt(opened.method, opened.work(client).params) for client in range(4)}
    new = {client: data_prompt(opened.method, opened.trained(client)[1]) for client in range(4)}
    opened.close()
    shutil.copytree(finished(name), tmp_path / "copy")
    promptfed.run(out=tmp_path / "copy", resume=True, rounds=2)
    further = Opened(tmp_path / "copy")
    moved = False
    helped = {int(row["client"]) for row in rows}
    assert helped == {i for i, site in enumerate(further.federation.sites) if len(site.val)}
    for client in helped:
        prompt = old[client]
        weights = {int(row["helper"]): float(row["weight"]) for row in rows if int(row["client"]) == client}
        assert set(weights) == set(range(4)) > helped  # a client without validation data helps, too
        own = data_prompt(further.method, further.work(client).params)
        for key, p in prompt.items():
            expected = p + sum(weights[i] * (new[i][key] - p) for i in new)
            torch.testing.assert_close(own[key], expected, atol=1e-5, rtol=1e-4)
            moved |= not torch.equal(p, own[key])
    assert moved
    further.close()


def test_kinds_of_helpers():
    assert [kind(loss, 1.0, 1.2) for loss in (0.9, 1.0, 1.19, 1.2, np.inf)] == [
        "positive", "retained", "retained", "discarded", "discarded",
    ]  # fmt: skip


# ---- comparisons


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
            (folder / "result.json").write_text(json.dumps({"method": method, "seed": seed, **numbers}))
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
    with pytest.raises(UserError, match="do not differ in kind or size"):
        make(folder, ["sweep"])


# ---- what does not apply, and the command


@pytest.mark.parametrize(
    ("run", "name", "sentence"),
    [
        ("fedavg", "attention", 'no prompt enters the images under "fedavg"'),
        ("promptfl", "attention", 'no prompt enters the images under "promptfl"'),
        ("mixture", "attention", '"fedem.pt" mixes several models'),
        ("fedavg", "colours-tsne", "all clients have the same features"),
        ("vpt", "colours-tsne", "all clients have the same features"),
        ("mixture", "colours-tsne", "mixes several models"),
        ("fedavg", "colours-labels", "all clients have the same model"),
        ("fedavg", "drift", "eval.drift=true"),
        ("local", "leakage", "upload nothing"),
        ("pfedpt", "groups", "no groups"),
        ("pfedpt", "selection", "no selections are on record"),
        ("sgpt", "selection", "at least two evaluations"),
        ("sgpt", "helps", 'DP2FL\'s, and the run is of "sgpt"'),
        ("pfedpt", "scatter", "is an analysis of a comparison"),
        ("pfedpt", "leakag", 'did you mean "leakage"'),
    ],
)
def test_what_does_not_apply_is_said_in_a_sentence(finished, tmp_path, run, name, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        make(finished(run), [name], tmp_path)
    assert "\n" not in str(error.value)


def test_models_without_attention_or_convolutions():
    class Flat(Model):
        def features(self, weights, x, tokens=None):
            return x.flatten(1)[:, :3] * weights["body.scale"]

    model = Flat("flat", (1, 2, 2), 2, {**toy().weights, "body.scale": torch.ones(())})
    batch = Batch(torch.ones(1, 1, 2, 2), torch.tensor([0]), None, torch.zeros(2), {})
    with pytest.raises(UserError, match="neither attention nor convolutions"):
        look(Full(), model, dict(model.weights), batch, None)


def test_every_analysis_is_there():
    assert all(callable(analysis.function) for analysis in ANALYSES.values())


def test_the_command_line_starts_without_what_draws():
    code = "import sys, promptfed.analysis.command; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command(finished, tmp_path):
    app = typer.Typer()
    app.command()(analyse)
    folder = shutil.copytree(finished("fedavg"), tmp_path / "run")
    done = CliRunner().invoke(app, [str(folder), "--images", "5"])
    assert done.exit_code == 0, done.output
    assert {file.stem for file in (folder / "analysis").glob("*.png")} == {"leakage", "clients", "partition"}
    assert "attention left out: no prompt enters" in done.output
    some = CliRunner().invoke(app, [str(folder), "clients", "--client", "1", "--out", str(tmp_path / "elsewhere")])
    assert some.exit_code == 0, some.output
    assert {row["client"] for row in read(tmp_path / "elsewhere" / "clients.csv")} == {"1"}
    failed = CliRunner().invoke(app, [str(folder), "attention"])
    assert isinstance(failed.exception, UserError)


def test_contexts_are_of_evaluation(finished):
    """SGPT's features depend on the phase: analyses must see those of an evaluation."""
    opened = Opened(finished("sgpt"))
    work, params = opened.own(0)
    samples = opened.host.samples(opened.federation.sites[0].test)
    batch, ctx = next(opened.batches(work, samples))
    assert ctx.phase.name == "evaluate"
    other = context(work, Phase({"body": opened.method.sgd()}, 1), opened.model)
    tuning = opened.method.tuning
    assert not torch.equal(
        tuning.features(opened.model, params, batch, ctx), tuning.features(opened.model, params, batch, other)
    )
    opened.close()
