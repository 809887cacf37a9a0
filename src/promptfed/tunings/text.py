"""Context vectors in the text tower of a CLIP."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from .. import Model, Params
from ..models.base import normal
from ..models.text import Sentences
from ..seeding import torch_rng
from ..tuning import Family, OnFeatures, as_clip


class TextContext(OnFeatures):
    """Context vectors before, around or after the class name, in a frozen CLIP: Zhou et al., "Learning to Prompt for
    Vision-Language Models" (IJCV 2022); federated as PromptFL by Guo et al. (2022)."""

    roles: ClassVar[dict[str, str]] = {"context": "body"}
    about = "text context"
    family = Family.TEXT
    paper = "Guo et al., 2022"
    backbones = "CLIP"

    context: int = Field(16, ge=1, description="number of context vectors")
    name_position: Literal["front", "middle", "end"] = Field("end", description="where the class name stands")

    def check(self, model: Model) -> None:
        self.sentences(model)

    def sentences(self, model: Model, length: int | None = None) -> Sentences:
        """With slots for so many vectors, by default for the tuning's own."""
        return as_clip(model).sentences(context=length or self.context, position=self.name_position)

    def init(self, model: Model, seed: int) -> Params:
        return {"context": normal(torch_rng(seed, "context"), self.context, as_clip(model).text_width)}

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return as_clip(model).logits(model.weights, features, self.text(model, params))

    def text(self, model: Model, params: Params) -> Tensor:
        """(classes, d)"""
        return self.text_of(model, params["context"])

    def text_of(self, model: Model, context: Tensor) -> Tensor:
        """(classes, d) of one context, (L, width), of any length."""
        return as_clip(model).text(model.weights, self.sentences(model, context.shape[-2]), context)
