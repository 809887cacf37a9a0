"""FedPGP: each client adapts the shared context by a matrix of low rank of its own.

Cui et al., "Harmonizing Generalization and Personalization in Federated Prompt Learning" (ICML 2024).
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, State
from ..models.base import normal
from ..seeding import torch_rng
from ..tuning import as_clip
from ..tunings.text import TextContext
from .moon import contrast
from .text_prompts import TextMethod


class LowRank(TextContext):
    """The client's context is p + U V, with p (L, width) shared, U (L, rank) and V (rank, width) its own."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "own.": "own"}
    about = "shared text context + own low-rank change"
    role_words: ClassVar[dict[str, str]] = {"body": "text context", "own": "low-rank update of the context"}

    rank: int = Field(8, ge=1, description="rank of the client's own change of the context (b)")

    def init(self, model: Model, seed: int) -> Params:
        v = normal(torch_rng(seed, "low rank"), self.rank, as_clip(model).text_width)
        return {**super().init(model, seed), "own.u": torch.zeros(self.context, self.rank), "own.v": v}

    def text(self, model: Model, params: Params) -> Tensor:
        return self.text_of(model, params["context"] + params["own.u"] @ params["own.v"])


class FedPgp(TextMethod):
    """Features of the shared context are drawn to the zero-shot ones and away from the client's own."""

    paper = "Cui et al., ICML 2024"
    tuned = LowRank
    private = ("own",)

    tuning: LowRank = Field(default_factory=LowRank, description="what is trained")
    mu: float = Field(1.0, ge=0, description="weight of the contrastive term")
    temperature: float = Field(0.5, gt=0, description="temperature of the contrastive term")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        clip = as_clip(model)
        shared, own = self.tuning.text_of(model, params["context"]), self.tuning.text(model, params)
        logits = clip.logits(model.weights, self.tuning.features(model, params, batch, ctx), own)
        term = contrast(shared, clip.zero_shot(model.weights), own, self.temperature)  # (classes,)
        task = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        return task + self.mu * term.mean(), {}

    def common(self, state: State) -> Params:
        """The shared context, unchanged."""
        length, width = state["context"].shape
        none = {"own.u": (length, self.tuning.rank), "own.v": (self.tuning.rank, width)}
        return {**self.down(state, client=0), **{name: torch.zeros(shape) for name, shape in none.items()}}
