"""What tunings inside the layers of a frozen backbone have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Model, Params, UserError
from ..models import CLIP
from ..tuning import FEATURES, NEEDS_VIT, Family
from .heads import LinearHead, scaled

Tower = Literal["image", "text"]


class InLayers(LinearHead):
    """Changes inside one or both towers. A linear head is trained as well; a CLIP classifies by its text features."""

    roles: ClassVar[dict[str, str]] = {"body.": "body", **LinearHead.roles}
    family = Family.LAYERS
    per_class = False  # on a CLIP, which has no head
    backbones = "transformers"
    uncached = "the first layer is tuned"

    tower: Literal["all", "image", "text"] = Field(
        "all", description="which towers of a CLIP are tuned; other backbones have an image tower alone"
    )

    def towers(self, model: Model) -> dict[Tower, str]:
        """The towers that are tuned, and how the names of their weights begin."""
        known: dict[Tower, str] = {"image": "body."}
        if isinstance(model, CLIP):
            known = {"image": "body.image.", "text": "body.text."}
        if self.tower == "all":
            return known
        if self.tower not in known:
            raise UserError(f'method.tower = "{self.tower}": backbone "{model.name}" has none (allowed: all, image)')
        return {self.tower: known[self.tower]}

    def layers(self, model: Model) -> list[str]:
        """The transformer layers of these towers: how the names of their weights begin."""
        first, last = tuple(self.towers(model).values()), ".qkv.weight"
        return [name.removesuffix(last) for name in model.weights if name.startswith(first) and name.endswith(last)]

    def check(self, model: Model) -> None:
        if not self.layers(model):
            raise UserError(f'backbone.name = "{model.name}" has no transformer layers to tune: {NEEDS_VIT}')

    def weights(self, model: Model, params: Params, tower: Tower) -> Params:
        """All weights, with those of this tower as tuned."""
        return {**model.weights, **params}

    def frozen_name(self, model: Model) -> str:
        return "" if "image" in self.towers(model) else FEATURES

    def frozen(self, model: Model, x: Tensor) -> Params:
        return {"features": model.features(model.weights, x)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        if batch.frozen:
            return batch.frozen["features"]
        return scaled(params, model.features(self.weights(model, params, "image"), batch.x, batch.tokens))

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return model.classify(self.weights(model, params, "text"), features)
