"""PromptFolio: text features are a fixed mixture of those of a shared and those of the client's own context.

Pan et al., "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and Method" (NeurIPS 2024).
"""

from pydantic import Field
from torch import Tensor

from .. import Model, Params
from .text_prompts import TwoContexts, TwoContextsMethod


class Portfolio(TwoContexts):
    own_share: float = Field(0.2, ge=0, le=1, description="share of the client's own text features (theta)")

    def text(self, model: Model, params: Params) -> Tensor:
        """(classes, d): (1 - theta) h(shared) + theta h(own)."""
        shared = self.text_of(model, params["context"])
        return shared + self.own_share * (self.text_of(model, params["own"]) - shared)


class PromptFolio(TwoContextsMethod):
    paper = "Pan et al., NeurIPS 2024"
    tuned = Portfolio

    tuning: Portfolio = Field(default_factory=Portfolio, description="what is trained")
