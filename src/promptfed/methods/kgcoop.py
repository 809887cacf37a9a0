"""KgCoOp: a text context whose class features stay near those of CLIP's hand-written sentence.

Yao et al., "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization" (CVPR 2023), averaged.
"""

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params
from ..tuning import as_clip
from ..tunings.text import TextContext
from .text_prompts import TextMethod


class KgCoOp(TextMethod):
    """Cross-entropy + weight * mean over classes of |w_c - w_c^zero-shot|^2, both of unit length."""

    paper = "Yao et al., CVPR 2023"

    tuning: TextContext = Field(default_factory=TextContext, description="what is trained")
    knowledge: float = Field(8.0, ge=0, description="weight of the distance to the zero-shot text features (lambda)")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        clip = as_clip(model)
        text = self.tuning.text(model, params)  # (classes, d)
        logits = clip.logits(model.weights, self.tuning.features(model, params, batch, ctx), text)
        distance = (text - clip.zero_shot(model.weights)).square().sum(1).mean()
        task = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        return task + self.knowledge * distance, {}
