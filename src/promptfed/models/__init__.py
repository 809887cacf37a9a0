"""Backbones by name."""

from collections.abc import Callable
from functools import partial

from ..errors import unknown
from .base import Model
from .cnn import cnn
from .vit import vit

# name -> (builder of (image, classes, seed), one line for people)
BACKBONES: dict[str, tuple[Callable[[tuple[int, int, int], int, int], Model], str]] = {
    "cnn": (cnn, "2 conv layers of 64 5x5 filters, FC 394, FC 192 (pFedPT's paper; 815,892 parameters at 3x32x32)"),
    "cnn-code": (
        partial(cnn, name="cnn-code", filters=(32, 64), hidden=(512,)),
        "2 conv layers of 32 and 64 5x5 filters, FC 512 (pFedPT's code)",
    ),
    "vit-tiny": (vit, "depth 8, width 128, 8 heads, patch 4, MLP ratio 2 (pFedPT; 1,076,106 parameters at 3x32x32)"),
}


def build(name: str, image: tuple[int, int, int], classes: int, seed: int) -> Model:
    if name not in BACKBONES:
        raise unknown("backbone.name", name, BACKBONES)
    return BACKBONES[name][0](image, classes, seed)


__all__ = ["BACKBONES", "Model", "build"]
