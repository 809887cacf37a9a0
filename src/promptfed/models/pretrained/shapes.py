"""Sizes of published models, and the models of these sizes once their weights are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...params import Params
from ...seeding import torch_rng
from ..clip import CLIP
from ..resnet import ResNet
from ..text import TextTower
from ..transformer import Activation
from ..vit import ViT, head_weights
from .preprocess import Preprocess
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Transformer:
    depth: int
    width: int
    heads: int
    hidden: int  # units of the MLP
    eps: float
    activation: Activation


@dataclass(frozen=True)
class Patches:
    """Square images in square patches."""

    side: int
    patch: int
    channels: int = 3

    @property
    def positions(self) -> int:
        return 1 + (self.side // self.patch) ** 2


@dataclass(frozen=True)
class Convolutions:
    side: int
    blocks: tuple[int, ...]
    width: int  # channels after the stem

    @property
    def heads(self) -> int:
        return self.width * 32 // 64


@dataclass(frozen=True)
class Text:
    vocabulary: int
    length: int


@dataclass(frozen=True)
class VitShape:
    image: Patches
    tower: Transformer

    def model(self, name: str, weights: Params, preprocess: Preprocess, classes: int, seed: int) -> ViT:
        """With a fresh linear head from the seed."""
        weights = weights | head_weights(torch_rng(seed, "head"), classes, self.tower.width)
        return _vit(name, self.image, self.tower, classes, weights, "body", preprocess)


@dataclass(frozen=True)
class ClipShape:
    """`tower` is None where the image tower is a ResNet."""

    image: Patches | Convolutions
    tower: Transformer | None
    text: Text
    words: Transformer
    joint: int

    def model(
        self, name: str, weights: Params, preprocess: Preprocess, classes: Sequence[str], count: int, words: Tokenizer
    ) -> CLIP:
        """`classes`: the names by which it classifies `count` classes; without them it has features only."""
        if classes and len(classes) != count:
            raise ValueError(f"{len(classes)} names for {count} classes")
        size = (3, self.image.side, self.image.side)
        tower: ViT | ResNet
        if isinstance(self.image, Convolutions):
            tower = ResNet(name, size, 0, blocks=self.image.blocks, heads=self.image.heads)
        else:
            assert self.tower is not None
            tower = _vit(name, self.image, self.tower, 0, {}, "body.image", None)
        return CLIP(
            name,
            size,
            count,
            weights,
            tower.width,
            preprocess=preprocess,
            image_tower=tower,
            text_tower=TextTower(self.words.depth, self.words.heads, self.words.eps, self.words.activation),
            tokenizer=words,
            names=tuple(classes),
        )


def _vit(
    name: str, image: Patches, t: Transformer, classes: int, weights: Params, at: str, preprocess: Preprocess | None
) -> ViT:
    size, sizes = (image.channels, image.side, image.side), (t.width, image.patch, t.depth, t.heads)
    return ViT(name, size, classes, weights, *sizes, t.eps, t.activation, at, preprocess=preprocess)
