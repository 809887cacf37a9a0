"""Published backbones whose shapes are known here: models of them without values, with nothing fetched.

For counting parameters. Class names become one token per word, where the published tokenizer may make several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ... import models
from ...data.images import Resize
from ...params import Params
from ..base import Model
from . import layouts
from .preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess, from_transformers
from .shapes import ClipShape, Convolutions, Image, Patches, Text, Transformer, VitShape
from .tokenizer import Tokenizer

_BASE = Transformer(12, 768, 12, 3072, 1e-12, "gelu")
_CLIP_BASE = Transformer(12, 768, 12, 3072, 1e-5, "quick_gelu")
_TEXT = Text(49408, 77)
_WORDS = Transformer(12, 512, 8, 2048, 1e-5, "quick_gelu")

KNOWN: dict[str, VitShape | ClipShape] = {
    "google/vit-base-patch16-224-in21k": VitShape(Patches(224, 16), _BASE),
    "google/vit-base-patch16-224": VitShape(Patches(224, 16), _BASE),
    "openai/clip-vit-base-patch16": ClipShape(Patches(224, 16), _CLIP_BASE, _TEXT, _WORDS, 512),
    "openai/clip-vit-base-patch32": ClipShape(Patches(224, 32), _CLIP_BASE, _TEXT, _WORDS, 512),
    "timm/resnet50_clip.openai": ClipShape(Convolutions(224, (3, 4, 6, 3), 64), None, _TEXT, _WORDS, 1024),
    "facebook/deit-tiny-patch16-224": VitShape(Patches(224, 16), Transformer(12, 192, 3, 768, 1e-12, "gelu")),
    "facebook/deit-small-patch16-224": VitShape(Patches(224, 16), Transformer(12, 384, 6, 1536, 1e-12, "gelu")),
    "facebook/deit-base-patch16-224": VitShape(Patches(224, 16), _BASE),
    "facebook/dinov2-small": VitShape(Patches(518, 14), Transformer(12, 384, 6, 1536, 1e-6, "gelu", scaled=True)),
    "facebook/dinov2-base": VitShape(Patches(518, 14), Transformer(12, 768, 12, 3072, 1e-6, "gelu", scaled=True)),
}
_IMAGENET = {"resample": 3, "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "crop_size": 224}
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "facebook/deit": {"size": 256, "do_center_crop": True, **_IMAGENET},
    "facebook/dinov2": {"size": {"shortest_edge": 256}, **_IMAGENET},
}


def fresh(name: str, classes: int, names: Sequence[str], image: Image | None = None) -> Model:
    """A model of this name, whose weights are shapes only (on the meta device)."""
    shape, weights, seen = KNOWN[name], dict(_body(name)), _preprocess(name)
    if isinstance(shape, VitShape):
        return shape.model(name, weights, seen, classes, 0, image)
    text = shape.text
    words = _Words(Backend(BPE()), text.vocabulary - 2, text.vocabulary - 1, text.length)
    return shape.model(name, weights, seen, names, classes, words, image)


def resize(name: str) -> Resize | None:
    """As models.resize() has it, without the files of a model that is known here."""
    return _preprocess(name).resize if name in KNOWN else models.resize(name)


def _preprocess(name: str) -> Preprocess:
    """The published one: the default of its image processor, but for the settings above."""
    shape = KNOWN[name]
    config = _PREPROCESSORS.get(name.split("-")[0], {})
    return from_transformers(config, shape.image.side, isinstance(shape, ClipShape), name, any_size=True)


class _Words(Tokenizer):
    """One token per word."""

    def words(self, text: str) -> list[int]:
        return [crc32(word.encode()) % self.start for word in text.replace(".", " . ").split()]


@cache
def _body(name: str) -> Params:
    """All weights but those of a head."""
    shape = KNOWN[name]
    weights = layouts.vit_timm(shape) if isinstance(shape, VitShape) else layouts.clip_open_clip(shape)
    blank = torch.zeros(())
    made = {w.ours: w.make(*(blank.expand(w.shape) for _ in w.theirs)) for w in weights}
    return {name: torch.empty(p.shape, device="meta") for name, p in made.items()}
