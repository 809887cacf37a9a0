"""Backbones by name."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..errors import UserError, unknown
from .base import Model
from .clip import CLIP, image_vit
from .cnn import cnn
from .vit import ViT, vit

# name -> (builder of (image, classes, seed), one line for people)
BACKBONES: dict[str, tuple[Callable[[tuple[int, int, int], int, int], Model], str]] = {
    "cnn": (cnn, "2 conv layers of 64 5x5 filters, FC 394, FC 192 (pFedPT's paper; 815,892 parameters at 3x32x32)"),
    "cnn-code": (
        partial(cnn, name="cnn-code", filters=(32, 64), hidden=(512,)),
        "2 conv layers of 32 and 64 5x5 filters, FC 512 (pFedPT's code)",
    ),
    "vit-tiny": (vit, "depth 8, width 128, 8 heads, patch 4, MLP ratio 2 (pFedPT; 1,076,106 parameters at 3x32x32)"),
}


def build(name: str, image: tuple[int, int, int], classes: int, seed: int, names: Sequence[str] | None = None) -> Model:
    """A backbone by its name here, or pre-trained: by hub id ("owner/name"), folder or file.

    A pre-trained CLIP needs the `names` of the classes; pre-trained models have an image size of their own.
    """
    if name in BACKBONES:
        return BACKBONES[name][0](image, classes, seed)
    if "/" not in name and not Path(name).expanduser().exists():
        raise unknown("backbone.name", name, BACKBONES)
    from .load import load  # brings the tokenizer and the hub along

    model = load(name, classes, seed, names)
    if model.image != image:
        raise UserError(
            f'dataset.size: backbone "{name}" takes {_size(model.image)}, got {_size(image)}; '
            f"set dataset.size={model.image[1]} and dataset.channels={model.image[0]}"
        )
    return model


def _size(image: tuple[int, int, int]) -> str:
    return f"images of {image[1]}x{image[2]} pixels in {image[0]} channel{'s' * (image[0] > 1)}"


__all__ = ["BACKBONES", "CLIP", "Model", "ViT", "build", "image_vit"]
