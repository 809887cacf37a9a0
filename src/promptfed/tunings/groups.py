"""Groups of prompts in both towers of a CLIP."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .. import Batch, Context, Model, Params, UserError
from .. import params as P
from ..models.base import normal
from ..seeding import torch_rng
from ..tuning import Family, as_clip
from .maple import image_tower
from .text import TextContext
from .tokens import uniform

OWN, SHARED = "own", "shared"


class Groups(TextContext):
    """G groups, of a context and image tokens each; the mean of their logits decides. The server has S of them."""

    roles: ClassVar[dict[str, str]] = {f"{SHARED}.": "body", f"{OWN}.": OWN}
    about = "groups of text and image prompts"
    role_words: ClassVar[dict[str, str]] = {"body": "some of its groups of prompts", OWN: "the other groups"}
    family = Family.BOTH
    backbones = "CLIP with a ViT"
    uncached = "tokens enter the first layer"

    context: int = Field(4, ge=1, description="context vectors of each group")
    tokens: int = Field(4, ge=1, description="image tokens of each group")
    groups: int = Field(5, ge=2, description="groups of each client (G)")
    selected: int = Field(2, ge=1, description="groups that a client sends in a round; fewer than it has (s)")

    @model_validator(mode="after")
    def _some_stay(self) -> Groups:
        if self.selected >= self.groups:
            raise UserError(f"method.selected = {self.selected} must be less than method.groups = {self.groups}")
        return self

    def check(self, model: Model) -> None:
        super().check(model)
        image_tower(model)

    def init(self, model: Model, seed: int) -> Params:
        g = torch_rng(seed, "groups")
        text = normal(g, self.groups, self.context, as_clip(model).text_width)
        own = {"text": text, "image": uniform(image_tower(model), g, self.groups, self.tokens)}
        shared = {name: p[: self.selected].clone() for name, p in own.items()}
        return {**P.nested(SHARED, shared), **P.nested(OWN, own)}

    def frozen_name(self, model: Model) -> str:
        return ""

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, G d): image features with the tokens of each group."""
        clip = as_clip(model)
        return torch.cat([clip.features(model.weights, batch.x, p) for p in params["own.image"]], dim=-1)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.group_logits(model, self.split(features), self.texts(model, params)).mean(0)

    def split(self, features: Tensor) -> Tensor:
        """(B, G d) -> (G, B, d)"""
        return torch.stack(features.chunk(self.groups, dim=-1))

    def texts(self, model: Model, params: Params) -> Tensor:
        """(G, classes, d)"""
        return torch.stack([self.text_of(model, p) for p in params["own.text"]])

    def group_logits(self, model: Model, images: Tensor, texts: Tensor) -> Tensor:
        """(G, B, classes)"""
        pairs = zip(images, texts, strict=True)
        return torch.stack([as_clip(model).logits(model.weights, *pair) for pair in pairs])
