"""Published backbones whose shapes are known here: fresh models of them, with nothing fetched.

For counting parameters and measuring time. Their weights have no values, or random ones; class names become tokens word
by word, where the published tokenizer may make several of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from torch import Tensor

from ...params import Params
from ...seeding import torch_rng
from ..base import Model
from ..clip import CLIP
from ..resnet import ResNet
from ..text import TextTower
from ..vit import ViT, head_weights
from . import layouts, preprocess
from .layouts import Convolutions, Image, Text, Transformer
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Vision:
    """A ViT."""

    image: Image
    tower: Transformer


@dataclass(frozen=True)
class Both:
    """A CLIP; `tower` is none where its image tower is a ResNet."""

    image: Image | Convolutions
    tower: Transformer | None
    text: Text
    words: Transformer
    joint: int


_BASE = Transformer(12, 768, 12, 3072, 1e-12, "gelu")
_CLIP_BASE = Transformer(12, 768, 12, 3072, 1e-5, "quick_gelu")
_TEXT = Text(49408, 77)
_WORDS = Transformer(12, 512, 8, 2048, 1e-5, "quick_gelu")

KNOWN: dict[str, Vision | Both] = {
    "google/vit-base-patch16-224-in21k": Vision(Image(224, 16), _BASE),
    "google/vit-base-patch16-224": Vision(Image(224, 16), _BASE),
    "openai/clip-vit-base-patch16": Both(Image(224, 16), _CLIP_BASE, _TEXT, _WORDS, 512),
    "openai/clip-vit-base-patch32": Both(Image(224, 32), _CLIP_BASE, _TEXT, _WORDS, 512),
    "timm/resnet50_clip.openai": Both(Convolutions(224, (3, 4, 6, 3), 64), None, _TEXT, _WORDS, 1024),
}


def fresh(name: str, classes: int, names: Sequence[str], draw: bool = False) -> Model:
    """A model of this name, whose weights are shapes only (on the meta device) or random numbers."""
    shapes = KNOWN[name]
    size = (3, shapes.image.side, shapes.image.side)
    seen = preprocess.from_transformers({}, shapes.image.side, clip=isinstance(shapes, Both), name=name)
    if isinstance(shapes, Vision):
        t, patch = shapes.tower, shapes.image.patch
        weights = {**_body(name, draw), **head_weights(torch_rng(0, "head"), classes, t.width)}
        return ViT(name, size, classes, weights, t.width, patch, t.depth, t.heads, t.eps, t.activation, preprocess=seen)
    tower: ViT | ResNet
    if isinstance(shapes.image, Convolutions):
        tower = ResNet(name, size, 0, blocks=shapes.image.blocks, heads=shapes.image.heads)
    else:
        assert shapes.tower is not None
        t, patch = shapes.tower, shapes.image.patch
        tower = ViT(name, size, 0, {}, t.width, patch, t.depth, t.heads, t.eps, t.activation, "body.image")
    words = shapes.words
    return CLIP(
        name,
        size,
        classes,
        dict(_body(name, draw)),
        tower.width,
        preprocess=seen,
        image_tower=tower,
        text_tower=TextTower(words.depth, words.heads, words.eps, words.activation),
        tokenizer=_Words(Backend(BPE()), shapes.text.vocabulary - 2, shapes.text.vocabulary - 1, shapes.text.length),
        names=tuple(names),
    )


class _Words(Tokenizer):
    """A token a word."""

    def words(self, text: str) -> list[int]:
        return [crc32(word.encode()) % self.start for word in text.replace(".", " . ").split()]


@cache
def _body(name: str, draw: bool) -> Params:
    """All weights but those of a head."""
    shapes = KNOWN[name]
    entries = (
        layouts.vit_timm(shapes.image, shapes.tower)
        if isinstance(shapes, Vision)
        else layouts.clip_open_clip(shapes.image, shapes.tower, shapes.text, shapes.words, shapes.joint)
    )
    # Random weights are views of the same numbers: nobody trains them in place, and 150 M fresh ones cost seconds.
    pool = 0.02 * torch.randn(1 << 23, generator=torch_rng(0, "known")) if draw else torch.empty(0)

    def part(name: str, shape: tuple[int, ...]) -> Tensor:
        if not draw:
            return torch.zeros(()).expand(shape)
        if name.endswith("running_var"):
            return torch.ones(shape)
        if math.prod(shape) > len(pool):  # CLIP's words
            return pool[: shape[-1]].expand(shape)
        return pool[: math.prod(shape)].reshape(shape)

    made = {entry.ours: entry.make(*(part(name, entry.shape) for name in entry.theirs)) for entry in entries}
    return made if draw else {name: torch.empty(p.shape, device="meta") for name, p in made.items()}
