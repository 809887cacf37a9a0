"""FedDyn: a linear term, learned over the rounds, makes the optima of the clients' objectives that of the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021), Algorithm 1.
"""

from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Model, Params, State, Update
from .. import params as P
from .client_vectors import ClientVectors

_SLOPE = "slope"  # of a client: grad L_i at its last model, which stays with it
_H = "h"  # of the server


class FedDyn(ClientVectors):
    paper = "Acar et al., ICLR 2021"
    vector, mean = _SLOPE, _H
    keeps = "its last gradient"

    alpha: float = Field(0.01, gt=0, description="weight of the dynamic regularisation")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """L_i(theta) - <grad L_i(theta_i), theta> + alpha/2 |theta - theta^t|^2, where theta^t is the received model;
        the linear term is taken from there."""
        loss, stats = super().loss(model, params, batch, ctx)
        moved = P.minus(self.shared(params), ctx.down)
        return loss - P.dot(ctx.reference, moved) + self.alpha / 2 * P.sqnorm(moved), stats

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """grad L_i <- grad L_i - alpha (theta_i - theta^t), by the first-order condition of the client's problem."""
        own, moved = self.client_constants(model, params, ctx), P.minus(self.shared(params), ctx.down)
        return self.both({name: p - self.alpha * moved[name] for name, p in own.items()}, own, ctx)

    def down(self, state: State, client: int) -> Params:
        sent = super().down(state, client)
        return {name: p for name, p in sent.items() if not name.startswith(f"{_H}.")}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """h <- h - alpha / m sum(theta_i - theta^t), theta <- mean(theta_i) - h / alpha; clients count alike."""
        mean = P.mean([u.up for u in updates], [1.0] * len(updates))
        share = self.share(state, updates)
        h = {name: p - self.alpha * share * (mean[name] - state[name]) for name, p in P.under(state, _H).items()}
        new = {name: p - h[name] / self.alpha for name, p in mean.items()}
        return {**state, **new, **P.nested(_H, h), **self.counted(state, updates)}
