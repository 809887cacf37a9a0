"""Plain re-implementations, slow and obvious, to hold the models against."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from promptfed.params import Params

Part = Callable[[str], tuple[Tensor, Tensor]]  # norm1, qkv, proj, norm2, mlp.in, mlp.out -> weight and bias


def parts(weights: Params, at: str) -> Part:
    """The parts of a layer under our own names."""
    return lambda part: (weights[f"{at}.{part}.weight"], weights[f"{at}.{part}.bias"])


def norm(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def layer(h: Tensor, part: Part, heads: int, eps: float, quick: bool, causal: bool = False) -> Tensor:
    """A pre-norm transformer layer, head by head. h (B, T, width)."""

    def linear(name: str, x: Tensor) -> Tensor:
        weight, bias = part(name)
        return x @ weight.T + bias

    q, k, v = linear("qkv", norm(h, *part("norm1"), eps)).chunk(3, dim=-1)
    size, found = h.shape[-1] // heads, []
    for i in range(heads):
        at = slice(i * size, (i + 1) * size)
        scores = torch.einsum("bid,bjd->bij", q[..., at], k[..., at]) / math.sqrt(size)
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        found.append(torch.einsum("bij,bjd->bid", scores.exp() / scores.exp().sum(-1, keepdim=True), v[..., at]))
    h = h + linear("proj", torch.cat(found, dim=-1))
    m = linear("mlp.in", norm(h, *part("norm2"), eps))
    m = m * torch.sigmoid(1.702 * m) if quick else m * 0.5 * (1 + torch.erf(m / math.sqrt(2)))
    return h + linear("mlp.out", m)


def shaken(weights: Params, scale: float = 0.1, dtype: torch.dtype = torch.float32) -> Params:
    """Norms that do nothing and biases of zero would hide a mistake in their place."""
    g = torch.Generator().manual_seed(1)
    return {name: (p + scale * torch.randn(p.shape, generator=g)).to(dtype) for name, p in weights.items()}
