"""Context vectors that a network makes of the class names."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from .. import Model, Params, UserError
from ..models.base import dense, normal
from ..models.transformer import attend, linear
from ..seeding import torch_rng
from ..tuning import as_clip
from .text import TextContext


class GeneratedContext(TextContext):
    """A text context generated from the names of the classes by cross-attention: Qiu et al., "Federated Text-driven
    Prompt Generation for Vision-Language Models" (ICLR 2024)."""

    roles: ClassVar[dict[str, str]] = {"generator.": "body"}
    about = "generator of a text context"
    paper = "Qiu et al., ICLR 2024"

    context: int = Field(4, ge=1, description=TextContext.model_fields["context"].description)
    heads: int = Field(4, ge=1, description="heads of the cross-attention; the width of the text tower is a multiple")

    def check(self, model: Model) -> None:
        super().check(model)
        width = as_clip(model).text_width
        if width % self.heads:
            raise UserError(f"method.heads = {self.heads} must divide {width}, the width of the text tower")

    def init(self, model: Model, seed: int) -> Params:
        clip, g = as_clip(model), torch_rng(seed, "generator")
        width, made = clip.text_width, {}
        made["generator.queries"] = normal(g, self.context, width)
        for name, inputs in (("key", clip.embedding), ("value", clip.embedding), ("in", width), ("out", width)):
            at = f"generator.{name}"
            made[f"{at}.weight"], made[f"{at}.bias"] = dense(g, width, inputs)
        return made

    def text(self, model: Model, params: Params) -> Tensor:
        return self.text_of(model, self.generate(model, params))

    def generate(self, model: Model, params: Params) -> Tensor:
        """(context, text width): queries attend to the zero-shot text features of all classes, then an MLP."""
        names = as_clip(model).zero_shot(model.weights)  # (classes, d)

        def split(h: Tensor) -> Tensor:  # (rows, width) -> (1, heads, rows, width / heads)
            return h.reshape(len(h), self.heads, -1).transpose(0, 1)[None]

        keys, values = (split(linear(params, f"generator.{name}", names)) for name in ("key", "value"))
        mixed = attend(split(params["generator.queries"]), keys, values)[0].transpose(0, 1).flatten(1)
        return linear(params, "generator.out", linear(params, "generator.in", mixed).relu())
