"""MOON: features are pulled towards those of the received model and away from those of the client's previous one.

Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), Eq. 3. The features are what the head sees.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, UserError


class Moon(Method):
    paper = "Li et al., CVPR 2021"

    mu: float = Field(1.0, ge=0, description="weight of the contrastive term")
    temperature: float = Field(0.5, gt=0, description="temperature of the contrastive term")

    def check(self, model: Model, init: Params) -> None:
        super().check(model, init)
        if self.tuning.frozen_name(model) in ("features", "patches"):
            raise UserError("method.name: Moon contrasts features, and those of this tuning are frozen")

    def remembers_role(self, role: str) -> bool:
        """What features depend on, of what is sent."""
        return role in self.roles() and role != "head" and not self.stays_role(role)

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        # Neither model moves during the phase: their features are computed once per round, not once per epoch.
        received = {**params, **ctx.down}
        previous = {**received, **ctx.memory}  # first round: the same as received
        return {
            "received": self.tuning.features(model, received, batch, ctx),
            "previous": self.tuning.features(model, previous, batch, ctx),
        }

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        z = self.tuning.features(model, params, batch, ctx)
        logits = self.tuning.head(model, params, z)
        cross_entropy = F.cross_entropy(logits, batch.y, reduction="none")
        drift = contrast(z, batch.extra["received"], batch.extra["previous"], self.temperature)
        return batch.mean(cross_entropy + self.mu * drift), {}


def contrast(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """(B, d) each -> (B,): how much nearer z is to the negative than to the positive (Eq. 3)."""
    similarity = torch.stack([F.cosine_similarity(z, other, dim=1) for other in (positive, negative)], dim=1)
    return -F.log_softmax(similarity / temperature, dim=1)[:, 0]
