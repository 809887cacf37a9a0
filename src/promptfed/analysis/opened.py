"""A finished run or a comparison as analyses look at it: clients' models, their features and predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import server
from ..clients.frozen import normalisation
from ..errors import UserError
from ..methods import peel
from ..methods.fedem import Mixture
from ..models import Model
from ..params import Params
from ..phases import Batch, Context, Phase
from ..runs import build, comparison
from ..runs.opened import Run
from ..training import Samples, Work, chunks, context, train
from ..tuning import PrivatePrompt, Tuning, Wrapper
from ..tunings.heads import scaled
from .base import Options

MOST = 10  # clients that are looked at unless some are named


class Bare(Tuning):
    """Another tuning without what enters the image or the layers: its head, on features of the image alone."""

    of: Tuning

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return scaled(params, model.features({**model.weights, **params}, batch.x))

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.of.head(model, params, features)


def unprompted(tuning: Tuning) -> Tuning:
    """A tuning without its private prompts: what remains of it where these are not known."""
    if isinstance(tuning, PrivatePrompt):
        return unprompted(tuning.inner)
    return tuning.model_copy(update={"inner": unprompted(tuning.inner)}) if isinstance(tuning, Wrapper) else tuning


class Opened(Run):
    """A finished run as analyses look at it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if not self.settings:
            if any(folder.glob("*/config.toml")):
                raise UserError(f'no run of the comparison in "{folder}" is finished: none has a result.json')
            raise UserError(f'"{folder}" holds neither a run nor a comparison')

    @cached_property
    def parts(self) -> build.Parts:
        if self.result is None:
            raise UserError(f'the run in "{self.folder}" is not finished: it has no result.json')
        return super().parts

    # ---- clients

    def chosen(self, options: Options, having: str = "train", most: int = MOST) -> list[int]:
        """The clients asked for; otherwise some of those that have a model, and samples in that split."""
        join = self.config.join.round
        plan = server.Plan(self.config.rounds, 1.0, 0, newcomers=self.parts.newcomers, join_round=join)
        ids = range(len(self.federation.sites))
        able = [
            client
            for client in plan.serve(self.method, ids, self.round)
            if len(getattr(self.federation.sites[client], having))
        ]
        words = {"train": "training data", "test": "test data"}[having]
        for client in options.clients:
            if client not in able:
                known = f"0 to {len(ids) - 1}" if client not in ids else f"one with a model and {words}"
                raise UserError(f"--client = {client} must be {known}")
        if not able:
            raise UserError(f"no client has a model and {words}")
        return list(options.clients) or some(able, most)

    def own(self, client: int) -> tuple[Work, Params]:
        """The client, and the parameters of its evaluation: adapted, where the method adapts."""
        work = self.work(client)
        return work, self._trained(work, self.method.adapt()).params if self.method.adapt() else work.params

    def after_local(self, client: int) -> tuple[Work, Params]:
        """The client, and its parameters after one more round of local training, which is sent to nobody."""
        work = self.work(client)
        done = self._trained(work, self.method.schedule(self.as_of))
        ctx = context(work, self.model, stats=done.stats)
        with torch.no_grad():
            return work, self.method.finish(done.params, ctx)

    def _trained(self, work: Work, phases: Sequence[Phase]) -> Any:
        return train(self.method, self.model, [work], phases, self.config.seed, self.as_of)[0]

    # ---- predictions

    def samples(self, images: np.ndarray) -> Samples:
        """Images (n, C, H, W) uint8 that are in no dataset, with the outputs of frozen layers."""
        mean, std = normalisation(self.model, self.federation.dataset, self.host.device)
        x = torch.from_numpy(np.array(images)).to(self.host.device)
        nothing = Samples(x, torch.zeros(len(x), dtype=torch.int64, device=x.device), mean, std)
        if not self.method.tuning.frozen_name(self.model):
            return nothing
        with torch.no_grad():
            parts = [self.method.tuning.frozen(self.model, batch.x) for batch in chunks(nothing)]
        frozen = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Samples(x, nothing.y, mean, std, frozen)

    def batches(self, work: Work, samples: Samples) -> Iterator[tuple[Batch, Context]]:
        ctx = context(work, self.model)
        for batch in chunks(samples):
            yield batch, ctx

    def features(self, work: Work, params: Params, samples: Samples, tuning: Tuning | None = None) -> np.ndarray:
        """(n, d)"""
        tuning = tuning or self.method.tuning
        if self.mixes:
            raise UserError(f'"{self.config.method.name}" mixes several models, each with features of its own')
        with torch.no_grad():
            found = [tuning.features(self.model, params, batch, ctx) for batch, ctx in self.batches(work, samples)]
        return torch.cat(found).cpu().numpy()

    def bare(self, work: Work, params: Params) -> Tuning | None:
        """The client's tuning without prompts; None where none enters the images."""
        probe = replace(self.samples(self.federation.dataset.images[:2]), frozen={})
        bare = Bare(of=self.method.tuning)
        if self.mixes or np.allclose(self.features(work, params, probe), self.features(work, params, probe, bare)):
            return None
        return bare

    @property
    def mixes(self) -> bool:
        """Whether predictions come from several models at once."""
        return any(isinstance(layer, Mixture) for layer in peel(self.method.tuning)[0])

    def probabilities(self, work: Work, params: Params, samples: Samples, tuning: Tuning | None = None) -> np.ndarray:
        """(n, classes)"""
        tuning = tuning or self.method.tuning
        with torch.no_grad():
            found = [tuning.logits(self.model, params, batch, ctx) for batch, ctx in self.batches(work, samples)]
        return torch.cat(found).softmax(1).double().cpu().numpy()

    def label_shares(self) -> np.ndarray:
        """Each client's label distribution in training, (clients, classes); zero where there is nothing."""
        counts = self.federation.label_counts("train")
        return np.asarray(counts / counts.sum(1, keepdims=True).clip(1))

    def names(self, clients: Sequence[int]) -> list[str]:
        """Their names, or numbers where they have no names of their own."""
        names = [self.name(client) for client in clients]
        if all(name == f"client-{client}" for name, client in zip(names, clients, strict=True)):
            return [str(client) for client in clients]
        return [name if len(name) <= 18 else f"{name[:17]}…" for name in names]


