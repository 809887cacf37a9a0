"""BitFit: the biases alone."""

from __future__ import annotations

from typing import ClassVar

from .. import Model, Params, UserError
from .in_layers import InLayers


class Bias(InLayers):
    """Every bias of a frozen backbone: Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for
    Transformer-based Masked Language-models" (ACL 2022)."""

    about = "biases + head"
    role_words: ClassVar[dict[str, str]] = {"body": "biases"}
    backbones = "any"

    def biases(self, model: Model) -> Params:
        first = tuple(self.towers(model).values())
        return {name: p for name, p in model.weights.items() if name.startswith(first) and name.endswith(".bias")}

    def check(self, model: Model) -> None:
        if not self.biases(model):
            raise UserError(f'backbone.name = "{model.name}" has no biases to tune')

    def init(self, model: Model, seed: int) -> Params:
        return {**{name: p.clone() for name, p in self.biases(model).items()}, **self.start_head(model)}
