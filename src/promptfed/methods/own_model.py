"""Ditto and APFL: besides the shared model, every client has a whole model of its own, which it predicts with."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, Phase, State
from .. import params as P
from ..tuning import FROZEN, GIVEN, Wrapper

_OWN, _SHARE = "own", "share"


class Twin(Wrapper):
    """A second copy of what is tuned, which predicts. A private prompt serves both."""

    roles: ClassVar[dict[str, str]] = {f"{_OWN}.": _OWN}
    about = "model of its own"

    def init(self, model: Model, seed: int) -> Params:
        first = self.inner.init(model, seed)
        second = {n: p.clone() for n, p in first.items() if self.inner.role(n) not in ("private", GIVEN, FROZEN)}
        return {**first, **P.nested(_OWN, second)}

    def personal(self, params: Params) -> Params:
        """The client's model, under the names of the inner tuning."""
        return {**params, **P.under(params, _OWN)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.features(model, self.personal(params), batch, ctx)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.inner.head(model, self.personal(params), features)

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.logits(model, self.personal(params), batch, ctx)


class _OwnModel(Method):
    private: ClassVar[tuple[str, ...]] = (_OWN,)
    wrapper = Twin

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """A client that has no model of its own yet starts with the received one."""
        received = {name: p for name, p in P.nested(_OWN, down).items() if name in init}
        return super().start({**init, **received}, down, private, memory)

    def received_loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """Of the shared model."""
        assert isinstance(self.tuning, Twin)
        logits = self.tuning.inner.logits(model, params, batch, ctx)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    def common(self, state: State) -> Params:
        """The shared model, in both places."""
        shared = self.down(state, client=0)
        return {**shared, **P.nested(_OWN, shared)}


class Ditto(_OwnModel):
    """The own model is trained for itself and held near the received one. Li et al., "Ditto: Fair and Robust Federated
    Learning Through Personalization" (ICML 2021), Algorithm 1."""

    paper = "Li et al., ICML 2021"

    lamda: float = Field(
        0.1, ge=0, description="weight of the distance between a client's own model and the global one"
    )

    def phases(self, round: int) -> tuple[Phase, ...]:
        shared = tuple(role for role in self.roles() if role != _OWN)
        return (self.phase(shared, name="shared"), self.phase((_OWN,), name=_OWN))

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        if not ctx.trains(_OWN):
            return self.received_loss(model, params, batch, ctx), {}
        loss, stats = super().loss(model, params, batch, ctx)
        return loss + self.lamda / 2 * P.sqdist(P.under(params, _OWN), ctx.down), stats


class Blend(Twin):
    """A client predicts with alpha own + (1 - alpha) shared weights."""

    roles: ClassVar[dict[str, str]] = {f"{_OWN}.": _OWN, "alpha": _SHARE}
    about = "model of its own, mixed"

    alpha: float = Field(0.5, ge=0, le=1, description="initial share of the client's own model in its mix (alpha)")

    def init(self, model: Model, seed: int) -> Params:
        return {**super().init(model, seed), "alpha": torch.tensor(self.alpha)}

    def personal(self, params: Params) -> Params:
        own, share = P.under(params, _OWN), params["alpha"].clamp(0, 1)
        return {**params, **{name: share * p + (1 - share) * params[name] for name, p in own.items()}}


class Apfl(_OwnModel):
    """A client predicts with a mix of both models, and learns their shares. Deng, Kamani & Mahdavi, "Adaptive
    Personalized Federated Learning" (2020), Algorithm 1 with an adaptive alpha."""

    paper = "Deng et al., 2020"
    private = (_OWN, _SHARE)
    wrapper = Blend

    adaptive: bool = Field(True, description="whether clients learn alpha, or keep its initial value")

    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in super().roles() if self.adaptive or role != _SHARE)

    def phase(self, roles: tuple[str, ...] | None = None, lr: float | None = None, **settings: Any) -> Phase:
        """Without weight decay on alpha, which is no weight."""
        made = super().phase(roles, lr, **settings)
        alone = {_SHARE: made.train[_SHARE].model_copy(update={"weight_decay": 0.0})} if _SHARE in made.train else {}
        return replace(made, train={**made.train, **alone})

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """The shared model descends its own loss, the own model and alpha that of the mix."""
        still = {name: p if self.stays(name) else p.detach() for name, p in params.items()}
        mixed, stats = super().loss(model, still, batch, ctx)
        return self.received_loss(model, params, batch, ctx) + mixed, stats

    def finish(self, params: Params, ctx: Context) -> Params:
        return {**params, "alpha": params["alpha"].clamp(0, 1)}
