"""Ditto: besides the shared model, every client has a whole model of its own, which it predicts with."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, Phase, State
from .. import params as P
from ..tuning import FROZEN, GIVEN, Wrapper

OWN = "own"


class Twin(Wrapper):
    """A second copy of what is tuned, which predicts. A private prompt serves both."""

    roles: ClassVar[dict[str, str]] = {f"{OWN}.": OWN}
    about = "model of its own"

    def init(self, model: Model, seed: int) -> Params:
        first = self.inner.init(model, seed)
        second = {n: p.clone() for n, p in first.items() if self.inner.role(n) not in ("private", GIVEN, FROZEN)}
        return {**first, **P.nested(OWN, second)}

    def personal(self, params: Params) -> Params:
        """The client's model, under the names of the inner tuning."""
        return {**params, **P.under(params, OWN)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.features(model, self.personal(params), batch, ctx)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.inner.head(model, self.personal(params), features)

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.logits(model, self.personal(params), batch, ctx)


class OwnModel(Method):
    private: ClassVar[tuple[str, ...]] = (OWN,)
    wrapper = Twin

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """A client that has no model of its own yet starts with the received one."""
        received = {name: p for name, p in P.nested(OWN, down).items() if name in init}
        return super().start({**init, **received}, down, private, memory)

    def received_loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """Of the shared model."""
        assert isinstance(self.tuning, Twin)
        logits = self.tuning.inner.logits(model, params, batch, ctx)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    def common(self, state: State) -> Params:
        """The shared model, in both places."""
        shared = self.down(state, client=0)
        return {**shared, **P.nested(OWN, shared)}


class Ditto(OwnModel):
    """The own model is trained for itself and held near the received one. Li et al., "Ditto: Fair and Robust Federated
    Learning Through Personalization" (ICML 2021), Algorithm 1."""

    paper = "Li et al., ICML 2021"

    lamda: float = Field(
        0.1, ge=0, description="weight of the distance between a client's own model and the global one"
    )

    def phases(self, round: int) -> tuple[Phase, ...]:
        shared = tuple(role for role in self.roles() if role != OWN)
        return (self.phase(shared, name="shared"), self.phase((OWN,), name=OWN))

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        if not ctx.trains(OWN):
            return self.received_loss(model, params, batch, ctx), {}
        loss, stats = super().loss(model, params, batch, ctx)
        return loss + self.lamda / 2 * P.sqdist(P.under(params, OWN), ctx.down), stats
