"""FedAMP: clients whose models are alike learn more from each other; the server sends each a mean of its own.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data" (AAAI 2021): HeurFedAMP, its form for deep
networks, in which the cosine of two models says how alike they are.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, State, Update
from .. import params as P
from ..tunings.heads import SCALE

_FIRST, _MODEL = "first", "model"


class FedAmp(Method):
    paper = "Huang et al., AAAI 2021"
    averages = False
    own_down = True

    own_share: float = Field(0.5, ge=0, le=1, description="weight of a client's own model in what it receives (xi_ii)")
    sigma: float = Field(10.0, gt=0, description="how much more similar models count (sigma)")
    lamda: float = Field(0.1, ge=0, description="weight of the distance to what was received (lambda / alpha)")

    def serve(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """w_i: its model after its last training. u_i only guides the next one."""
        return {**self.start(init, down, private, memory), **memory}

    def remembers_role(self, role: str) -> bool:
        return role in self.roles() and not self.stays_role(role)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        loss, stats = super().loss(model, params, batch, ctx)
        return loss + self.lamda / 2 * P.sqdist(self.shared(params), ctx.down), stats

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """first.*           the initial model
        model.{client}.*  a client's last model, from its first round on"""
        return P.nested(_FIRST, self.shared(init))

    def down(self, state: State, client: int) -> Params:
        return {**self.cloud(state, client), **P.nested(SCALE, P.under(state, SCALE))}

    def cloud(self, state: State, client: int) -> Params:
        """u_i; for a client that has not trained yet the mean of all models, before the first round the initial one."""
        models = P.groups(P.under(state, _MODEL))
        own = models.pop(str(client), None)
        others = [models[key] for key in sorted(models, key=int)]
        if not others:
            return own or P.under(state, _FIRST)
        if own is None:
            return P.mean(others, [1.0] * len(others))
        weights = (1 - self.own_share) * self.attention(own, others)
        return P.mean([own, *others], [self.own_share, *weights.tolist()])

    def attention(self, own: Params, others: list[Params]) -> Tensor:
        """(others,): softmax of sigma cos(w_i, w_j)."""
        # Names arrive in any order, and a sum is rounded by the order of its terms.
        first, *rest = (torch.cat([model[name].flatten() for name in sorted(own)]) for model in (own, *others))
        return (self.sigma * F.cosine_similarity(first, torch.stack(rest), dim=-1)).softmax(0)

    def aggregate(self, state: State, updates: list[Update]) -> State:
        return {**state, **{key: p for u in updates for key, p in P.nested(f"{_MODEL}.{u.client}", u.up).items()}}
