"""ProGrad: the context only moves in directions that do not contradict CLIP's own predictions.

Zhu et al., "Prompt-aligned Gradient for Prompt Tuning" (ICCV 2023), averaged.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params
from ..tunings.text import TextContext
from .text_prompts import TextMethod


class ProGrad(TextMethod):
    """Of the gradient of cross-entropy, the part opposed to the gradient of KL(zero-shot || prompted) is removed."""

    paper = "Zhu et al., ICCV 2023"

    tuning: TextContext = Field(default_factory=TextContext, description="what is trained")
    alignment: float = Field(1.0, ge=0, description="share of the conflicting part that is removed (lambda)")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        moving = {name: p for name, p in params.items() if ctx.trains(self.tuning.role(name))}
        features = self.tuning.features(model, params, batch, ctx)
        zero_shot = model.classify(model.weights, features).softmax(-1)  # (B, classes)

        def both(trained: Params) -> tuple[Tensor, Tensor]:
            logits = self.tuning.head(model, {**params, **trained}, features)
            divergence = F.kl_div(logits.log_softmax(-1), zero_shot, reduction="none").sum(-1)
            return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), batch.mean(divergence)

        with torch.no_grad():  # of the outer graph: vjp() keeps its own
            (task, _), gradient, *_ = torch.func.vjp(both, moving)
            one, zero = torch.ones_like(task), torch.zeros_like(task)
            of_task, of_general = gradient((one, zero))[0], gradient((zero, one))[0]
        # The value of cross-entropy, with the aligned direction as its gradient.
        value = task.detach()
        for name, p in moving.items():
            value = value + (align(of_task[name], of_general[name], self.alignment) * (p - p.detach())).sum()
        return value, {}


def align(task: Tensor, general: Tensor, share: float) -> Tensor:
    """The first gradient without (a share of) its part opposed to the second one, if there is any."""
    opposed = (task * general).sum().clamp(max=0) / general.square().sum().clamp(min=1e-30)
    return task - share * opposed * general
