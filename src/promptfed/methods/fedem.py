"""FedEM: every client's data are a mixture of a few distributions, each with a model that all clients train together.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions" (NeurIPS 2021), Algorithm 1. The E-step
is taken once per round, with the received models; the M-step of the components is the local descent.
"""

import re
from collections.abc import Iterable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, State, Update, UserError
from .. import params as P
from ..method import unknown_stats
from ..seeding import torch_rng
from ..tuning import Wrapper

_TINY = 1e-12  # replaces a weight of zero, whose logarithm is not finite


class Mixture(Wrapper):
    """Several copies of what is tuned, and their weights (pi)."""

    roles: ClassVar[dict[str, str]] = {"mixture": "mixture"}
    about = "mixture weights"

    components: int = Field(3, ge=1, description="number of distributions in the mixture (M)")

    def role(self, name: str) -> str:
        component = re.match(r"mix\.\d+\.", name)
        return super().role(name[component.end() :] if component else name)

    def check(self, model: Model) -> None:
        super().check(model)
        if self.components > 1:
            first, second = self.start(model, 0, 0), self.start(model, 0, 1)
            if all(not p.is_meta and torch.equal(p, second[name]) for name, p in first.items()):
                raise UserError(
                    f"method.components = {self.components}: components start and stay equal with this tuning, use 1"
                )

    def init(self, model: Model, seed: int) -> Params:
        equal = torch.full((self.components,), 1 / self.components)
        return {"mixture": equal, **_joined(self.start(model, seed, m) for m in range(self.components))}

    def start(self, model: Model, seed: int, m: int) -> Params:
        """Component 0 starts as the tuning alone would. The others have their own seeds and heads: bodies may start
        equal (pre-trained ones do), and different heads make them diverge."""
        params, g = self.inner.init(model, seed + m), torch_rng(seed, "mixture", m)
        heads = {n: p for n, p in params.items() if m and self.inner.role(n) == "head"}
        drawn = {n: (2 * torch.rand(p.shape, generator=g) - 1).to(p.device) for n, p in heads.items()}
        return {**params, **{n: p.abs().max() * drawn[n] for n, p in heads.items()}}  # over the range that it has

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        """Of each component: their prompts, and so their features, start differently."""
        return _joined(self.inner.sums(model, part, batch, ctx) for part in self.parts(params))

    def constants(self, sums: Params) -> Params:
        return _joined(map(self.inner.constants, self.parts(sums)))

    def parts(self, params: Params) -> list[Params]:
        return [P.under(params, f"mix.{m}") for m in range(self.components)]

    def each(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(M, B, classes): the components' predictions, log p_m(y | x)."""
        return torch.stack([self.inner.logits(model, part, batch, ctx) for part in self.parts(params)]).log_softmax(-1)

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """log sum_m pi_m p_m(y | x)."""
        return (self.each(model, params, batch, ctx) + log(params["mixture"])[:, None, None]).logsumexp(0)


class FedEm(Method):
    paper = "Marfoq et al., NeurIPS 2021"
    private = ("mixture",)
    wrapper = Mixture

    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in super().roles() if role != "mixture")  # pi is counted, not trained by descent

    def losses(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, M): cross-entropy of each component."""
        assert isinstance(self.tuning, Mixture)
        said = self.tuning.each(model, params, batch, ctx)
        return torch.stack([F.nll_loss(one, batch.y, reduction="none") for one in said], dim=1)

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        """E-step: the responsibility of each component for a sample, q ~ pi_m exp(-loss_m)."""
        return {"q": (log(params["mixture"]) - self.losses(model, params, batch, ctx)).softmax(1)}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """M-step of the components; of pi, the sums of q over the samples drawn, (M,)."""
        q = batch.extra["q"]
        seen = q if batch.weight is None else q * batch.weight[:, None]
        return batch.mean((q * self.losses(model, params, batch, ctx)).sum(1)), {"q": seen.sum(0)}

    def finish(self, params: Params, ctx: Context) -> Params:
        """M-step of pi: the mean of q. An epoch draws every sample once, so that draws may be counted as samples."""
        if "q" not in ctx.stats:  # nothing was trained
            return params
        return {**params, "mixture": ctx.stats["q"] / ctx.stats["q"].sum()}

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """The sums of q would reveal pi, which stays with the client: empty tensors are sent instead."""
        return {name: s.new_empty(0) for name, s in ctx.stats.items() if name == "q"}

    def unusable(self, state: State, update: Update) -> str:
        return unknown_stats(update, [name for name, s in update.stats.items() if name == "q" and not s.numel()])


def _joined(parts: Iterable[Params]) -> Params:
    return {name: p for m, part in enumerate(parts) for name, p in P.nested(f"mix.{m}", part).items()}


def log(pi: Tensor) -> Tensor:
    return pi.clamp(min=_TINY).log()
