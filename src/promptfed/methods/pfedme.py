"""pFedMe: the global model descends the Moreau envelopes of the clients' losses, whose minimisers are their own models.

Dinh et al., "Personalized Federated Learning with Moreau Envelopes" (NeurIPS 2020), Algorithm 1. Clients count alike,
as in the algorithm; the authors' code weights them by samples.
"""

from collections.abc import Callable

from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Optimizer, Params, Phase, State, Update
from .. import params as P
from ..phases import Normal

_PERSONAL = "personal"


class PFedMe(Method):
    """`lr` is the rate of the local model w (eta). Each of its steps takes a batch for the whole inner problem."""

    paper = "Dinh et al., NeurIPS 2020"
    by_mean = True

    lr: float = Field(0.005, gt=0, description="local learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    lamda: float = Field(15.0, gt=0, description="how strongly a client's own model is drawn to the global one")
    inner_steps: int = Field(5, ge=1, description="steps towards the client's own model on each batch (K)")
    inner_lr: float = Field(0.09, gt=0, description="learning rate of the client's own model")
    beta: float = Field(1.0, gt=0, description="how far the global model goes to the mean of the local ones")
    personal_steps: int = Field(5, ge=1, description="steps towards the client's own model before evaluation")

    def step(self, grad: Callable[[Params], Params], params: Params, phase: Phase, normal: Normal) -> Params:
        """The envelope's gradient lamda (w - theta), with theta about argmin f(theta) + lamda/2 |theta - w|^2."""
        if phase.name == _PERSONAL:
            return grad(params)
        w = {name: p.detach() for name, p in params.items()}
        theta = w
        for _ in range(self.inner_steps):
            slope = grad({name: p.detach().requires_grad_() for name, p in theta.items()})
            theta = {name: p - self.inner_lr * (slope[name] + self.lamda * (p - w[name])) for name, p in theta.items()}
        return {name: self.lamda * (p - theta[name]) for name, p in w.items()}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        loss, stats = super().loss(model, params, batch, ctx)
        if ctx.within(_PERSONAL):
            loss = loss + self.lamda / 2 * P.sqdist(self.shared(params), ctx.down)
        return loss, stats

    def adapt(self) -> tuple[Phase, ...]:
        """theta(w), from w = what was received."""
        if self.finetune_epochs:
            return super().adapt()
        train = {role: Optimizer(lr=self.inner_lr) for role in self.roles()}
        return (Phase(train, self.batch_size, steps=self.personal_steps, name=_PERSONAL),)

    def aggregate(self, state: State, updates: list[Update]) -> State:
        mean = P.mean([u.up for u in updates], [1.0] * len(updates))
        return {**state, **{name: (1 - self.beta) * state[name] + self.beta * p for name, p in mean.items()}}
