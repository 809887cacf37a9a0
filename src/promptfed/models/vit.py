"""A pre-norm vision transformer (Dosovitskiy et al., ICLR 2021), a function of its weights, with a slot for tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..params import Params
from ..seeding import torch_rng
from .base import Model, batched, dense, normal


@dataclass
class ViT(Model):
    patch: int = 4
    depth: int = 8
    heads: int = 8

    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        h = self.embed(weights, x)
        if tokens is not None:  # (B, 1 + T + patches, width)
            h = torch.cat([h[:, :1], tokens.expand(len(h), -1, -1), h[:, 1:]], dim=1)
        for i in range(self.depth):
            h = self.block(weights, f"body.blocks.{i}", h)
        return _layer_norm(weights, "body.norm", h[:, 0])

    def embed(self, weights: Params, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 1 + patches, width): cls and patches with their positions."""
        h = F.conv2d(x, weights["body.patch.weight"], weights["body.patch.bias"], stride=self.patch)
        h = h.flatten(2).transpose(1, 2)
        cls = weights["body.cls"].expand(len(h), 1, -1)
        return torch.cat([cls, h], dim=1) + weights["body.position"]

    def block(self, weights: Params, at: str, h: Tensor) -> Tensor:
        h = h + self.attention(weights, at, _layer_norm(weights, f"{at}.norm1", h))
        m = _linear(weights, f"{at}.mlp.in", _layer_norm(weights, f"{at}.norm2", h))
        return h + _linear(weights, f"{at}.mlp.out", F.gelu(m))

    def attention(self, weights: Params, at: str, h: Tensor) -> Tensor:
        b, t, width = h.shape
        qkv = _linear(weights, f"{at}.qkv", h).reshape(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        return _linear(weights, f"{at}.proj", attend(q, k, v).transpose(1, 2).reshape(b, t, width))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention. The fused kernel has no vmap rule on a CPU, so stacked clients take the written-out form."""
    if batched(q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


def _linear(weights: Params, at: str, h: Tensor) -> Tensor:
    return F.linear(h, weights[f"{at}.weight"], weights[f"{at}.bias"])


def _layer_norm(weights: Params, at: str, h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], weights[f"{at}.weight"], weights[f"{at}.bias"], eps=1e-6)


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
    channels, height, columns = image
    if height % patch or columns % patch:
        raise UserError(
            f'dataset.size: backbone "{name}" needs image sides that are multiples of {patch}, got {height}x{columns}'
        )
    g = torch_rng(seed, "vit")
    weights: Params = {
        "body.cls": normal(g, 1, 1, width),
        "body.position": normal(g, 1, 1 + (height // patch) * (columns // patch), width),
    }
    weights["body.patch.weight"], weights["body.patch.bias"] = dense(g, width, channels, patch, patch)

    def linear(at: str, outputs: int, inputs: int) -> None:
        weights[f"{at}.weight"], weights[f"{at}.bias"] = dense(g, outputs, inputs)

    def layer_norm(at: str) -> None:
        weights[f"{at}.weight"], weights[f"{at}.bias"] = torch.ones(width), torch.zeros(width)

    for i in range(depth):
        at = f"body.blocks.{i}"
        layer_norm(f"{at}.norm1")
        linear(f"{at}.qkv", 3 * width, width)
        linear(f"{at}.proj", width, width)
        layer_norm(f"{at}.norm2")
        linear(f"{at}.mlp.in", mlp_ratio * width, width)
        linear(f"{at}.mlp.out", width, mlp_ratio * width)
    layer_norm("body.norm")
    linear("head", classes, width)
    return ViT(name, image, classes, weights, width, patch=patch, depth=depth, heads=heads)
