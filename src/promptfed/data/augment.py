"""Random views of training images: mirrored, or mirrored and cropped; whole batches at once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..seeding import rng
from .datasets import Dataset, DatasetConfig
from .images import Interpolation

AREA = (0.08, 1.0)  # of a crop, as a share of the image's
RATIO = (3 / 4, 4 / 3)  # of a crop's width to its height
_ATTEMPTS = 10  # crops that are drawn for a view, the first one that fits into the image is taken
_BLOCK = 4096  # images whose fixed views are drawn at once


@dataclass(frozen=True)
class Augment:
    """How training images vary. A view of an image is five numbers: left, top, width and height of a crop as shares of
    the image, and whether it is mirrored (0 or 1)."""

    kind: Literal["flip", "crop+flip"]
    views: int = 0  # fixed ones of each image; 0: a new one in every epoch

    def draw(self, n: int, size: tuple[int, int], g: np.random.Generator) -> np.ndarray:
        """(n, 5): views of n images of this height and width. Areas are uniform, ratios log-uniform."""
        height, width = size
        u = g.random((n, 3 + 2 * _ATTEMPTS), np.float32)
        mirrored = u[:, :1] < 0.5
        if self.kind == "flip":
            return np.hstack([np.tile(np.array([0, 0, 1, 1], np.float32), (n, 1)), mirrored])
        area = AREA[0] + (AREA[1] - AREA[0]) * u[:, 3 : 3 + _ATTEMPTS]
        ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** u[:, 3 + _ATTEMPTS :]
        w, h = np.sqrt(area * ratio * (height / width)), np.sqrt(area / ratio * (width / height))  # (n, attempts)
        first = np.argmax((w <= 1) & (h <= 1), axis=1, keepdims=True)
        # In a very long image no crop may fit: then the first one is cut at the border.
        w, h = (np.minimum(np.take_along_axis(side, first, axis=1), 1) for side in (w, h))
        return np.hstack([u[:, 1:2] * (1 - w), u[:, 2:3] * (1 - h), w, h, mirrored]).astype(np.float32)

    def __call__(self, images: Tensor, views: np.ndarray, interpolation: Interpolation) -> Tensor:
        """(B, C, H, W) uint8 images in these views (B, 5), as float with the same range and size."""
        left, top, w, h, mirrored = torch.from_numpy(views).to(images.device).unbind(1)
        if self.kind == "flip":
            return torch.where(mirrored[:, None, None, None] > 0, images.flip(3), images).float()
        # From output to input coordinates, both in -1..1: a crop is never larger than the image, so nothing is shrunk.
        none = torch.zeros_like(w)
        across, down = [torch.where(mirrored > 0, -w, w), none, 2 * left + w - 1], [none, h, 2 * top + h - 1]
        theta = torch.stack([torch.stack(across, 1), torch.stack(down, 1)], 1)  # (B, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        cut = F.grid_sample(images.float(), grid, interpolation, padding_mode="border", align_corners=False)
        return cut.clamp(0, 255)  # a bicubic curve overshoots

    def sentence(self, values: str, why_not: str | None) -> str:
        """What becomes of cached outputs of frozen layers. `values`: their name; if there are none, `why_not`."""
        how = f'dataset.augment = "{self.kind}"'
        if self.views:
            cached = f"the {values} of each are cached" if values else f"nothing is cached: {why_not}"
            return f"{how}: every epoch draws one of {self.views} fixed views of each training image; {cached}"
        cached = f"the {values} are cached for evaluation only" if values else f"nothing is cached: {why_not}"
        return f"{how}: every epoch has a new view of each training image; {cached}"


def configured(settings: DatasetConfig) -> Augment | None:
    """None: training images do not vary."""
    return None if settings.augment == "none" else Augment(settings.augment, settings.views)


class FixedViews:
    """V views of each image of a dataset, the same ones in every run. View v of image i has the number i V + v; every
    second one is mirrored."""

    def __init__(self, augment: Augment, dataset: Dataset, interpolation: Interpolation, device: torch.device) -> None:
        self._augment, self._dataset, self._interpolation, self._device = augment, dataset, interpolation, device
        self.views = augment.views

    def __len__(self) -> int:
        return len(self._dataset) * self.views

    @cached_property
    def _table(self) -> np.ndarray:
        """(N V, 5)"""
        v, size, g = self.views, self._dataset.images.shape[2:], rng(0, "fixed views")
        blocks = (min(_BLOCK, len(self._dataset) - i) for i in range(0, len(self._dataset), _BLOCK))
        table = np.concatenate([self._augment.draw(n * v, (size[0], size[1]), g) for n in blocks])
        table[:, 4] = np.arange(len(table)) % v % 2
        return table

    def __call__(self, numbers: np.ndarray) -> Tensor:
        """(B, C, H, W) on the scale of stored pixels."""
        images = torch.from_numpy(self._dataset.images[numbers // self.views]).to(self._device)
        return self._augment(images, self._table[numbers], self._interpolation)

    @property
    def key(self) -> list[str | int]:
        """What the views depend on, besides the dataset."""
        return [self._augment.kind, self.views, self._interpolation]
