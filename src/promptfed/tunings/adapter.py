"""Adapters between the layers of a transformer."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from .. import Model, Params
from ..models.base import dense
from ..seeding import torch_rng
from .in_layers import InLayers


class Adapter(InLayers):
    """Two bottlenecks in every layer of a frozen transformer, after attention and after the MLP: Houlsby et al.,
    "Parameter-Efficient Transfer Learning for NLP" (ICML 2019).

    h + W_out gelu(W_in h + b_in) + b_out, where W_out and b_out are zero at the start: training begins at the frozen
    model.
    """

    about = "adapter layers + head"
    role_words: ClassVar[dict[str, str]] = {"body": "adapter layers"}

    bottleneck: int = Field(16, ge=1, description="width of the adapters")

    def init(self, model: Model, seed: int) -> Params:
        g, made = torch_rng(seed, "adapter layers"), self.start_head(model)
        for layer in self.layers(model):
            width = model.weights[f"{layer}.qkv.weight"].shape[1]
            for at in (f"{layer}.adapter1", f"{layer}.adapter2"):
                made[f"{at}.in.weight"], made[f"{at}.in.bias"] = dense(g, self.bottleneck, width)
                made[f"{at}.out.weight"] = torch.zeros(width, self.bottleneck)
                made[f"{at}.out.bias"] = torch.zeros(width)
        return made
