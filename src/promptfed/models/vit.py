"""A pre-norm vision transformer (Dosovitskiy et al., ICLR 2021), a function of its weights, with slots for tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import Params, UserError
from ..seeding import torch_rng
from .base import Model, dense, normal
from .transformer import Activation, attend, block_weights, complete, layer_norm, norm_weights, project

# Prompts by the layer (0, 1, ...) that they enter: (T, width) for all samples, or (B, T, width) per sample.
Prompts = Mapping[int, Tensor]
# What a layer's prompts do to those of earlier layers. deep: replace them (VPT-deep; Jia et al., ECCV 2022).
# stay: are added, and the sequence grows (SGPT). With prompts at layer 0 only (VPT-shallow) both are the same.
Mode = Literal["deep", "stay"]


@dataclass
class ViT(Model):
    patch: int = 4
    depth: int = 8
    heads: int = 8
    eps: float = 1e-6
    activation: Activation = "gelu"
    at: str = "body"  # prefix of its weights' names

    def features(
        self, weights: Params, x: Tensor, tokens: Tensor | Prompts | None = None, mode: Mode = "deep"
    ) -> Tensor:
        """x (B, C, H, W) -> cls after the last norm (B, width). A tensor of tokens enters at layer 0."""
        prompts = {0: tokens} if isinstance(tokens, Tensor) else tokens
        return self.norm(weights, self.encode(weights, self.embed(weights, x), prompts, mode, first_tokens=1)[:, 0])

    def embed(self, weights: Params, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 1 + patches, width): cls and patches with their positions."""
        at = self.at
        h = F.conv2d(x, weights[f"{at}.patch.weight"], weights.get(f"{at}.patch.bias"), stride=self.patch)
        h = h.flatten(2).transpose(1, 2)
        cls = weights[f"{at}.cls"].expand(len(h), 1, -1)
        return torch.cat([cls, h], dim=1) + weights[f"{at}.position"]

    def encode(
        self,
        weights: Params,
        h: Tensor,
        prompts: Prompts | None = None,
        mode: Mode = "deep",
        *,
        start: int = 0,
        stop: int | None = None,
        first_tokens: int | None = None,
    ) -> Tensor:
        """The input of layer `start` -> the input of layer `stop` (default: the last layer's output).

        h (B, 1 + T + patches, width) has cls first, then the prompts that entered before, the latest ones in front,
        then the patches. Prompts of layers outside start..stop are ignored, so that a pass may be cut anywhere:
        encode(stop=4) of frozen values once, encode(start=4) of them as often as needed, [:, 0] in between to read cls.
        `first_tokens`: how many tokens are needed of the last layer, which then computes no others.
        """
        patches = (self.image[1] // self.patch) * (self.image[2] // self.patch)
        end = self.depth if stop is None else stop
        for i in range(start, end):
            if prompts is not None and i in prompts:
                rest = h[:, 1:] if mode == "stay" else h[:, -patches:]
                h = torch.cat([h[:, :1], prompts[i].expand(len(h), -1, -1), rest], dim=1)
            if i == 0 and f"{self.at}.norm_pre.weight" in weights:  # CLIP's; it sees the prompts of layer 0 (MaPLe)
                h = layer_norm(weights, f"{self.at}.norm_pre", h, self.eps)
            h = self.block(weights, f"{self.at}.blocks.{i}", h, first_tokens if i == end - 1 else None)
        return h

    def norm(self, weights: Params, h: Tensor) -> Tensor:
        return layer_norm(weights, f"{self.at}.norm", h, self.eps)

    def block(self, weights: Params, at: str, h: Tensor, first_tokens: int | None = None) -> Tensor:
        q, k, v = project(weights, at, h, self.heads, self.eps)
        return complete(
            weights, at, h[:, :first_tokens], attend(q[:, :, :first_tokens], k, v), self.eps, self.activation
        )


def vit(
    image: tuple[int, int, int],
    classes: int,
    seed: int,
    *,
    name: str = "vit-tiny",
    width: int = 128,
    depth: int = 8,
    heads: int = 8,
    patch: int = 4,
    mlp_ratio: int = 2,
) -> ViT:
    check_patches(name, image, patch)
    g = torch_rng(seed, "vit")
    weights = vit_weights(g, "body", image, patch, depth, width, mlp_ratio * width)
    weights |= head_weights(g, classes, width)
    return ViT(name, image, classes, weights, width, patch=patch, depth=depth, heads=heads)


def interpolate(position: Tensor, rows: int, columns: int) -> Tensor:
    """Position embeddings (1, 1 + n * n, width) for another grid: (1, 1 + rows * columns, width). That of cls stays.

    In double precision, so that the results of different machines are the same after rounding.
    """
    side, width = math.isqrt(position.shape[1] - 1), position.shape[2]
    if (rows, columns) == (side, side):
        return position
    grid = position[:, 1:].reshape(1, side, side, width).permute(0, 3, 1, 2).double()
    grid = F.interpolate(grid, (rows, columns), mode="bicubic", align_corners=False)
    return torch.cat([position[:, :1], grid.flatten(2).transpose(1, 2).to(position.dtype)], dim=1)


def check_patches(name: str, image: tuple[int, int, int], patch: int) -> None:
    _, height, columns = image
    if height % patch or columns % patch:
        raise UserError(
            f'dataset.size: backbone "{name}" needs image sides that are multiples of {patch}, got {height}x{columns}'
        )


def vit_weights(
    g: torch.Generator, at: str, image: tuple[int, int, int], patch: int, depth: int, width: int, hidden: int
) -> Params:
    """Fresh weights of everything but the head."""
    channels, height, columns = image
    weights: Params = {
        f"{at}.cls": normal(g, 1, 1, width),
        f"{at}.position": normal(g, 1, 1 + (height // patch) * (columns // patch), width),
    }
    weights[f"{at}.patch.weight"], weights[f"{at}.patch.bias"] = dense(g, width, channels, patch, patch)
    return weights | block_weights(g, f"{at}.blocks", depth, width, hidden) | norm_weights(f"{at}.norm", width)


def head_weights(g: torch.Generator, classes: int, width: int) -> Params:
    weight, bias = dense(g, classes, width)
    return {"head.weight": weight, "head.bias": bias}
