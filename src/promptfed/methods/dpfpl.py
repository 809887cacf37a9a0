"""DP-FPL: the client's own prompt is split by rank in every step, and gradients of its factors are clipped and noised.

Tran et al., "Privacy-Preserving Personalized Federated Prompt Learning for Multimodal Large Language Models"
(ICLR 2025).
"""

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from .. import Model, Params, Phase
from ..phases import Normal
from ..precision import full
from .text_prompts import TwoContexts, TwoContextsMethod


class Sum(TwoContexts):
    """The client's context is p_G + p_L: shared, and its own."""

    def text(self, model: Model, params: Params) -> Tensor:
        return self.text_of(model, params["context"] + params["own"])


class DpFpl(TwoContextsMethod):
    """The noise is on the client's own prompt, which stays with it, and is not accounted for; what is sent is protected
    by `privacy.*`, as that of any method."""

    paper = "Tran et al., ICLR 2025"
    tuned = Sum

    tuning: Sum = Field(default_factory=Sum, description="what is trained")
    rank: int = Field(8, ge=1, description="rank of the factors of the own context")
    clip: float = Field(0.1, gt=0, description="L2 norm that the gradient of a factor is clipped to in each step")
    noise: float = Field(1.0, ge=0, description="deviation of the noise on these gradients, in units of clip")

    def step(self, grad: Callable[[Params], Params], params: Params, phase: Phase, normal: Normal) -> Params:
        """p_L = u v + r. One step of SGD on u and v, as the direction that takes p_L there; r stays."""
        found = grad(params)
        if "own" in found:
            with full(found["own"].device):
                u, v = factors(params["own"].detach(), self.rank)
                lr, of_product = phase.train["own"].lr, found["own"]
                of_u, of_v = (self.noised(g, normal) for g in (of_product @ v.mT, u.mT @ of_product))
                found["own"] = (u @ v - (u - lr * of_u) @ (v - lr * of_v)) / lr
        return found

    def noised(self, gradient: Tensor, normal: Normal) -> Tensor:
        norm = gradient.square().sum((-2, -1), keepdim=True).sqrt()
        clipped = gradient * (self.clip / norm.clamp(min=self.clip))
        return clipped + self.noise * self.clip * normal(*gradient.shape[-2:])

    def instead(self, shared: Tensor) -> Tensor:
        return torch.zeros_like(shared)


def factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(..., L, width) -> u (..., L, rank), v (..., rank, width): u v is the nearest matrix of that rank."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = values[..., :rank].sqrt()
    return left[..., :rank] * root[..., None, :], root[..., None] * right[..., :rank, :]
