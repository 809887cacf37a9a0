"""FedRoD: a generic head for all clients, and a private one on top for the client.

Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification" (ICLR 2022), with
the linear personal head: balanced softmax trains the body and the generic head, cross-entropy the private one.
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, State, UserError
from ..tuning import Wrapper

# Replaces a class count of 0: log 0 would make the loss of padding, whose label may be of such a class, infinite. The
# class is still negligible as long as logits are within 18 of each other.
_NONE = 1e-8


class TwoHeads(Wrapper):
    """A second linear head on the same features. It starts at zero, and predictions are the sum of both."""

    roles: ClassVar[dict[str, str]] = {"own.": "own"}
    about = "second head"
    per_class = True

    def check(self, model: Model) -> None:
        super().check(model)
        if "head.weight" not in model.weights:
            raise UserError(f'backbone.name = "{model.name}" has no head that a second one could stand beside')

    def init(self, model: Model, seed: int) -> Params:
        return {**self.inner.init(model, seed), **silent(model.weights)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.features(model, params, batch, ctx)

    def feature_roles(self) -> tuple[str, ...]:
        return self.inner.feature_roles()

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.inner.head(model, params, features) + self.own(params, features)

    def own(self, params: Params, features: Tensor) -> Tensor:
        return F.linear(features, params["own.weight"], params["own.bias"])


class FedRod(Method):
    paper = "Chen & Chao, ICLR 2022"
    private = ("own",)
    needs = ("head",)
    wrapper = TwoHeads

    gamma: float = Field(1.0, ge=0, description="power of the class counts in the balanced softmax")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        assert isinstance(self.tuning, TwoHeads)
        z = self.tuning.features(model, params, batch, ctx)
        generic = self.tuning.inner.head(model, params, z)
        prior = self.gamma * ctx.label_counts.clamp(min=_NONE).log()  # log n_c^gamma, (classes,)
        balanced = F.cross_entropy(generic + prior, batch.y, reduction="none")
        both = generic.detach() + self.tuning.own(params, z.detach())
        return batch.mean(balanced + F.cross_entropy(both, batch.y, reduction="none")), {}

    def common(self, state: State) -> Params:
        """The generic model, whose second head says nothing."""
        return {**self.down(state, client=0), **silent(state)}


def silent(weights: Params) -> Params:
    return {f"own.{part}": torch.zeros_like(weights[f"head.{part}"]) for part in ("weight", "bias")}
