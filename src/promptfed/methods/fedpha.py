"""FedPHA: a shared context of one length, and contexts of the clients' own whose lengths differ.

Fang et al., "FedPHA: Federated Prompt Learning for Heterogeneous Client Adaptation" (ICML 2025).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, State, UserError
from ..models.base import normal
from ..seeding import torch_rng
from ..tuning import as_clip
from .text_prompts import TwoContexts, TwoContextsMethod


class Lengths(TwoContexts):
    """A client predicts with its own context alone."""

    role_words: ClassVar[dict[str, str]] = {"body": "text context", "own": "text context of another length"}

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

    def text(self, model: Model, params: Params) -> Tensor:
        return self.text_of(model, params["own"])


class FedPha(TwoContextsMethod):
    """Each context is trained to predict. The own one's features are drawn to those of its projection, and kept away
    from those of the shared one."""

    paper = "Fang et al., ICML 2025"
    tuned = Lengths

    tuning: Lengths = Field(default_factory=Lengths, description="what is trained")
    pull: float = Field(1.0, ge=0, description="weight of the distance of own features to those of the projection")
    push: float = Field(1.0, ge=0, description="weight of the nearness of own features to those of the shared context")
    margin: float = Field(1.0, ge=0, description="distance of own and shared features from which they do not repel")
    removed: float = Field(
        0.2, ge=0, le=1, description="share of the shared context's main directions that the projection removes"
    )

    def down(self, state: State, client: int) -> Params:
        lengths = self.tuning.lengths
        return {**super().down(state, client), "length": torch.tensor(lengths[client % len(lengths)])}

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        own = init["own"][: int(down["length"])]
        return super().start({**init, "own": own}, down, private, memory)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        of, shared, own = self.tuning.text_of, params["context"], params["own"]
        kept, mine, common = of(model, project(own, shared.detach(), self.removed)), of(model, own), of(model, shared)
        features = self.tuning.features(model, params, batch, ctx)
        both = [as_clip(model).logits(model.weights, features, text) for text in (mine, common)]
        task = torch.stack([F.cross_entropy(logits, batch.y, reduction="none") for logits in both]).sum(0)
        near = F.relu(self.margin - torch.linalg.vector_norm(mine - common, dim=-1))  # (classes,)
        return batch.mean(task) + self.pull * (mine - kept).square().mean() + self.push * near.mean(), {}


def project(own: Tensor, shared: Tensor, removed: float) -> Tensor:
    """(L, width): the own context's part in the span of the shared one's right singular vectors but the first."""
    rest: Tensor = torch.linalg.svd(shared, full_matrices=False).Vh[int(removed * len(shared)) :]
    return own @ rest.T @ rest
