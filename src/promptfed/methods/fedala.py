"""FedALA: before it trains, a client learns how much of the received head it takes over, weight by weight.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning" (AAAI 2023).
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Optimizer, Params, Phase
from .. import params as P
from ..phases import Normal
from ..tuning import Transparent

_BLEND = "blend"


class Blending(Transparent):
    """A number between 0 and 1 for each weight of the head."""

    roles: ClassVar[dict[str, str]] = {f"{_BLEND}.": _BLEND}
    about = "blend of heads"

    def init(self, model: Model, seed: int) -> Params:
        first = self.inner.init(model, seed)
        heads = {name: torch.ones_like(p) for name, p in first.items() if self.inner.role(name) == "head"}
        return {**first, **P.nested(_BLEND, heads)}


class FedAla(Method):
    """Everything below the head is taken over as received."""

    paper = "Zhang et al., AAAI 2023"
    private = (_BLEND,)
    memory = ("head",)
    needs = ("head",)
    wrapper = Blending

    blend_epochs: int = Field(1, ge=0, description="epochs on the blend, before a round and before an evaluation")
    blend_lr: float = Field(1.0, gt=0, description="learning rate of the blend (eta)")

    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in super().roles() if role != _BLEND)  # it has a phase of its own

    def blending(self) -> Phase:
        return Phase({_BLEND: Optimizer(lr=self.blend_lr)}, self.batch_size, self.blend_epochs, name=_BLEND)

    def phases(self, round: int) -> tuple[Phase, ...]:
        """In the first round clients have nothing to blend."""
        return (self.phase(),) if round == 1 else (self.blending(), self.phase())

    def adapt(self) -> tuple[Phase, ...]:
        return (self.blending(), *super().adapt())

    def blended(self, params: Params, ctx: Context) -> Params:
        """With heads W received + (1 - W) own, where `own` is what the client had after its last round."""
        found = {n: w * ctx.down[n] + (1 - w) * ctx.memory[n] for n, w in P.under(params, _BLEND).items()}
        return {**params, **found}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        return super().loss(model, self.blended(params, ctx) if ctx.within(_BLEND) else params, batch, ctx)

    def step(self, grad: Callable[[Params], Params], params: Params, phase: Phase, normal: Normal) -> Params:
        """W <- clip(W - eta gradient) to [0, 1]: the direction that takes SGD there."""
        found = grad(params)
        for name in found:
            if self.tuning.role(name) == _BLEND:
                w, lr = params[name].detach(), phase.train[_BLEND].lr
                found[name] = (w - (w - lr * found[name]).clamp(0, 1)) / lr
        return found

    def end_phase(self, params: Params, ctx: Context) -> Params:
        return self.blended(params, ctx) if ctx.within(_BLEND) else params
