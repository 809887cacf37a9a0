"""Keys of groups: the query that they are compared with, and the group that each sample finds by them."""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ... import Batch, Model, Params, UserError
from ...models import ViT
from ...seeding import torch_rng
from ...tuning import FEATURES, as_vit
from ...tunings.heads import LinearHead


class Keys(LinearHead):
    groups: int = Field(20, ge=1, description="number of groups (G)")
    query: Literal["last"] | int = Field(
        "last", description="layers whose cls is compared with the keys: all, or a number of them"
    )
    query_norm: bool = Field(
        True,
        description="apply the final norm to the query, also if it is of fewer layers (the authors' code); without it, "
        "such queries are nearly parallel and may all select one group",
    )
    query_relu: bool = Field(False, description="apply a ReLU to the query (the authors' code)")

    def check(self, model: Model) -> None:
        depth = as_vit(model).depth
        if self.query != "last" and not 1 <= self.query <= depth:
            raise UserError(
                f'method.query = {self.query} must be "last" or a number of layers of "{model.name}": 1 to {depth}'
            )

    def start_keys(self, width: int, seed: int) -> Params:
        return {"keys": orthogonal(self.groups, width, torch_rng(seed, "keys"))}

    def frozen_name(self, model: Model) -> str:
        vit = as_vit(model)
        layers, norm = self.asked(vit)
        if (layers, norm, self.query_relu) == (vit.depth, True, False):
            return FEATURES  # the same numbers: one entry of the cache
        return f"query: cls after {layers} layers{', final norm' * norm}{', ReLU' * self.query_relu}"

    def frozen(self, model: Model, x: Tensor) -> Params:
        """The query h(x) (B, width), of the model without prompts."""
        vit, weights = as_vit(model), model.weights
        layers, norm = self.asked(vit)
        cls = vit.encode(weights, vit.embed(weights, x), stop=layers, first_tokens=1)[:, 0]
        cls = vit.norm(weights, cls) if norm else cls
        return {"query": cls.relu() if self.query_relu else cls}

    def asked(self, model: ViT) -> tuple[int, bool]:
        """After how many layers the query is read, and whether after the final norm."""
        return (model.depth, True) if self.query == "last" else (self.query, self.query_norm)

    def similarity(self, model: Model, params: Params, batch: Batch) -> Tensor:
        """cos(h(x), k_g), (B, G)."""
        query = batch.frozen["query"] if batch.frozen else self.frozen(model, batch.x)["query"]
        return F.normalize(query, dim=1) @ F.normalize(params["keys"], dim=1).T

    def select(self, model: Model, params: Params, batch: Batch) -> Tensor:
        """Eq. 5: the group of each sample, (B,)."""
        return self.similarity(model, params, batch).argmax(1)


def orthogonal(rows: int, width: int, g: torch.Generator) -> Tensor:
    """(rows, width): Xavier's uniform numbers, made orthonormal by Gram-Schmidt. Only `width` rows can be orthogonal to
    one another: of more, every `width` of them are."""
    bound = math.sqrt(6 / (rows + width))
    keys = torch.empty(rows, width).uniform_(-bound, bound, generator=g).double()
    for i in range(rows):
        for before in keys[i - i % width : i]:
            keys[i] -= (keys[i] @ before) * before
        keys[i] /= keys[i].norm()
    return keys.float()
