"""FedDyn: a linear term, learned over the rounds, makes the optima of the clients' objectives that of the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021), Algorithm 1.
"""

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Params, State, Update
from .. import params as P

_SLOPE = "slope"  # of a client: its gradient as of its last round, which stays with it
_H = "h"  # of the server
_CLIENTS = "clients"  # how many there are (m)


class FedDyn(Method):
    paper = "Acar et al., ICLR 2021"
    by_mean = True
    keeps = "its last gradient"

    alpha: float = Field(0.01, gt=0, description="weight of the dynamic regularisation")

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        """grad L_i at the client's last model; zero before its first round."""
        own = P.under(ctx.private, _SLOPE)
        return {name: own.get(name, torch.zeros_like(p)) for name, p in self.shared(params).items()}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """L_i(theta) - <grad L_i(theta_i), theta> + alpha/2 |theta - theta^t|^2, where theta^t is the received model;
        the linear term is taken from there."""
        loss, stats = super().loss(model, params, batch, ctx)
        moved = P.minus(self.shared(params), ctx.down)
        return loss - P.dot(ctx.reference, moved) + self.alpha / 2 * P.sqnorm(moved), stats

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """grad L_i <- grad L_i - alpha (theta_i - theta^t), by the first-order condition of the client's problem."""
        own, moved = self.client_constants(model, params, ctx), P.minus(self.shared(params), ctx.down)
        return P.nested(_SLOPE, {name: p - self.alpha * moved[name] for name, p in own.items()})

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, h.* of each, and the number of clients."""
        shared = self.shared(init)
        zero = {name: torch.zeros_like(p) for name, p in shared.items()}
        return {**shared, **P.nested(_H, zero), _CLIENTS: torch.zeros(())}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        """h is a mean over all clients, and a new client's slope is zero."""
        count = state[_CLIENTS]
        mean = {name: p * count / (count + 1) for name, p in P.under(state, _H).items()}
        return {**super().admit(state, client, hello, round), **P.nested(_H, mean), _CLIENTS: count + 1}

    def down(self, state: State, client: int) -> Params:
        sent = super().down(state, client)
        return {name: p for name, p in sent.items() if name != _CLIENTS and not name.startswith(f"{_H}.")}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """h <- h - alpha / m sum(theta_i - theta^t), theta <- mean(theta_i) - h / alpha; clients count alike."""
        mean = P.mean([u.up for u in updates], [1.0] * len(updates))
        share = len(updates) / state[_CLIENTS].clamp(min=len(updates))
        h = {name: p - self.alpha * share * (mean[name] - state[name]) for name, p in P.under(state, _H).items()}
        return {**state, **{name: p - h[name] / self.alpha for name, p in mean.items()}, **P.nested(_H, h)}
