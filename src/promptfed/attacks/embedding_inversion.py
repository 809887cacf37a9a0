"""Inversion of patch embeddings, as which DP2FL's validation images are sent: they are a linear map of the pixels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.vit import ViT
from ..params import Params


def invert(tower: ViT, weights: Params, hidden: Tensor) -> Tensor:
    """(n, 1 + patches, width) -> the images (n, C, H, W), normalised: everybody has the frozen weights. Exact where a
    patch has no more pixels than its embedding numbers; otherwise those of the smallest norm."""
    w = {name: p.double() for name, p in weights.items() if name.startswith(f"{tower.at}.")}
    patches = (hidden.double() - w[f"{tower.at}.position"])[:, 1:]
    if f"{tower.at}.patch.bias" in w:
        patches = patches - w[f"{tower.at}.patch.bias"]
    flat = patches.flatten(0, 1).T  # (width, n * patches)
    pixels = torch.linalg.pinv(w[f"{tower.at}.patch.weight"].flatten(1)) @ flat
    columns = pixels.T.reshape(len(hidden), patches.shape[1], -1).transpose(1, 2)
    found: Tensor = F.fold(columns, tower.image[1:], tower.patch, stride=tower.patch)
    return found
