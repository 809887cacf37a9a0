"""CLIP's modified ResNet (Radford et al., ICML 2021, Section 2.4), a function of its weights.

It differs from the usual one (He et al., CVPR 2016) in a stem of three convolutions and an average pooling, in strides
that are average poolings before a convolution (Zhang, ICML 2019), and in an attention pooling at the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..params import Params
from .base import Model
from .transformer import attend, linear


@dataclass
class ResNet(Model):
    """Batch norm is in inference mode: an affine map per channel, which is multiplied into its convolution."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # in each stage
    heads: int = 32
    at: str = "body.image"  # prefix of its weights' names

    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """x (B, C, H, W) -> (B, d)."""
        stem = f"{self.at}.stem"
        x = F.relu(_convolve(weights, f"{stem}.0", x, stride=2, padding=1))
        for i in (1, 2):
            x = F.relu(_convolve(weights, f"{stem}.{i}", x, padding=1))
        x = F.avg_pool2d(x, 2)
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = self.bottleneck(weights, f"{self.at}.stages.{stage}.{block}", x, stride)
        return self.pool(weights, f"{self.at}.pool", x)

    def bottleneck(self, weights: Params, at: str, x: Tensor, stride: int) -> Tensor:
        h = F.relu(_convolve(weights, f"{at}.0", x))
        h = F.relu(_convolve(weights, f"{at}.1", h, padding=1))
        h = _convolve(weights, f"{at}.2", F.avg_pool2d(h, stride) if stride > 1 else h)
        if f"{at}.skip.conv" in weights:  # the first block of a stage, which changes the number of channels
            x = _convolve(weights, f"{at}.skip", F.avg_pool2d(x, stride) if stride > 1 else x)
        return F.relu(h + x)

    def pool(self, weights: Params, at: str, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, d): the mean over all positions attends to itself and to the positions."""
        h = x.flatten(2).transpose(1, 2)
        h = torch.cat([h.mean(1, keepdim=True), h], dim=1) + weights[f"{at}.position"]  # (B, 1 + H W, C)
        b, _, width = h.shape

        def part(name: str, rows: Tensor) -> Tensor:  # (B, heads, rows, C / heads)
            return linear(weights, f"{at}.{name}", rows).reshape(b, -1, self.heads, width // self.heads).transpose(1, 2)

        mixed = attend(part("q", h[:, :1]), part("k", h), part("v", h))
        return linear(weights, f"{at}.out", mixed.reshape(b, width))


def _convolve(weights: Params, at: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    kernel = weights[f"{at}.conv"] * weights[f"{at}.scale"][:, None, None, None]
    return F.conv2d(x, kernel, weights[f"{at}.shift"], stride, padding)
