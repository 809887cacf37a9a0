"""Sizes of published models, and the models of these sizes once their weights are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...params import Params
from ...seeding import torch_rng
from ..clip import CLIP, Pooler
from ..resnet import ResNet
from ..text import TextTower
from ..transformer import Activation
from ..vit import ViT, check_patches, head_weights, interpolate
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
    scaled: bool = False  # it has LayerScale


Image = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Patches:
    """Square images in square patches."""

    side: int  # of the images that the file's position embeddings are for
    patch: int
    channels: int = 3

    @property
    def positions(self) -> int:
        return 1 + (self.side // self.patch) ** 2

    def fit(self, name: str, weights: Params, position: str, image: Image) -> Params:
        """The weights, with position embeddings for images of this size."""
        check_patches(name, image, self.patch)
        side = image[1]
        if image != (self.channels, side, side):
            raise _another_size(name, (self.channels, side, side), image)
        grid = side // self.patch
        return weights | {position: interpolate(weights[position], grid, grid)}


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

    def model(
        self, name: str, weights: Params, preprocess: Preprocess, classes: int, seed: int, image: Image | None = None
    ) -> ViT:
        """With a fresh linear head from the seed; for images as published, or of the size given."""
        size = image or (self.image.channels, *preprocess.resize.size)
        weights = self.image.fit(name, weights, "body.position", size)
        weights |= head_weights(torch_rng(seed, "head"), classes, self.tower.width)
        return _vit(name, size, self.image.patch, self.tower, classes, weights, "body", preprocess.at(size[1]))


@dataclass(frozen=True)
class ClipShape:
    """`tower` is None where the image tower is a ResNet."""

    image: Patches | Convolutions
    tower: Transformer | None
    text: Text
    words: Transformer
    joint: int
    pooler: Pooler | None = None

    def model(
        self,
        name: str,
        weights: Params,
        preprocess: Preprocess,
        classes: Sequence[str],
        count: int,
        words: Tokenizer,
        image: Image | None = None,
    ) -> CLIP:
        """For images as published, or of the size given.

        `classes`: the names by which it classifies `count` classes; without them it has features only.
        """
        if classes and len(classes) != count:
            raise ValueError(f"{len(classes)} names for {count} classes")
        size = image or (3, *preprocess.resize.size)
        tower: ViT | ResNet
        if isinstance(self.image, Convolutions):
            own = (3, self.image.side, self.image.side)
            if size != own:
                raise _another_size(name, own, size)
            tower = ResNet(name, size, 0, blocks=self.image.blocks, heads=self.image.heads)
        else:
            assert self.tower is not None
            weights = self.image.fit(name, weights, "body.image.position", size)
            tower = _vit(name, size, self.image.patch, self.tower, 0, {}, "body.image", None)
        return CLIP(
            name,
            size,
            count,
            weights,
            tower.width,
            preprocess=preprocess.at(size[1]),
            image_tower=tower,
            text_tower=TextTower(self.words.depth, self.words.heads, self.words.eps, self.words.activation),
            pooler=self.pooler,
            tokenizer=words,
            names=tuple(classes),
        )


def _vit(
    name: str,
    image: Image,
    patch: int,
    t: Transformer,
    classes: int,
    weights: Params,
    at: str,
    preprocess: Preprocess | None,
) -> ViT:
    sizes = (t.width, patch, t.depth, t.heads)
    return ViT(name, image, classes, weights, *sizes, t.eps, t.activation, at, preprocess=preprocess)


def _another_size(name: str, own: Image, image: Image) -> UserError:
    return UserError(
        f'dataset.size: backbone "{name}" takes {_pixels(own)}, got {_pixels(image)}; '
        f"set dataset.size={own[1]} and dataset.channels={own[0]}"
    )


def _pixels(image: Image) -> str:
    return f"images of {image[1]}x{image[2]} pixels in {image[0]} channel{'s' * (image[0] > 1)}"
