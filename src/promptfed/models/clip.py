"""CLIP (Radford et al., ICML 2021): an image tower and a text tower with a joint embedding space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import Params, UserError
from ..precision import full
from ..seeding import torch_rng
from .base import Model, normal
from .resnet import ResNet
from .text import Sentences, TextTower
from .text_cache import TextCache
from .transformer import block_weights, linear, norm_weights
from .vit import Mode, Prompts, ViT, check_patches, head_weights, vit_weights

if TYPE_CHECKING:
    from .pretrained.tokenizer import Position, Tokenizer

Pooler = Literal["tanh", "linear"]


@dataclass
class CLIP(Model):
    """`width` is that of the image tower's tokens, None for a ResNet; `text_width` that of the context vectors.

    Image features and text features are unit vectors; logits are their cosines times the learned scale. A tuning of
    the text side makes its own sentences() and takes text() and logits(); classify() is CLIP's zero-shot prediction.
    """

    image_tower: ViT | ResNet = field(kw_only=True)
    text_tower: TextTower = field(kw_only=True)
    pooler: Pooler | None = field(default=None, kw_only=True)  # activation of a layer before the projection of images
    tokenizer: Tokenizer | None = field(default=None, kw_only=True, repr=False)
    names: tuple[str, ...] = field(default=(), kw_only=True)  # of the classes
    template: str = field(default="a photo of a {}.", kw_only=True)
    _texts: TextCache = field(default_factory=TextCache, init=False, repr=False)
    _sentences: dict[tuple[str, int, str], Sentences] = field(default_factory=dict, init=False, repr=False)

    @property
    def text_width(self) -> int:
        return self.weights["body.text.tokens"].shape[1]

    @property
    def embedding(self) -> int:
        """The size of image and text features in the joint space."""
        return self.weights["body.text.proj"].shape[0]

    def features(
        self, weights: Params, x: Tensor, tokens: Tensor | Prompts | None = None, mode: Mode = "deep"
    ) -> Tensor:
        """x (B, C, H, W) -> (B, d). Tokens enter the image tower: at layer 0, or each at its layer (ViT.encode)."""
        if isinstance(self.image_tower, ViT):
            return self.join(weights, self.image_tower.features(weights, x, tokens, mode))
        return self.join(weights, self.image_tower.features(weights, x))

    def patches(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """x (B, C, H, W) -> (B, patches, d): the last layer's patches in the joint space. Of a ViT."""
        tower = self.image_tower
        assert isinstance(tower, ViT)
        h = tower.embed(weights, x)
        encoded = tower.encode(weights, h, None if tokens is None else {0: tokens})
        return self.join(weights, tower.norm(weights, encoded[:, -(h.shape[1] - 1) :]))

    def join(self, weights: Params, features: Tensor) -> Tensor:
        """Features of the image tower in the joint space: (..., d). A ResNet's are there already."""
        if self.pooler:
            features = linear(weights, "body.image.pooler", features)
            features = features.tanh() if self.pooler == "tanh" else features
        if "body.image.proj" in weights:
            features = F.linear(features, weights["body.image.proj"])
        return _unit(weights, features)

    def sentences(self, template: str = "{}.", context: int = 0, position: Position = "end") -> Sentences:
        """One for each class, with slots for `context` vectors (Tokenizer.sentences)."""
        if self.tokenizer is None or not self.names:
            raise UserError(f'backbone.name = "{self.name}" needs class names, which the dataset lacks')
        key = (template, context, position)
        if key not in self._sentences:
            made = self.tokenizer.sentences(self.names, template, context, position)
            self._sentences[key] = made.to(self.weights["body.text.tokens"].device)
        return self._sentences[key]

    def naming(self, names: Sequence[str]) -> CLIP:
        """The same model for other classes."""
        return replace(self, classes=len(names), names=tuple(names))

    def words(self, text: str) -> Tensor:
        """(L, text_width): the token embeddings of a text, to start context vectors from."""
        if self.tokenizer is None:
            raise UserError(f'backbone.name = "{self.name}" has no tokenizer')
        return self.weights["body.text.tokens"][self.tokenizer.words(text)].clone()

    def text(
        self,
        weights: Params,
        sentences: Sentences,
        context: Tensor | None = None,
        deep: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """-> (C, d). Context vectors and deep prompts as in TextTower.features. Computed once for constant prompts, as
        long as the text tower is the model's own."""

        def compute() -> Tensor:
            return _unit(weights, self.text_tower.features(weights, sentences, context, deep))

        own = weights is self.weights or all(
            weights[name] is p for name, p in self.weights.items() if name.startswith("body.text.")
        )
        prompts = {f"layer {i}": p for i, p in {0: context, **(deep or {})}.items() if p is not None}
        return self._texts(sentences, prompts, compute) if own else compute()

    def logits(self, weights: Params, image: Tensor, text: Tensor) -> Tensor:
        """(B, d), (C, d) -> (B, C)."""
        with full(image.device):  # the scale is about 100: rounded cosines would be too coarse
            return weights["body.scale"].exp() * image @ text.T

    def classify(self, weights: Params, features: Tensor) -> Tensor:
        return self.logits(weights, features, self.zero_shot(weights))

    def zero_shot(self, weights: Params) -> Tensor:
        """(classes, d): text features of the template."""
        return self.text(weights, self.sentences(self.template))

    def to(self, device: torch.device) -> CLIP:
        super().to(device)
        self._texts = TextCache()  # these were made on another device
        self._sentences = {}
        return self


def _unit(weights: Params, features: Tensor) -> Tensor:
    """Features (..., d) of length 1, in the precision of the weights."""
    return F.normalize(features.to(weights["body.scale"].dtype), dim=-1)


def image_vit(model: CLIP, classes: int, seed: int, name: str) -> ViT:
    """The image tower alone, up to its last norm, with a fresh linear head from the seed."""
    tower, at = model.image_tower, "body.image."
    if not isinstance(tower, ViT) or tower.width is None:
        raise UserError(f'backbone.name = "{model.name}": its image tower is not a transformer')
    after = (f"{at}proj", f"{at}pooler.")
    body = {
        n.replace(at, "body.", 1): p for n, p in model.weights.items() if n.startswith(at) and not n.startswith(after)
    }
    weights = body | head_weights(torch_rng(seed, "head"), classes, tower.width)
    return replace(tower, name=name, classes=classes, weights=weights, at="body", preprocess=model.preprocess)


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
