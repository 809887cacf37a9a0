"""What the images of a pre-trained model go through: size, interpolation, mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...data.images import Interpolation, Resize
from ...errors import UserError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

_RESAMPLE: dict[int, Interpolation] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True)
class Preprocess:
    """The evaluation transform that the weights were published with. Deterministic: its results can be cached."""

    resize: Resize
    mean: tuple[float, ...]  # per channel, for pixels in 0..1
    std: tuple[float, ...]

    def at(self, side: int) -> Preprocess:
        """For images of another size."""
        return replace(self, resize=self.resize.at(side))


def from_transformers(
    config: Mapping[str, Any], image: int, clip: bool, name: str, any_size: bool = False
) -> Preprocess:
    """From preprocessor_config.json; what it leaves out is as in the image processors of CLIP and ViT.

    `any_size`: it may make images of another size than the model's position embeddings are for.
    """
    resample = config.get("resample", 3 if clip else 2)
    if resample not in _RESAMPLE:
        raise UserError(f'backbone.name = "{name}": resample = {resample} is not bilinear (2) or bicubic (3)')
    size = config.get("size", image)
    if isinstance(size, int):  # as older files have it
        size = {"shortest_edge": size} if clip else {"height": size, "width": size}
    shortest = size.get("shortest_edge")
    scaled = shortest or _side(size, name)
    crop = shortest or config.get("do_center_crop", clip)
    side = _side(config.get("crop_size", image), name) if crop else scaled
    mean, std = (CLIP_MEAN, CLIP_STD) if clip else (HALF, HALF)
    resize = Resize((side, side), "shortest" if shortest else "squash", scaled, _RESAMPLE[resample])
    own = side if any_size else image
    return _checked(resize, config.get("image_mean", mean), config.get("image_std", std), own, name)


def _side(size: int | Mapping[str, int], name: str) -> int:
    if isinstance(size, int):
        return size
    if size.get("height") is None or size["height"] != size.get("width"):
        raise UserError(
            f'backbone.name = "{name}": size = {dict(size)} of its preprocessing must be shortest_edge, or height and '
            "width of equal length"
        )
    return size["height"]


def from_timm(config: Mapping[str, Any], image: int, name: str) -> Preprocess:
    """From the `pretrained_cfg` of config.json."""
    crop = config.get("crop_mode", "center")
    if crop not in ("center", "squash"):
        raise UserError(f'backbone.name = "{name}": crop_mode = "{crop}" is not "center" or "squash"')
    scaled = math.floor(image / config.get("crop_pct", 0.9))
    interpolation = config.get("interpolation", "bicubic")
    resize = Resize((image, image), "squash" if crop == "squash" else "shortest", scaled, interpolation, "round")
    return _checked(resize, config.get("mean", HALF), config.get("std", HALF), image, name)


def from_open_clip(config: Mapping[str, Any], image: int, name: str) -> Preprocess:
    """From the `preprocess_cfg` of open_clip_config.json."""
    mode: Any = config.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise UserError(f'backbone.name = "{name}": resize_mode = "{mode}" is not "shortest" or "squash"')
    resize = Resize((image, image), mode, image, config.get("interpolation") or "bicubic", "round")
    return _checked(resize, config.get("mean") or CLIP_MEAN, config.get("std") or CLIP_STD, image, name)


def _checked(resize: Resize, mean: Sequence[float], std: Sequence[float], image: int, name: str) -> Preprocess:
    if resize.interpolation not in _RESAMPLE.values():
        raise UserError(
            f'backbone.name = "{name}": interpolation = "{resize.interpolation}" is not bilinear or bicubic'
        )
    if resize.size != (image, image) or resize.scaled < image:
        raise UserError(
            f'backbone.name = "{name}" takes {image}x{image} pixels, but its preprocessing makes '
            f"{resize.size[0]}x{resize.size[1]}"
            + (f" of a shorter side of {resize.scaled}" if resize.mode == "shortest" else "")
        )
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise UserError(f'backbone.name = "{name}": its preprocessing has no mean and std of 3 channels')
    return Preprocess(resize, tuple(mean), tuple(std))
