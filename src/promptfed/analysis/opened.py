"""A finished run as analyses look at it: clients' models, their features and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import server
from ..clients.frozen import normalisation
from ..errors import UserError
from ..methods import layers
from ..methods.fedem import Mixture
from ..models import Model
from ..params import Params
from ..phases import Batch, Context
from ..report.marks import client_names
from ..report.numbers import thin
from ..runs.opened import Run
from ..training import Samples, Work, chunks, context
from ..tuning import PrivatePrompt, Tuning, Wrapper
from ..tunings.heads import scaled
from . import Options

MOST = 10  # clients that are looked at unless some are named


class Bare(Wrapper):
    """Another tuning without what enters the image or the layers: its head, on features of the image alone."""

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return scaled(params, model.features({**model.weights, **params}, batch.x))


def unprompted(tuning: Tuning) -> Tuning:
    """A tuning without its private prompts: what remains of it where these are not known."""
    if isinstance(tuning, PrivatePrompt):
        return unprompted(tuning.inner)
    return tuning.model_copy(update={"inner": unprompted(tuning.inner)}) if isinstance(tuning, Wrapper) else tuning


class Opened(Run):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if not self.settings:
            if any(folder.glob("*/config.toml")):
                raise UserError(f'no run of the comparison in "{folder}" is finished: none has a result.json')
            raise UserError(f'"{folder}" holds neither a run nor a comparison')
        if self.result is None:
            raise UserError(f'the run in "{folder}" is not finished: it has no result.json')

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
        return list(options.clients) or (able if options.everyone else thin(able, most))

    def after_local(self, client: int) -> tuple[Work, Params]:
        """The client, and its parameters after one more round of local training, which is sent to nobody."""
        work = self.work(client)
        done = self.continued(work, self.method.schedule(self.as_of))
        ctx = context(work, self.model, stats=done.stats)
        with torch.no_grad():
            return work, self.method.finish(done.params, ctx)

    # ---- predictions

    def pixels(self, images: np.ndarray) -> Samples:
        """Images (n, C, H, W) uint8, without labels."""
        mean, std = normalisation(self.model, self.federation.dataset, self.host.device)
        x = torch.from_numpy(np.array(images)).to(self.host.device)
        return Samples(x, torch.zeros(len(x), dtype=torch.int64, device=x.device), mean, std)

    def samples(self, images: np.ndarray) -> Samples:
        """Images (n, C, H, W) uint8 that are in no dataset, with the outputs of frozen layers."""
        found = self.pixels(images)
        if not self.method.tuning.frozen_name(self.model):
            return found
        with torch.no_grad():
            parts = [self.method.tuning.frozen(self.model, batch.x) for batch in chunks(found)]
        return replace(found, frozen={name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def batches(self, work: Work, samples: Samples) -> Iterator[tuple[Batch, Context]]:
        ctx = context(work, self.model)
        for batch in chunks(samples):
            yield batch, ctx

    def features(self, work: Work, params: Params, samples: Samples, tuning: Tuning | None = None) -> np.ndarray:
        """(n, d)"""
        if self.mixes:
            raise UserError(f'"{self.config.method.name}" mixes several models, each with features of its own')
        return self._outputs((tuning or self.method.tuning).features, work, params, samples).cpu().numpy()

    def probabilities(self, work: Work, params: Params, samples: Samples, tuning: Tuning | None = None) -> np.ndarray:
        """(n, classes)"""
        logits = self._outputs((tuning or self.method.tuning).logits, work, params, samples)
        return logits.softmax(1).double().cpu().numpy()

    def _outputs(self, of: Callable[..., Tensor], work: Work, params: Params, samples: Samples) -> Tensor:
        with torch.no_grad():
            return torch.cat([of(self.model, params, batch, ctx) for batch, ctx in self.batches(work, samples)])

    def bare(self, work: Work, params: Params) -> Tuning | None:
        """The client's tuning without prompts; None where none enters the images."""
        probe = replace(self.samples(self.federation.dataset.images[:2]), frozen={})
        bare = Bare(inner=self.method.tuning)
        if self.mixes or np.allclose(self.features(work, params, probe), self.features(work, params, probe, bare)):
            return None
        return bare

    @property
    def mixes(self) -> bool:
        """Whether predictions come from several models at once."""
        return any(isinstance(layer, Mixture) for layer in layers(self.method.tuning))

    def names(self, clients: Sequence[int]) -> list[str]:
        return client_names([self.name(client) for client in clients], clients)
