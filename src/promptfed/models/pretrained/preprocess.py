"""From stored pixels to what a pre-trained model expects: size, interpolation, mean and standard deviation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import UserError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

_RESAMPLE: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


@dataclass(frozen=True)
class Preprocess:
    """The evaluation transform that the weights were published with. Deterministic: its results can be kept."""

    size: tuple[int, int]  # of the result
    shortest: int | None  # the shorter side becomes so long and the middle is cut out; None: both sides are stretched
    interpolation: Literal["bilinear", "bicubic"]
    mean: tuple[float, ...]  # per channel, for pixels in 0..1
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, C, H, W) uint8, of 1 or 3 channels -> (B, 3, h, w) normalised."""
        mean, std = (torch.tensor(v, device=x.device).reshape(-1, 1, 1) * 255 for v in (self.mean, self.std))
        return (self.resize(x).float() - mean) / std

    def resize(self, x: Tensor) -> Tensor:
        """(B, C, H, W) uint8 -> (B, 3, h, w) uint8."""
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        height, width = x.shape[2:]
        target = self.size
        if self.shortest is not None:
            target = (self.shortest * height // min(height, width), self.shortest * width // min(height, width))
        for sides in ((height, target[1]), target):  # rows first, and whole gray levels in between, as Pillow has them
            if x.shape[2:] != sides:
                y = F.interpolate(x.float(), sides, mode=self.interpolation, align_corners=False, antialias=True)
                x = y.round_().clamp_(0, 255).to(torch.uint8)
        top, left = (target[0] - self.size[0]) // 2, (target[1] - self.size[1]) // 2
        return x[:, :, top : top + self.size[0], left : left + self.size[1]]


def from_transformers(config: dict[str, Any], image: int, clip: bool, name: str) -> Preprocess:
    """From preprocessor_config.json; what it leaves out is as in the image processors of CLIP and ViT."""
    resample = config.get("resample", 3 if clip else 2)
    if resample not in _RESAMPLE:
        raise UserError(f'backbone.name = "{name}": resample = {resample} is not bilinear (2) or bicubic (3)')
    size = config.get("size", {"shortest_edge": image} if clip else image)
    if isinstance(size, int):  # as older files have it
        size = {"shortest_edge": size} if clip else {"height": size, "width": size}
    crop = config.get("crop_size", image) if "shortest_edge" in size else size
    sides = (crop, crop) if isinstance(crop, int) else (crop.get("height", 0), crop.get("width", 0))
    mean, std = (CLIP_MEAN, CLIP_STD) if clip else (HALF, HALF)
    return _checked(
        Preprocess(
            sides,
            size.get("shortest_edge"),
            _RESAMPLE[resample],
            tuple(config.get("image_mean", mean)),
            tuple(config.get("image_std", std)),
        ),
        image,
        name,
    )


def from_timm(config: dict[str, Any], image: int, name: str) -> Preprocess:
    """From the `pretrained_cfg` of config.json."""
    kind = config.get("interpolation", "bicubic")
    shortest = math.floor(image / config.get("crop_pct", 0.9))
    return _checked(
        Preprocess((image, image), shortest, kind, tuple(config.get("mean", HALF)), tuple(config.get("std", HALF))),
        image,
        name,
    )


def from_open_clip(config: dict[str, Any], image: int, name: str) -> Preprocess:
    """From the `preprocess_cfg` of open_clip_config.json."""
    mode = config.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise UserError(f'backbone.name = "{name}": resize_mode = "{mode}" is not "shortest" or "squash"')
    return _checked(
        Preprocess(
            (image, image),
            image if mode == "shortest" else None,
            config.get("interpolation") or "bicubic",
            tuple(config.get("mean") or CLIP_MEAN),
            tuple(config.get("std") or CLIP_STD),
        ),
        image,
        name,
    )


def _checked(made: Preprocess, image: int, name: str) -> Preprocess:
    if made.interpolation not in _RESAMPLE.values():
        raise UserError(f'backbone.name = "{name}": interpolation = "{made.interpolation}" is not bilinear or bicubic')
    if made.size != (image, image) or (made.shortest is not None and made.shortest < image):
        raise UserError(
            f'backbone.name = "{name}" takes {image}x{image} pixels, but its preprocessing makes '
            f"{made.size[0]}x{made.size[1]}" + (f" of a shorter side of {made.shortest}" if made.shortest else "")
        )
    if len(made.mean) != 3 or len(made.std) != 3 or min(made.std) <= 0:
        raise UserError(f'backbone.name = "{name}": its preprocessing has no mean and std of 3 channels')
    return made
