"""Per-FedAvg: a start from which one local step makes a good model (model-agnostic meta-learning).

Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach"
(NeurIPS 2020), Eq. 3-5. Every step takes one half of the batch for the inner step and the other for the outer one.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Optimizer, Params, Phase


class PerFedAvg(Method):
    paper = "Fallah et al., NeurIPS 2020"

    alpha: float = Field(0.01, gt=0, description="learning rate of the inner step and of the adaptation")
    adapt_steps: int = Field(1, ge=1, description="steps of adaptation before evaluation")
    order: Literal["first", "second"] = Field("first", description="leave the Hessian out (FO) or keep it")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        first, second = batch.half(0), batch.half(1)
        names = [name for name in params if ctx.trains(self.tuning.role(name))]
        plain = super().loss

        def inner(moving: Params) -> Tensor:
            return plain(model, {**params, **moving}, first, ctx)[0]

        gradient = torch.func.grad(inner)({name: params[name] for name in names})
        if self.order == "first":
            gradient = {name: g.detach() for name, g in gradient.items()}
        stepped = {name: params[name] - self.alpha * gradient[name] for name in names}
        return super().loss(model, {**params, **stepped}, second, ctx)

    def adapt(self) -> tuple[Phase, ...]:
        if self.finetune_epochs:
            return super().adapt()
        train = {role: Optimizer(lr=self.alpha) for role in self.roles()}
        return (Phase(train, self.batch_size, steps=self.adapt_steps, name="adapt", plain=True),)
