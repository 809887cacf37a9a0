"""Several text contexts, matched to the patches of an image by optimal transport."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Model, Params, UserError
from ..models import ViT
from ..models.base import normal
from ..precision import full
from ..seeding import torch_rng
from ..tuning import as_clip
from .text import TextContext


class OverPatches(TextContext):
    """A class's logit is the similarity of its contexts' text features to the patches' features, summed over the
    transport plan of least cost between them. The plan is a constant in the gradient."""

    backbones = "CLIP with a ViT"
    partial: ClassVar[bool] = False  # whether patches may be left out

    regularisation: float = Field(0.1, ge=0.01, description="weight of the plan's entropy (lambda)")
    iterations: int = Field(50, ge=1, description="iterations of the plan's row and column scaling")

    def check(self, model: Model) -> None:
        super().check(model)
        if not isinstance(as_clip(model).image_tower, ViT):
            raise UserError(
                f'backbone.name = "{model.name}": features of patches need a CLIP whose image tower is a transformer'
            )

    @abstractmethod
    def contexts(self, params: Params) -> Sequence[Tensor]:
        """N contexts, (L, width) each."""

    def mass(self) -> float:
        """What is transported in total, of 1 / V for each of V patches."""
        return 1.0

    def frozen_name(self, model: Model) -> str:
        return "patches"

    def frozen(self, model: Model, x: Tensor) -> Params:
        return {"patches": as_clip(model).patches(model.weights, x)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, V d): the features of all patches."""
        if batch.frozen:
            return batch.frozen["patches"].flatten(1)
        return as_clip(model).patches(model.weights, batch.x, batch.tokens).flatten(1)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        patches = features.reshape(len(features), -1, as_clip(model).embedding)  # (B, V, d)
        text = torch.stack([self.text_of(model, p) for p in self.contexts(params)])  # (N, classes, d)
        with full(text.device):
            similarity = torch.einsum("bvd,ncd->bcvn", patches, text)
        with torch.no_grad():
            plan = transport(
                1 - similarity.detach(), self.regularisation, self.iterations, self.mass(), partial=self.partial
            )
        return model.weights["body.scale"].exp() * (plan * similarity).sum((-2, -1))


class ManyContexts(OverPatches):
    """Several text contexts, matched to an image's patches by optimal transport: Chen et al., "PLOT: Prompt Learning
    with Optimal Transport for Vision-Language Models" (ICLR 2023)."""

    about = "several text contexts"
    paper = "Chen et al., ICLR 2023, averaged"

    prompts: int = Field(4, ge=1, description="number of contexts (N)")

    def init(self, model: Model, seed: int) -> Params:
        shape = self.prompts, self.context, as_clip(model).text_width
        return {"context": normal(torch_rng(seed, "contexts"), *shape)}

    def contexts(self, params: Params) -> Sequence[Tensor]:
        return params["context"].unbind()


def transport(cost: Tensor, regularisation: float, iterations: int, mass: float = 1.0, partial: bool = False) -> Tensor:
    """(..., V, N) -> the plan T of the same shape that minimises <T, cost> - regularisation * entropy(T), with column
    sums mass / N and row sums 1 / V (Sinkhorn), or of at most 1 / V if partial (Dykstra's algorithm, as scalings)."""
    # From the least cost on, so that a small regularisation leaves something of the kernel: v takes up the factor.
    least, tiny = cost.amin((-2, -1), keepdim=True), torch.finfo(cost.dtype).tiny
    kernel = ((least - cost) / regularisation).exp()
    v = (-least / regularisation).exp().expand_as(kernel[..., :1, :])
    for _ in range(iterations):
        u = 1 / kernel.shape[-2] / (kernel * v).sum(-1, keepdim=True).clamp(min=tiny)
        u = u.clamp(max=1) if partial else u
        v = mass / kernel.shape[-1] / (kernel * u).sum(-2, keepdim=True).clamp(min=tiny)
    return u * kernel * v
