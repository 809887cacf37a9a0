"""Protocols: models on classes, datasets and domains that nobody has trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from promptfed import Dataset, UserError, compare, methods, run
from promptfed.data import shapes
from promptfed.data.held_back import check_named, federate_named, leave_out, novel_classes, without_classes
from promptfed.data.partitions import Domain, Iid
from promptfed.errors import Unsuited
from promptfed.models import CLIP, Model, build
from promptfed.report.page import write
from promptfed.runs import build as B
from promptfed.runs import config as C
from promptfed.runs import unseen
from promptfed.runs.api import Result
from promptfed.runs.opened import Run
from promptfed.runs.protocols import PROTOCOLS, accuracies, served
from promptfed.runs.shown import across
from promptfed.runs.tables import ONE_SEED_UNSEEN, differences, generalisation, table
from promptfed.runs.unseen import harmonic
from promptfed.search.workers import as_trial

SMALL: dict[str, Any] = {"rounds": 1, "engine": {"workers": 1}, "progress": False}
SHAPES: dict[str, Any] = {"partition": {"name": "iid", "clients": 2}, "backbone": "clip-mini", **SMALL}


def drawn(folder: Path, name: str, labels: np.ndarray, classes: tuple[str, ...]) -> Dataset:
    """Pictures of shapes; labels are indices into the classes."""
    kinds, _, pictures = shapes.sample(256, seed=1)
    of_kind = {name: iter(np.flatnonzero(kinds == kind)) for kind, name in enumerate(shapes.SHAPES)}
    chosen = [next(of_kind[classes[label]]) for label in labels]
    return Dataset.from_arrays(name, pictures[chosen], labels, classes, path=folder / name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return drawn(tmp_path_factory.mktemp("data"), "all", np.arange(192) % 16, shapes.SHAPES)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Another dataset, with class names of its own."""
    return drawn(tmp_path_factory.mktemp("data"), "other", np.arange(30) % 3, ("heart", "moon", "star"))


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three domains of 20 images and two classes."""
    g = np.random.default_rng(0)
    images, domain = g.integers(0, 256, (60, 3, 32, 32), np.uint8), np.arange(60) % 3
    names, path = ("ink", "oil", "pen"), tmp_path_factory.mktemp("data") / "domains"
    return Dataset.from_arrays(
        "drawn", images, g.integers(0, 2, 60), ("cat", "dog"), domains=names, domain=domain, path=path
    )


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory, data: Dataset, other: Dataset) -> Result:
    """Two clients with contexts of their own, half of the classes held back."""
    method = {"name": "promptfolio", "context": 3, "epochs": 1}
    asked = {"novel": 0.5, "datasets": [str(other.path)]}
    return run(method=method, dataset=data, eval=asked, out=tmp_path_factory.mktemp("run") / "personal", **SHAPES)


# ---- classes that are held back


def test_a_share_holds_back_the_last_classes(data: Dataset) -> None:
    assert novel_classes(data, 0.25) == data.classes[12:]
    assert novel_classes(data, ("star", "circle")) == ("circle", "star")


@pytest.mark.parametrize(
    ("novel", "says"),
    [
        (0.01, "holds back 0 of the 16 classes"),
        (("star",), "holds back 1 of the 16 classes"),
        (0.95, "and 2 must remain"),
        (("star", "hart"), 'eval.novel = "hart" is unknown; did you mean "heart"'),
    ],
)
def test_classes_that_cannot_be_held_back(data: Dataset, novel: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        novel_classes(data, novel)


def test_no_client_holds_images_of_novel_classes(data: Dataset) -> None:
    base = without_classes(data, ("circle", "bolt"))
    federation = federate_named(base, Iid(clients=3), seed=0)
    held = np.concatenate([np.concatenate([s.train, s.val, s.test]) for s in federation.sites])
    assert len(held) == len(data) * 14 // 16
    assert [base.classes[label] for label in base.labels[held]] == [data.classes[label] for label in data.labels[held]]
    assert "circle" not in base.classes


def test_a_split_that_holds_novel_classes_is_refused(data: Dataset) -> None:
    base = without_classes(data, ("circle", "bolt"))
    whole = federate_named(data, Iid(clients=2), seed=0)
    with pytest.raises(UserError, match=r'eval.novel: "split.json" gives client "client-0" images of classes'):
        check_named(replace(whole, dataset=base), "split.json")


# ---- by names


def scaled(model: Model, images: np.ndarray) -> torch.Tensor:
    assert model.preprocess
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (model.preprocess.mean, model.preprocess.std))
    return (torch.from_numpy(np.array(images)).float() / 255 - mean) / std


def zero_shot(names: tuple[str, ...], images: np.ndarray, labels: np.ndarray) -> float:
    """The accuracy of clip-mini without any prompt."""
    model = build("clip-mini", (3, 32, 32), len(names), 0, names)
    assert isinstance(model, CLIP)
    with torch.no_grad():
        found = model.classify(model.weights, model.features(model.weights, scaled(model, images))).argmax(1).numpy()
    return float((found == labels).mean())


def test_untrained_models_are_scored_by_the_names_of_the_classes(tmp_path: Path, data: Dataset, other: Dataset) -> None:
    novel = ("bolt", "circle", "drop", "star")
    asked = {"novel": novel, "datasets": [str(other.path)]}
    found = run(method="zero-shot", dataset=data, eval=asked, out=tmp_path / "run", **SHAPES).numbers
    told = found["protocols"]
    at = np.flatnonzero(np.isin(data.labels, [data.classes.index(name) for name in novel]))
    names = tuple(name for name in data.classes if name in novel)
    labels = np.array([names.index(data.classes[label]) for label in data.labels[at]])
    assert told["base_to_novel"]["novel"] == pytest.approx(zero_shot(names, data.images[at], labels))
    assert told["base_to_novel"]["base"] == pytest.approx(found["metrics"]["aggregated"]["last"]["global"])
    expected = zero_shot(other.classes, other.images, other.labels)
    assert told["cross_dataset"] == {str(other.path): pytest.approx(expected)}
    assert found["dataset"]["classes"] == 12


def test_other_datasets_may_be_limited(tmp_path: Path, data: Dataset, other: Dataset) -> None:
    asked = {"datasets": [str(other.path)], "limit": 6}
    found = run(method="zero-shot", dataset=data, eval=asked, out=tmp_path / "run", **SHAPES).numbers
    at = unseen.to_test(other, 6)
    assert np.bincount(other.labels[at]).tolist() == [2, 2, 2]
    expected = zero_shot(other.classes, other.images[at], other.labels[at])
    assert found["protocols"]["cross_dataset"] == {str(other.path): pytest.approx(expected)}


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"^eval.limit = 5 needs eval.datasets: the datasets whose images it limits$"):
        C.make({"method": "promptfl", "eval": {"limit": 5}})


def test_trials_test_on_no_other_dataset() -> None:
    config = C.make({"method": "promptfl", "eval": {"datasets": ["digits"], "limit": 5}})
    assert as_trial(config, every=1).eval.datasets == ()


def test_a_limit_takes_test_images_only(other: Dataset) -> None:
    split = np.where(np.arange(30) < 12, 2, 0)
    divided = replace(other, split=split)
    assert unseen.to_test(divided, None).tolist() == list(range(12))
    limited = unseen.to_test(divided, 6)
    assert len(limited) == 6
    assert set(limited) < set(range(12))
    assert unseen.to_test(divided, 100).tolist() == list(range(12))


def test_own_models_are_averaged(personal: Result, data: Dataset) -> None:
    told = personal.numbers["protocols"]["base_to_novel"]
    assert told["base"] == pytest.approx(personal.metrics["global"])  # each client's model on all clients' test data
    assert told["harmonic"] == pytest.approx(2 / (1 / told["base"] + 1 / told["novel"]))
    assert told["classes"] == list(data.classes[8:])
    at = np.flatnonzero(data.labels >= 8)
    model = build("clip-mini", (3, 32, 32), 8, 0, data.classes[8:])
    opened, hits = Run(personal.folder), []
    with torch.no_grad():
        features = model.features(model.weights, scaled(model, data.images[at]))
        for client in range(2):
            logits = opened.method.tuning.head(model, opened.params(client), features)
            hits.append(float((logits.argmax(1).numpy() == data.labels[at] - 8).mean()))
    opened.close()
    assert told["novel"] == pytest.approx(np.mean(hits))
    scored = personal.numbers["protocols"]["scored"]
    assert scored["novel"] == {"accuracies": pytest.approx(hits), "images": len(at)}
    tests = sum(site["n_test"] for site in personal.numbers["sites"])
    assert {column: one["images"] for column, one in scored.items()} == {"base": tests, "novel": len(at), "other": 30}


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        ("fedamp+promptfl", "fp32"),
        ("fedamp+promptfl+ft", "fp32"),
        pytest.param("promptfolio+ft", "bf16", marks=pytest.mark.slow),
    ],
)
def test_models_are_those_that_evaluations_score(method: str, precision: str, data: Dataset, tmp_path: Path) -> None:
    """Also of a method whose clients start training elsewhere."""
    settings = SHAPES | {"partition": {"name": "iid", "clients": 4}, "fraction": 0.5}
    settings["engine"] = {"workers": 1, "precision": precision}
    own = {"name": method, "epochs": 1, "lr": 2.0}
    found = run(method=own, dataset=data, eval={"novel": 0.5}, out=tmp_path / "run", **settings)
    assert found.numbers["protocols"]["base_to_novel"]["base"] == pytest.approx(found.metrics["global"])


def test_a_worker_trains_on_base_classes_only(personal: Result, data: Dataset) -> None:
    opened = Run(personal.folder)
    host = B.host_from(B.describe(opened.parts, personal.folder))
    assert host.federation.dataset.classes == data.classes[:8]
    held = np.concatenate([site.train for site in host.federation.sites])
    assert host.federation.dataset.labels[held].max() == 7
    host.close()


def test_tables_and_report_show_it(personal: Result, tmp_path: Path) -> None:
    heads = accuracies(personal.numbers)
    assert list(heads) == ["base", "novel", "H", "other"]
    page = write([personal.folder], tmp_path / "report.html").read_text()
    assert all(f">{head.capitalize()}" in page for head in heads)
    assert f"{100 * (heads['novel'] or 0):.1f}" in page


def test_differences_on_unseen_data_are_told(personal: Result, data: Dataset, other: Dataset, tmp_path: Path) -> None:
    asked = {"novel": 0.5, "datasets": [str(other.path)]}
    bare = run(method="zero-shot", dataset=data, eval=asked, out=tmp_path / "bare", **SHAPES)
    rows = table({"PromptFolio": [personal], "zero-shot": [bare]}, against="zero-shot")
    (sheet,) = differences(rows)
    ours, theirs = accuracies(personal.numbers), accuracies(bare.numbers)
    unseen = {line[1]: line for line in sheet.lines if line[1] in ours}
    assert list(unseen) == ["base", "novel", "H", "other"]
    for column, line in unseen.items():
        assert line[2] == f"{100 * ((ours[column] or 0) - (theirs[column] or 0)):+.1f}".replace("-0.0", "+0.0")
        assert line[3].startswith("[")
    assert "kind that was trained on" not in sheet.title
    page = write([personal.folder, bare.folder], tmp_path / "report.html", against="zero-shot").read_text()
    for line in unseen.values():
        assert f'<br><span class="std">{line[2]} {line[3]} {line[4]}</span>' in page
    assert ONE_SEED_UNSEEN in page


def test_harmonic_mean() -> None:
    assert harmonic(0.5, 1.0) == pytest.approx(2 / 3)
    assert harmonic(0.0, 0.0) == 0.0
    assert harmonic(None, 1.0) is None


# ---- a domain that is left out


def test_clients_of_the_domain_are_tested_on_all_their_images(domains: Dataset) -> None:
    drawn = federate_named(domains, Domain(clients=4), seed=0)
    held = leave_out(drawn, "ink")
    assert [len(site.train) for site in held.sites][:2] == [0, 0]
    assert sum(len(site.test) for site in held.sites[:2]) == 20
    assert held.sites[2:] == drawn.sites[2:]


def test_a_method_without_a_model_for_newcomers_is_left_out(domains: Dataset, tmp_path: Path) -> None:
    settings = {"dataset": domains, "partition": "domain", "join": {"clients": 1}, "method": {"epochs": 1}}
    with pytest.warns(
        UserWarning, match='left out of the comparison: join.round = 0: "local" has no model for a client'
    ):
        found = compare(methods=["fedavg", "local"], out=tmp_path / "table", **settings, **SMALL)
    assert list(found) == ["fedavg"]
    assert found.table[0]["newcomers"] is not None


def test_each_domain_is_a_column(domains: Dataset, tmp_path: Path) -> None:
    settings = {"dataset": domains, "partition": "domain", "eval": {"leave_out": "each"}, "method": {"epochs": 1}}
    with pytest.warns(UserWarning, match='left out of the comparison: eval.leave_out: "local" cannot serve') as told:
        found = compare(methods=["fedavg", "local"], out=tmp_path / "table", **settings, **SMALL)
    assert len([one for one in told if "left out" in str(one.message)]) == 1  # not once per domain
    assert list(found) == ["fedavg, ink", "fedavg, oil", "fedavg, pen"]
    each = []
    for name, (result,) in found.items():
        stage = result.numbers["metrics"]["newcomers_aggregated"]["last"]
        told_domain = result.numbers["protocols"]["unseen_domain"]
        assert told_domain == {"domain": name.removeprefix("fedavg, "), "accuracy": stage["local"]["mean"]}
        (own,) = result.numbers["clients"]["newcomers_aggregated"]
        assert own["n_test"] == 20
        scored = {"accuracies": [told_domain["accuracy"]], "images": 20}
        assert result.numbers["protocols"]["scored"] == {"unseen": scored}
        assert Run(result.folder).late == {own["client"]}
        each.append(told_domain["accuracy"])
    heads, line = across(found.table, "unseen")
    assert heads == ("method", "ink", "oil", "pen", "mean")
    assert line == ("fedavg", *(f"{100 * one:.1f}" for one in (*each, np.mean(each))))
    assert "domain that is left out" in (tmp_path / "table" / "table.md").read_text()
    assert "Accuracy on the domain left out" in write([tmp_path / "table"], tmp_path / "report.html").read_text()


def test_an_unseen_domain_is_compared_once(domains: Dataset, tmp_path: Path) -> None:
    """Over its images; over seeds alone, as other newcomers, it would be told apart too easily."""
    settings = {"dataset": domains, "partition": "domain", "eval": {"leave_out": "oil"}, "method": {"epochs": 1}}
    names, seeds = ["fedavg", "fedprox"], [0, 1]
    found = compare(methods=names, seeds=seeds, out=tmp_path / "table", against="fedavg", **settings, **SMALL)
    (sheet,) = differences(found.table)
    assert [line[1] for line in sheet.lines] == ["global", "unseen"]
    assert "also over test images" in sheet.title


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"eval": {"novel": 1.0}}, "eval.novel = 1.0 must be a share between 0 and 1"),
        (
            {"eval": {"leave_out": "ink"}, "method": "fedavg"},
            'eval.leave_out = "ink" needs partition.name = "domain", not "dirichlet"',
        ),
        ({"partition": "domain", "eval": {"leave_out": "each"}, "method": "fedavg"}, "is one run per domain"),
        (
            {"partition": "domain", "eval": {"leave_out": "ink"}, "join": {"clients": 1}, "method": "fedavg"},
            "cannot both be given",
        ),
    ],
)
def test_mistakes(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        C.make(settings)


def test_names_may_be_separated_by_commas() -> None:
    found = C.make(C.parse_assignments(["eval.novel=star, bolt", "eval.datasets=digits", "method=promptfl"]))
    assert found.eval.novel == ("star", "bolt")
    assert found.eval.datasets == ("digits",)
    assert found.backbone.name == "clip-mini"
    assert C.make(C.tomllib.loads(C.dump(found.complete()))).eval == found.eval


@pytest.mark.parametrize("name", ["fedvpt", "head-tune", "fedper", "pfedpg", "class-mean"])
def test_methods_with_values_for_each_class_cannot_name_others(name: str) -> None:
    with pytest.raises(
        Unsuited, match=f'eval.novel: "{name}" cannot serve base-to-novel: it has values for each class'
    ):
        C.make({"method": name, "eval": {"novel": 0.5}})


def test_names_need_a_clip(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'backbone.name = "cnn" cannot name the classes .* a CLIP is needed'):
        run(method="fedavg", backbone="cnn", eval={"novel": 0.5}, out=tmp_path / "run", **SMALL)


def test_a_dataset_that_is_not_there_is_told_before_training(tmp_path: Path, data: Dataset) -> None:
    with pytest.raises(UserError, match=r'eval.datasets: dataset.name = "digit" is unknown; did you mean "digits"'):
        run(method="zero-shot", dataset=data, eval={"datasets": ["digit"]}, out=tmp_path / "run", **SHAPES)
    assert not (tmp_path / "run").exists()


def test_which_methods_serve_which_protocol() -> None:
    assert served(methods.create("promptfl")) == ["newcomers", "unseen-domain", "base-to-novel", "cross-dataset"]
    assert served(methods.create("fedvpt")) == ["newcomers", "unseen-domain"]
    assert served(methods.create("pfedpg")) == []
    assert served(methods.create("local+promptfl")) == ["base-to-novel", "cross-dataset"]
    assert all(one.about and one.columns for one in PROTOCOLS.values())


def test_a_comparison_without_protocols_has_no_such_table() -> None:
    assert generalisation([{"label": "fedavg"}]) == []
    assert json.dumps(accuracies({})) == "{}"
