"""The pre-norm transformer layer that image and text towers share, as functions of flat weights."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..params import Params
from .base import batched, dense

Activation = Literal["gelu", "quick_gelu"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention over (B, heads, T, d); mask (queries, keys) is True where a query may attend.

    The fused kernel has no vmap rule on a CPU, so stacked clients take the written-out form.
    """
    if batched(q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def project(weights: Params, at: str, h: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of a layer: (B, T, width) -> queries, keys and values, each (B, heads, T, width / heads)."""
    b, t, width = h.shape
    qkv = linear(weights, f"{at}.qkv", layer_norm(weights, f"{at}.norm1", h, eps))
    q, k, v = qkv.reshape(b, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    return q, k, v


def complete(weights: Params, at: str, h: Tensor, mixed: Tensor, eps: float, activation: Activation) -> Tensor:
    """The second half: the heads' output (B, heads, T, d) is added to h (B, T, width), then the MLP's."""
    m = linear(weights, f"{at}.proj", mixed.transpose(1, 2).reshape(h.shape))
    h = h + adapt(weights, f"{at}.adapter1", scale(weights, f"{at}.scale1", m))
    m = linear(weights, f"{at}.mlp.in", layer_norm(weights, f"{at}.norm2", h, eps))
    m = linear(weights, f"{at}.mlp.out", activate(m, activation))
    return h + adapt(weights, f"{at}.adapter2", scale(weights, f"{at}.scale2", m))


def scale(weights: Params, at: str, h: Tensor) -> Tensor:
    """LayerScale (Touvron et al., ICCV 2021), in models that have it."""
    return h * weights[at] if at in weights else h


def adapt(weights: Params, at: str, h: Tensor) -> Tensor:
    """A bottleneck adapter (Houlsby et al., ICML 2019), where a tuning has added one."""
    if f"{at}.in.weight" not in weights:
        return h
    return h + linear(weights, f"{at}.out", F.gelu(linear(weights, f"{at}.in", h)))


def activate(h: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu":
        return F.gelu(h)
    # h sigmoid(1.702 h), in a form of which autograd keeps one tensor instead of two
    return F.silu(1.702 * h) / 1.702


def linear(weights: Params, at: str, h: Tensor) -> Tensor:
    return F.linear(h, weights[f"{at}.weight"], weights[f"{at}.bias"])


def layer_norm(weights: Params, at: str, h: Tensor, eps: float) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], weights[f"{at}.weight"], weights[f"{at}.bias"], eps=eps)


def norm_weights(at: str, width: int) -> Params:
    return {f"{at}.weight": torch.ones(width), f"{at}.bias": torch.zeros(width)}


def block_weights(g: torch.Generator, at: str, depth: int, width: int, hidden: int) -> Params:
    """Fresh weights of `depth` layers with an MLP of `hidden` units, under `at`.0, `at`.1, ..."""
    weights: Params = {}

    def fresh(name: str, outputs: int, inputs: int) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = dense(g, outputs, inputs)

    for i in range(depth):
        weights |= norm_weights(f"{at}.{i}.norm1", width)
        fresh(f"{at}.{i}.qkv", 3 * width, width)
        fresh(f"{at}.{i}.proj", width, width)
        weights |= norm_weights(f"{at}.{i}.norm2", width)
        fresh(f"{at}.{i}.mlp.in", hidden, width)
        fresh(f"{at}.{i}.mlp.out", width, hidden)
    return weights
