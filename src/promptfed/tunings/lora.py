"""LoRA: low-rank updates of the attention's projections."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from .. import Model, Params, UserError
from ..models.base import dense
from ..seeding import torch_rng
from .heads import LinearHead
from .in_layers import InLayers, Tower


class Lora(InLayers):
    """W + alpha / rank B A for the projections W (width, width) of queries, keys and values: Hu et al., "LoRA: Low-Rank
    Adaptation of Large Language Models" (ICLR 2022).

    A (rank, width) is random and B (width, rank) zero at the start, so that training begins at the frozen model.
    """

    roles: ClassVar[dict[str, str]] = {"lora.a.": "body", "lora.b.": "body", **LinearHead.roles}
    about = "LoRA + head"
    role_words: ClassVar[dict[str, str]] = {"body": "LoRA"}
    paper = "Zhang et al., ICASSP 2024"

    rank: int = Field(8, ge=1, description="rank of the updates (r)")
    alpha: float = Field(16.0, gt=0, description="updates are multiplied by alpha / rank")
    projections: tuple[Literal["q", "k", "v"], ...] = Field(
        ("q", "k", "v"), min_length=1, description="which projections are updated: of queries, keys, values"
    )

    def check(self, model: Model) -> None:
        super().check(model)
        width = min(model.weights[f"{layer}.qkv.weight"].shape[1] for layer in self.layers(model))
        if self.rank > width:
            raise UserError(f'method.rank = {self.rank} must be 1 to {width}, the width of "{model.name}"')

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def init(self, model: Model, seed: int) -> Params:
        g, made = torch_rng(seed, "lora"), self.start_head(model)
        for layer in self.layers(model):
            width = model.weights[f"{layer}.qkv.weight"].shape[1]
            for part in self.projections:
                made[f"lora.a.{layer}.{part}"] = dense(g, self.rank, width)[0]
                made[f"lora.b.{layer}.{part}"] = torch.zeros(width, self.rank)
        return made

    def weights(self, model: Model, params: Params, tower: Tower) -> Params:
        made, towers = {**model.weights, **params}, self.towers(model)
        for layer in self.layers(model):
            if tower in towers and layer.startswith(towers[tower]):
                frozen = zip("qkv", model.weights[f"{layer}.qkv.weight"].chunk(3), strict=True)
                made[f"{layer}.qkv.weight"] = torch.cat(
                    [w + self.update(params, layer, part) if part in self.projections else w for part, w in frozen]
                )
        return made

    def update(self, params: Params, layer: str, part: str) -> torch.Tensor:
        """(width, width)"""
        return self.scale * params[f"lora.b.{layer}.{part}"] @ params[f"lora.a.{layer}.{part}"]
