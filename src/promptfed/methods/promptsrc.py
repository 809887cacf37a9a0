"""PromptSRC: prompts in both towers, whose features and predictions stay near those of CLIP without prompts.

Khattak et al., "Self-regulating Prompts: Foundational Model Adaptation without Forgetting" (ICCV 2023), averaged.
"""

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, Tuning
from .. import params as P
from ..seeding import torch_rng
from ..tuning import as_clip
from ..tunings.maple import BothTowers, image_tower
from ..tunings.tokens import uniform
from .text_prompts import TextMethod


class Independent(BothTowers):
    """Image prompts have values of their own."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "deep.": "body", "tokens.": "body"}
    about = "text prompts + image prompts"

    context: int = Field(4, ge=1, description=BothTowers.model_fields["context"].description)

    def init(self, model: Model, seed: int) -> Params:
        g, tower = torch_rng(seed, "independent"), image_tower(model)
        made = self.text_prompts(model, g)
        made |= {f"tokens.{i}": uniform(tower, g, self.context) for i in range(self.depth)}
        return P.to(made, model.weights["body.scale"].device)

    def image_prompts(self, params: Params) -> dict[int, Tensor]:
        return {i: params[f"tokens.{i}"] for i in range(self.depth)}


class PromptSrc(TextMethod):
    """Cross-entropy + weighted L1 distances to CLIP's image and text features + KL(zero-shot || prompted), all of them
    means over coordinates or classes."""

    paper = "Khattak et al., ICCV 2023, averaged"
    tuned: ClassVar[type[Tuning]] = Independent

    tuning: Independent = Field(default_factory=Independent, description="what is trained")
    image_weight: float = Field(10.0, ge=0, description="weight of the distance of image features (lambda_1)")
    text_weight: float = Field(25.0, ge=0, description="weight of the distance of text features (lambda_2)")
    logits_weight: float = Field(1.0, ge=0, description="weight of the divergence of predictions")

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        return {"features": model.features(model.weights, batch.x)}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        clip = as_clip(model)
        image, text = self.tuning.features(model, params, batch, ctx), self.tuning.text(model, params)
        given, zero_shot = batch.extra["features"], clip.zero_shot(model.weights)
        logits = clip.logits(model.weights, image, text)
        said = clip.logits(model.weights, given, zero_shot).log_softmax(-1)
        divergence = (said.exp() * (said - logits.log_softmax(-1))).mean(-1)
        task = F.cross_entropy(logits, batch.y, reduction="none") + self.logits_weight * divergence
        per_sample = batch.mean(task + self.image_weight * (image - given).abs().mean(-1))
        return per_sample + self.text_weight * (text - zero_shot).abs().mean(), {}
