"""Attention over the image features of a frozen CLIP."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params
from ..models.base import dense
from ..models.transformer import linear
from ..seeding import torch_rng
from ..tuning import Family, OnFeatures, as_clip


class FeatureAttention(OnFeatures):
    """Attention over the coordinates of the image features of a frozen CLIP, with its zero-shot text features: Lu et
    al., "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning" (IEEE Data Eng. Bull. 2023).
    """

    roles: ClassVar[dict[str, str]] = {"adapter.": "body"}
    about = "attention over image features"
    family = Family.FEATURES
    paper = "Lu et al., IEEE Data Eng. Bull. 2023"
    backbones = "CLIP"

    def check(self, model: Model) -> None:
        clip = as_clip(model)
        clip.sentences(clip.template)

    def init(self, model: Model, seed: int) -> Params:
        width, g = as_clip(model).embedding, torch_rng(seed, "adapter")
        made: Params = {}
        for name in ("adapter.in", "adapter.out"):
            made[f"{name}.weight"], made[f"{name}.bias"] = dense(g, width, width)
        return made

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, d): the features times softmax(W2 tanh(W1 I + b1) + b2), of unit length again."""
        image = super().features(model, params, batch, ctx)
        attention = linear(params, "adapter.out", linear(params, "adapter.in", image).tanh()).softmax(-1)
        return F.normalize(attention * image, dim=-1)
