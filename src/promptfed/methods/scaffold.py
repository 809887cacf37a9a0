"""SCAFFOLD: every local step is corrected by the difference between all clients' mean gradient and the client's own.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020), Algorithm 1 with
option II: the client's control variate becomes the mean gradient of its last local training.
"""

from pydantic import Field, model_validator
from torch import Tensor

from .. import Batch, Context, Model, Params, State, Update, UserError
from .. import params as P
from .client_vectors import ClientVectors

_CONTROL = "control"  # of the server: c, sent to all; of a client: c_i, which stays with it


class Scaffold(ClientVectors):
    """What a client sends is FedAvg's update: the change of c_i follows from it, and the server computes it too."""

    paper = "Karimireddy et al., ICML 2020"
    vector, mean = _CONTROL, _CONTROL
    keeps = "its control variate"

    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD; must be 0")
    server_lr: float = Field(
        1.0, gt=0, description="how far the global model goes to the mean of the local ones (eta_g)"
    )

    @model_validator(mode="after")
    def _plain_sgd(self) -> "Scaffold":
        for key, value, allowed in (
            ("optimizer", self.optimizer, "sgd"),
            ("momentum", self.momentum, 0),
            ("cosine_rounds", self.cosine_rounds, 0),
        ):
            if value != allowed:
                raise UserError(
                    f"method.{key} = {value!r}: scaffold reads mean gradients off a client's path, "
                    f"which needs {allowed!r}: plain SGD at a constant learning rate"
                )
        return self

    def mean_gradient(self, received: Params, trained: Params, n: int) -> Params:
        """(x - y_i) / (K eta_l): of the K local steps that a client with n samples takes."""
        path = max(self.phase().length(n), 1) * self.lr
        return {name: (received[name] - p) / path for name, p in trained.items()}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """The gradient of the added term is c - c_i; it is zero where local training starts."""
        loss, stats = super().loss(model, params, batch, ctx)
        shift = P.minus(ctx.reference, P.under(ctx.down, _CONTROL))  # c_i - c
        return loss - P.dot(shift, P.minus(self.shared(params), ctx.down)), stats

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """c_i <- c_i - c + (x - y_i) / (K eta_l)"""
        own, c = self.client_constants(model, params, ctx), P.under(ctx.down, _CONTROL)
        gradient = self.mean_gradient(ctx.down, self.shared(params), int(ctx.n))
        return self.both({name: p - c[name] + gradient[name] for name, p in own.items()}, own, ctx)

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """x <- x + eta_g mean(y_i - x), c <- c + |S| / N mean(c_i' - c_i); clients count alike."""
        alike = [1.0] * len(updates)
        mean = P.mean([u.up for u in updates], alike)
        gradient = P.mean([self.mean_gradient(state, u.up, u.n) for u in updates], alike)
        share = self.share(state, updates)
        new = {name: state[name] + self.server_lr * (p - state[name]) for name, p in mean.items()}
        # c_i' - c_i = (x - y_i) / (K eta_l) - c
        c = {name: p + share * (gradient[name] - p) for name, p in P.under(state, _CONTROL).items()}
        return {**state, **new, **P.nested(_CONTROL, c), **self.counted(state, updates)}