def some(clients: Sequence[int], most: int) -> list[int]:
    """At most so many, from first to last."""
    at = np.linspace(0, len(clients) - 1, min(most, len(clients))).round().astype(int)
    return [clients[i] for i in at]


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the rows of a (n, d) with those of b (m, d): (n, m). Zero with a row of zeros."""
    return np.asarray(_unit(a) @ _unit(b).T)


def _unit(rows: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norm > 0, norm, 1))


# ---- comparisons


@dataclass(frozen=True)
class One:
    """A finished run of a comparison."""

    label: str
    run: Run

    @property
    def numbers(self) -> dict[str, Any]:
        return self.run.result or {}


@dataclass(frozen=True)
class Comparison:
    folder: Path
    runs: list[One]

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """All finished runs below the folder, by their labels in its table."""
        file = folder / "table.json"
        try:
            rows = json.loads(file.read_text()) if file.exists() else []
            labels = {comparison.Row(row["label"], {}, ()).slug: row["label"] for row in rows}
        except (ValueError, TypeError, KeyError):
            raise UserError(f'"{file}" is not the table of a comparison; repeat the command that wrote it') from None
        order = list(labels)
        found = []
        for result in sorted(folder.glob("*/result.json")):
            slug = result.parent.name.rsplit("-seed", 1)[0]
            label = labels.get(slug, slug)
            found.append(One(label, Run(result.parent)))
        places = {labels[slug]: i for i, slug in enumerate(order)}
        return cls(folder, sorted(found, key=lambda one: places.get(one.label, len(places))))

    @property
    def setting(self) -> str:
        settings = list(dict.fromkeys(one.run.setting for one in self.runs))
        return settings[0] if len(settings) == 1 else self.folder.name

    def close(self) -> None:
        """Nothing is open."""
