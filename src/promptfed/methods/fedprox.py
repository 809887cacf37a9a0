"""FedProx: a proximal term holds the client near what it received.

Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), Eq. 2.
"""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ..method import Method
from ..models import Model
from ..params import Params, sqdist
from ..phases import Batch, Context


class FedProx(Method):
    paper: ClassVar[str] = "Li et al., MLSys 2020"

    mu: float = Field(1e-4, ge=0, description="weight of the proximal term")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        loss, stats = super().loss(model, params, batch, ctx)
        return loss + self.mu / 2 * sqdist(self.shared(params), ctx.down), stats
