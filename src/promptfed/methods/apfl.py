"""APFL: besides the shared model, every client has one of its own; it predicts with a mix of both and learns its share.

Deng, Kamani & Mahdavi, "Adaptive Personalized Federated Learning" (2020), Algorithm 1 with an adaptive alpha.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Model, Params, Phase
from .. import params as P
from .own_model import OWN, OwnModel, Twin

_SHARE = "share"


class Blend(Twin):
    """A client predicts with alpha own + (1 - alpha) shared weights."""

    roles: ClassVar[dict[str, str]] = {f"{OWN}.": OWN, "alpha": _SHARE}
    about = "model of its own, mixed"

    alpha: float = Field(0.5, ge=0, le=1, description="initial share of the client's own model in its mix (alpha)")

    def init(self, model: Model, seed: int) -> Params:
        return {**super().init(model, seed), "alpha": torch.tensor(self.alpha)}

    def personal(self, params: Params) -> Params:
        own, share = P.under(params, OWN), params["alpha"].clamp(0, 1)
        return {**params, **{name: share * p + (1 - share) * params[name] for name, p in own.items()}}


class Apfl(OwnModel):
    paper = "Deng et al., 2020"
    private = (OWN, _SHARE)
    wrapper = Blend

    adaptive: bool = Field(True, description="whether clients learn alpha, or keep its initial value")

    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in super().roles() if self.adaptive or role != _SHARE)

    def phase(self, roles: tuple[str, ...] | None = None, lr: float | None = None, **settings: Any) -> Phase:
        """Without weight decay on alpha, which is no weight."""
        made = super().phase(roles, lr, **settings)
        alone = {_SHARE: made.train[_SHARE].model_copy(update={"weight_decay": 0.0})} if _SHARE in made.train else {}
        return replace(made, train={**made.train, **alone})

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """The shared model descends its own loss, the own model and alpha that of the mix."""
        still = {name: p if self.stays(name) else p.detach() for name, p in params.items()}
        mixed, stats = super().loss(model, still, batch, ctx)
        return self.received_loss(model, params, batch, ctx) + mixed, stats

    def finish(self, params: Params, ctx: Context) -> Params:
        return {**params, "alpha": params["alpha"].clamp(0, 1)}
