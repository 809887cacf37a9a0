"""What a finished run's models do on data that nobody has trained on: novel classes, other datasets, a domain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import models, scoring
from ..data import Dataset, DatasetConfig, Federation, cache, load
from ..data.held_back import novel_classes, only_classes
from ..data.images import Resize
from ..data.sources import stratified
from ..errors import UserError
from ..models import Model
from ..params import Params
from ..precision import reduced
from ..server import Line
from ..training import Samples, Work
from ..tuning import as_clip
from . import protocols
from .config import Config
from .opened import Run

Table = dict[str, Any]


def prepare(config: Config, dataset: Dataset) -> None:
    """Before the first round: fetches and decodes what will be tested on, so that a mistake costs no training."""
    for name in config.eval.datasets:
        try:
            _other(config, dataset, name)
        except UserError as error:
            raise UserError(f"eval.datasets: {error}") from None


def scores(config: Config, folder: Path, lines: Sequence[Line]) -> Table:
    """`protocols` of result.json, accuracies as fractions; empty where none is asked for. `scored` has the images of
    each column, and the accuracy of each model on them."""
    found: Table = {}
    if config.eval.leave_out:
        accuracy, images = _left_out(lines)
        found["unseen_domain"] = {"domain": config.eval.leave_out, "accuracy": accuracy}
        found["scored"] = {protocols.UNSEEN: Scored([accuracy], images)._asdict()}
    if protocols.needs_names(config.eval.model_dump()):
        run = Run(folder, device=config.engine.device)
        try:
            named = _named(run)
            return {**found, **named, "scored": {**found.get("scored", {}), **named["scored"]}}
        finally:
            run.close()
    return found


def _left_out(lines: Sequence[Line]) -> tuple[float | None, int]:
    """Of the model for clients that never train, after the last round; and the number of images."""
    for stage in ("newcomers_common", "newcomers_aggregated"):
        if stage in lines[-1]:
            summary, clients = lines[-1][stage]["summary"], lines[-1][stage]["clients"]
            return summary["local"]["weighted"], sum(client["n_test"] for client in clients)
    return None, 0


# ---- by the names of classes


class Scored(NamedTuple):
    """Models on images that nobody has trained on."""

    accuracies: list[float | None]  # of each model
    images: int

    @property
    def mean(self) -> float | None:
        known = [accuracy for accuracy in self.accuracies if accuracy is not None]
        return float(np.mean(known)) if known else None


class Trained(NamedTuple):
    """A client's model."""

    work: Work
    params: Params


def _named(run: Run) -> Table:
    evaluation = run.config.eval
    trained = list(_trained(run))
    found: Table = {}
    scored: dict[str, Scored] = {}
    if evaluation.novel:
        full = load(run.config.dataset, _resize(run.config))
        novel = novel_classes(full, evaluation.novel)
        sites = [site for i, site in enumerate(run.federation.sites) if i not in run.parts.newcomers]
        base = run.host.samples(np.concatenate([site.test for site in sites]))
        scored["base"] = _scored(run, run.model, trained, base)
        scored["novel"] = _on(run, trained, *only_classes(full, novel))
        known, new = scored["base"].mean, scored["novel"].mean
        found["base_to_novel"] = {"base": known, "novel": new, "harmonic": harmonic(known, new), "classes": list(novel)}
    if evaluation.datasets:
        each = ((name, _other(run.config, run.federation.dataset, name)) for name in evaluation.datasets)
        others = {name: _on(run, trained, data, to_test(data, evaluation.limit)) for name, data in each}
        scored |= {protocols.column(name): one for name, one in others.items()}
        found["cross_dataset"] = {name: one.mean for name, one in others.items()}
    return {**found, "scored": {column: one._asdict() for column, one in scored.items()}}


def _trained(run: Run) -> Iterator[Trained]:
    """The models of clients that were there from the start; where all have the same one, that of the first."""
    there = [client for client in range(len(run.federation.sites)) if client not in run.parts.newcomers]
    for client in there if run.method.personal else there[:1]:
        work, params = run.own(client)
        work.samples = replace(work.samples, x=work.samples.x.new_empty(0), frozen={}, views=None)  # labels are needed
        yield Trained(work, params)


def _on(run: Run, trained: Sequence[Trained], dataset: Dataset, index: np.ndarray) -> Scored:
    """Models on these images of a dataset, by the names of its classes."""
    model = as_clip(run.model).naming(dataset.classes)
    samples = replace(run.host, model=model, federation=Federation(dataset, (), {})).samples(index)
    return _scored(run, model, trained, samples)


def _scored(run: Run, model: Model, trained: Sequence[Trained], samples: Samples) -> Scored:
    with reduced(run.host.device, run.host.precision):
        each = [scoring.evaluate(run.method, model, *one, samples) for one in trained]
    return Scored([score.accuracy for score in each], each[0].n)


def _other(config: Config, dataset: Dataset, name: str) -> Dataset:
    """Another dataset, with images as those of the run's."""
    shape = dataset.images.shape[1:]
    given = {} if cache.holds(Path(name).expanduser()) else {"size": shape[1], "channels": shape[0]}
    found = load(DatasetConfig.model_validate({"name": name, **given}), _resize(config))
    if found.images.shape[1:] != shape:  # it was decoded before
        raise UserError(f'"{name}" has images of {found.images.shape[1:]}, not {shape} as "{dataset.name}"')
    return found


def _resize(config: Config) -> Resize | None:
    return models.resize(config.backbone.name)


def to_test(dataset: Dataset, limit: int | None) -> np.ndarray:
    """Its test images where its source has some, all of it where not; no more than `limit` of them."""
    test = np.flatnonzero(dataset.split == 2) if dataset.split is not None else np.zeros(0, np.int64)
    found = test if len(test) else np.arange(len(dataset))
    return found[stratified(dataset.labels[found], limit)] if limit else found


def harmonic(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return 2 * a * b / (a + b) if a + b else 0.0
