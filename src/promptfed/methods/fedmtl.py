"""FedMTL: every client has a model of its own, the server holds them all and ties them to their mean.

Smith et al., "Federated Multi-Task Learning" (NeurIPS 2017), Eq. 1 with the mean-regularised relation
Omega = (I - 11^T/m)^2, for which tr(W Omega W^T) = sum_t |w_t - mean|^2. Their dual solver exists for linear models
only; here the client's sub-problem is descended in the primal, for as many sample visits as they take iterations.
"""

from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Params, Phase, State, Update
from .. import params as P
from ..tunings.heads import SCALE


class FedMtl(Method):
    paper = "Smith et al., NeurIPS 2017"
    averages = False
    own_down = True

    iterations: int = Field(4000, ge=1, description="sample visits spent on the sub-problem each round")
    relation: float = Field(1e-3, ge=0, description="weight of the distance to the mean of all clients (lambda_1)")
    ridge: float = Field(1e-7, ge=0, description="weight of the squared norm (lambda_2)")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(epochs=0, steps=-(-self.iterations // self.batch_size)),)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        loss, stats = super().loss(model, params, batch, ctx)
        own = self.shared(params)
        return loss + self.relation * P.sqdist(own, P.under(ctx.down, "mean")) + self.ridge * P.sqnorm(own), stats

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """mean.*           the mean of all clients' models
        task.{client}.*  a client's own model, from its first round on"""
        return P.nested("mean", self.shared(init))

    def down(self, state: State, client: int) -> Params:
        """Its own model (before it has one: the mean, which minimises the relation) and the mean."""
        mean = P.under(state, "mean")
        return {
            **mean,
            **P.under(state, f"task.{client}"),
            **P.nested("mean", mean),
            **P.nested(SCALE, P.under(state, SCALE)),
        }

    def aggregate(self, state: State, updates: list[Update]) -> State:
        tasks = P.groups(P.under(state, "task")) | {str(u.client): u.up for u in updates}
        models = [tasks[client] for client in sorted(tasks, key=int)]
        new = {**state, **P.nested("mean", P.mean(models, [1.0] * len(models)))}
        for client, task in tasks.items():
            new |= P.nested(f"task.{client}", task)
        return new
