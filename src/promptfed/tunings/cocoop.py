"""Context vectors that depend on the image."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.func import vmap

from .. import Model, Params
from ..models.base import dense
from ..models.transformer import linear
from ..seeding import torch_rng
from ..tuning import as_clip
from .text import TextContext

_WORDS = "a photo of a"  # the context starts from their embeddings if it has as many vectors
_SHRINK = 16  # width of the features over that of the meta-net's hidden layer
_AT_ONCE = 16  # images whose sentences are computed together


class ConditionalContext(TextContext):
    """A text context to which a small network (meta-net) adds a vector that it makes of the image features: Zhou et
    al., "Conditional Prompt Learning for Vision-Language Models" (CVPR 2022)."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "meta.": "body"}
    about = "text context + meta-net"
    paper = "Zhou et al., CVPR 2022, averaged"

    context: int = Field(4, ge=1, description=TextContext.model_fields["context"].description)

    def init(self, model: Model, seed: int) -> Params:
        clip, g = as_clip(model), torch_rng(seed, "meta-net")
        hidden = max(clip.embedding // _SHRINK, 1)
        made, words = super().init(model, seed), clip.words(_WORDS)
        if len(words) == self.context:
            made["context"] = words
        made["meta.in.weight"], made["meta.in.bias"] = dense(g, hidden, clip.embedding)
        made["meta.out.weight"], made["meta.out.bias"] = dense(g, clip.text_width, hidden)
        return made

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        """Every image has sentences of its own: (B, d) -> (B, classes)."""
        shift = linear(params, "meta.out", linear(params, "meta.in", features).relu())  # (B, text width)

        def logits(image: Tensor, shift: Tensor) -> Tensor:
            text = self.text_of(model, params["context"] + shift)
            return as_clip(model).logits(model.weights, image, text)

        return vmap(logits, chunk_size=_AT_ONCE)(features, shift)
