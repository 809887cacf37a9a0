"""CLIP (Radford et al., ICML 2021): an image tower and a text tower that meet in one space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..params import Params
from ..seeding import torch_rng
from .base import Model, normal
from .text import Sentences, TextTower
from .transformer import block_weights, norm_weights
from .vit import Mode, Prompts, ViT, check_patches, vit_weights


@dataclass
class CLIP(Model):
    """`width` is that of the image tower's tokens, `text_width` that of the text tower's context vectors.

    Image features and text features are unit vectors; logits are their cosines times the learned scale. A tuning that
    changes the text side takes text() and logits(); classify() compares with `sentences`, one for each class.
    """

    image_tower: ViT = field(kw_only=True)
    text_tower: TextTower = field(kw_only=True)
    sentences: Sentences | None = field(kw_only=True, default=None, repr=False)

    @property
    def text_width(self) -> int:
        return self.weights["body.text.tokens"].shape[1]

    @property
    def context_length(self) -> int:
        return len(self.weights["body.text.position"])

    def features(
        self, weights: Params, x: Tensor, tokens: Tensor | Prompts | None = None, mode: Mode = "deep"
    ) -> Tensor:
        """x (B, C, H, W) -> (B, d). Tokens enter the image tower: at layer 0, or each at its layer (ViT.encode)."""
        return self.join(weights, self.image_tower.features(weights, x, tokens, mode))

    def join(self, weights: Params, features: Tensor) -> Tensor:
        """What the image tower makes, (B, width), in the space of both: (B, d)."""
        return F.normalize(F.linear(features, weights["body.image.proj"]), dim=-1)

    def text(
        self,
        weights: Params,
        sentences: Sentences,
        context: Tensor | None = None,
        deep: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """-> (C, d). Context vectors and deep prompts as in TextTower.features."""
        return F.normalize(self.text_tower.features(weights, sentences, context, deep), dim=-1)

    def logits(self, weights: Params, image: Tensor, text: Tensor) -> Tensor:
        """(B, d), (C, d) -> (B, C)."""
        return weights["body.scale"].exp() * image @ text.T

    def classify(self, weights: Params, features: Tensor) -> Tensor:
        if self.sentences is None:
            raise UserError(f'backbone.name = "{self.name}" needs the names of the classes, which the dataset has not')
        return self.logits(weights, features, self.text(weights, self.sentences))


def clip(
    image: tuple[int, int, int],
    seed: int,
    *,
    name: str = "clip",
    patch: int,
    width: int,
    depth: int,
    heads: int,
    text_width: int,
    text_depth: int,
    text_heads: int,
    vocabulary: int,
    context_length: int,
    embedding: int,
    mlp_ratio: int = 4,
) -> CLIP:
    """A CLIP with fresh weights, to be trained."""
    check_patches(name, image, patch)
    g = torch_rng(seed, "clip")
    at = "body.image"
    weights = vit_weights(g, at, image, patch, depth, width, mlp_ratio * width)
    del weights[f"{at}.patch.bias"]
    weights |= norm_weights(f"{at}.norm_pre", width)
    weights[f"{at}.proj"] = normal(g, embedding, width, std=width**-0.5)
    at = "body.text"
    weights[f"{at}.tokens"] = normal(g, vocabulary, text_width)
    weights[f"{at}.position"] = normal(g, context_length, text_width, std=0.01)
    weights |= block_weights(g, f"{at}.blocks", text_depth, text_width, mlp_ratio * text_width)
    weights |= norm_weights(f"{at}.norm", text_width)
    weights[f"{at}.proj"] = normal(g, embedding, text_width, std=text_width**-0.5)
    weights["body.scale"] = torch.tensor(math.log(1 / 0.07))
    image_tower = ViT(name, image, 0, {}, width, patch, depth, heads, 1e-5, "quick_gelu", "body.image")
    return CLIP(name, image, 0, weights, width, image_tower=image_tower, text_tower=TextTower(text_depth, text_heads))
