"""FedPHA: a shared context of one length, and contexts of the clients' own whose lengths differ.

Fang et al., "FedPHA: Federated Prompt Learning for Heterogeneous Client Adaptation" (ICML 2025).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .. import Batch, Context, Model, Params, State, UserError
from ..models.base import normal
from ..seeding import torch_rng
from ..tuning import as_clip
from .moon import contrast
from .promptfolio import Portfolio
from .text_prompts import TwoContextsMethod


class Lengths(Portfolio):
    """Text features are a mixture of both contexts', as of PromptFolio."""

    role_words: ClassVar[dict[str, str]] = {"body": "text context", "own": "text context of another length"}

    own_share: float = Field(0.5, ge=0, le=1, description="share of the client's own text features")
    lengths: tuple[int, ...] = Field(
        (4, 8, 16), description="numbers of vectors of the clients' own contexts: the clients take them in turn"
    )

    @model_validator(mode="after")
    def _have_vectors(self) -> Lengths:
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(f"method.lengths = {list(self.lengths)} must be one or more numbers from 1 on")
        return self

    def check(self, model: Model) -> None:
        for length in (self.context, *self.lengths):
            self.sentences(model, length)

    def init(self, model: Model, seed: int) -> Params:
        """The own context has the largest length; a client takes the first of its vectors."""
        own = normal(torch_rng(seed, "own context"), max(self.lengths), as_clip(model).text_width)
        return {**super().init(model, seed), "own": own}


class FedPha(TwoContextsMethod):
    """The own context's features are drawn to those of the projected shared context, and away from those of the
    shared context as it is."""

    paper = "Fang et al., ICML 2025"
    tuned = Lengths

    tuning: Lengths = Field(default_factory=Lengths, description="what is trained")
    mu: float = Field(1.0, ge=0, description="weight of the alignment")
    temperature: float = Field(0.5, gt=0, description="temperature of the alignment")
    removed: float = Field(
        0.8, gt=0, le=1, description="share of the own context's main directions that the projection removes"
    )

    def down(self, state: State, client: int) -> Params:
        lengths = self.tuning.lengths
        return {**super().down(state, client), "length": torch.tensor(lengths[client % len(lengths)])}

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        own = init["own"][: int(down["length"])]
        return super().start({**init, "own": own}, down, private, memory)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        task, stats = super().loss(model, params, batch, ctx)
        with torch.no_grad():
            shared = self.tuning.text_of(model, params["context"])
            useful = self.tuning.text_of(model, project(params["context"], params["own"], self.removed))
        own = self.tuning.text_of(model, params["own"])
        return task + self.mu * contrast(own, useful, shared, self.temperature).mean(), stats


def project(shared: Tensor, own: Tensor, removed: float) -> Tensor:
    """(L, width): the shared context without its part in the span of the own one's leading right singular vectors."""
    main: Tensor = torch.linalg.svd(own, full_matrices=False).Vh[: math.ceil(removed * len(own))]
    return shared - shared @ main.T @ main
