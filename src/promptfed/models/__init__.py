"""Backbones by name."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..data.images import Resize
from ..errors import UserError, nearest
from .base import Model
from .clip import CLIP, image_vit
from .cnn import cnn
from .vit import ViT, vit

Image = tuple[int, int, int]  # channels, height, width


_CLIP_MINI = str(Path(__file__).parent / "clip_mini")


def _clip_mini(image: Image, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    return _pretrained("clip-mini", _CLIP_MINI, image, classes, seed, names)


def _vit_mini(image: Image, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    model = _clip_mini(image, classes, seed, names)
    assert isinstance(model, CLIP)
    return image_vit(model, classes, seed, "vit-mini")


def _fresh(make: Callable[[Image, int, int], Model]) -> Callable[[Image, int, int, Sequence[str] | None], Model]:
    return lambda image, classes, seed, names: make(image, classes, seed)


# name -> (builder of (image, classes, seed, class names), one line about it)
BACKBONES: dict[str, tuple[Callable[[Image, int, int, Sequence[str] | None], Model], str]] = {
    "cnn": (
        _fresh(cnn),
        "2 conv layers of 64 5x5 filters, FC 394, FC 192 (pFedPT's paper; 815,892 parameters at 3x32x32)",
    ),
    "cnn-code": (
        _fresh(partial(cnn, name="cnn-code", filters=(32, 64), hidden=(512,))),
        "2 conv layers of 32 and 64 5x5 filters, FC 512 (pFedPT's code)",
    ),
    "vit-tiny": (
        _fresh(vit),
        "depth 8, width 128, 8 heads, patch 4, MLP ratio 2 (pFedPT; 1,076,106 parameters at 3x32x32)",
    ),
    "clip-mini": (_clip_mini, "embedded, pre-trained on captioned drawings (dataset shapes), 3x32x32"),
    "vit-mini": (_vit_mini, "the image tower of clip-mini, with a fresh head"),
}


def build(name: str, image: Image, classes: int, seed: int, names: Sequence[str] | None = None) -> Model:
    """A backbone by its name here, or pre-trained: by hub id ("owner/name"), folder or file.

    A pre-trained CLIP needs the `names` of the classes. A pre-trained ViT takes images of any size that its patches
    divide, by interpolated position embeddings; a ResNet has an image size of its own.
    """
    if name in BACKBONES:
        return BACKBONES[name][0](image, classes, seed, names)
    return _pretrained(name, _published(name), image, classes, seed, names)


def resize(name: str) -> Resize | None:
    """How the images of a pre-trained backbone are resized, from its files; None: its weights are fresh."""
    if name in BACKBONES and name not in ("clip-mini", "vit-mini"):
        return None
    from .pretrained.load import load_preprocess

    return load_preprocess(place(name)).resize


def place(name: str) -> str:
    """Where the files of a pre-trained backbone are: a hub id or a path."""
    return _CLIP_MINI if name in BACKBONES else _published(name)


def _published(name: str) -> str:
    if "/" not in name and not Path(name).expanduser().exists():
        raise UserError(
            f'backbone.name = "{name}" is unknown{nearest(name, BACKBONES)} (allowed: a path, '
            f"a hub id such as google/vit-base-patch16-224-in21k, or one of {', '.join(sorted(BACKBONES))})"
        )
    return name


def _pretrained(name: str, where: str, image: Image, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    from .pretrained.load import load  # imports the tokenizer and the hub

    return load(where, classes, seed, names, image, name)


__all__ = ["BACKBONES", "CLIP", "Model", "ViT", "build", "image_vit", "place", "resize"]
