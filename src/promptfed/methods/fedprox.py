"""FedProx: a proximal term holds the client near what it received.

Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Eq. 2.
"""

from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Params
from ..params import sqdist


class FedProx(Method):
    paper = "Li et al., MLSys 2020"

    mu: float = Field(1e-4, ge=0, description="weight of the proximal term")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        loss, stats = super().loss(model, params, batch, ctx)
        return loss + self.mu / 2 * sqdist(self.shared(params), ctx.down), stats
