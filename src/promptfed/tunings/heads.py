"""A linear head on features of a frozen model; how it starts, and on which scale it sees the features."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .. import params as P
from ..errors import UserError
from ..models import Model
from ..params import Params
from ..phases import Batch, Context
from ..tuning import GIVEN, Family, OnFeatures, Tuning

SCALE = "scale"  # mean and deviation (d,) of the features, by which the head sees them
ABSENT = -1e9  # the bias of a class without samples: never predicted
_FLAT = 1e-2  # least deviation of a feature, against that of all: hardly varying ones are not blown up


class LinearHead(Tuning):
    """A tuning with a linear head on features of a frozen model; of a CLIP, which has none, without it.

    Features of pre-trained models have a large constant part and unequal scales, and a head descends on them slowly.
    Clients therefore send sums of the features (with the initial prompts) and of their squares before the first
    round, and from then on the head sees features of mean 0 and deviation 1 over all clients' training data.
    """

    roles: ClassVar[dict[str, str]] = {"head.": "head", f"{SCALE}.": GIVEN}
    per_class = True

    standardise: bool = Field(
        True,
        description="the head sees features of mean 0 and deviation 1; clients send sums of their features for it",
    )
    head_init: Literal["random", "zero", "class-mean"] = Field(
        "random",
        description="the head's initial value: random, zero, or of the nearest class mean, for which clients send sums "
        "of their features per class",
    )

    def role_names(self) -> tuple[str, ...]:
        return tuple(role for role in super().role_names() if role != GIVEN or self.standardise)

    def start_head(self, model: Model) -> Params:
        """The head, and a scale that changes nothing yet."""
        if "head.weight" not in model.weights:
            return {}
        head = {name: model.weights[name].clone() for name in ("head.weight", "head.bias")}
        if self.head_init == "zero":
            head = {name: torch.zeros_like(p) for name, p in head.items()}
        return {**head, **(self.start_scale(model) if self.standardise else {})}

    def start_scale(self, model: Model, name: str = SCALE) -> Params:
        one = torch.ones_like(model.weights["head.weight"][0])
        return {f"{name}.mean": torch.zeros_like(one), f"{name}.std": one}

    # ---- what clients send before the first round, and what is made of it

    @property
    def collects(self) -> bool:
        return self.standardise or self.head_init == "class-mean"

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        return self.summed(model, self.features(model, params, batch, ctx), batch.y)

    def summed(self, model: Model, features: Tensor, y: Tensor) -> Params:
        if "head.weight" not in model.weights:
            return {}
        if self.head_init == "class-mean":
            return {**moments(features), **by_class(features, y, model.classes)}
        return moments(features) if self.standardise else {}

    def started(self) -> tuple[str, ...]:
        return ("head.weight", "head.bias") if self.head_init == "class-mean" else ()

    def constants(self, sums: Params) -> Params:
        scale = scaling(sums) if self.standardise else {}
        if self.head_init != "class-mean":
            return P.nested(SCALE, scale)
        means = sums["class.sum"] / sums["class.n"].clamp(min=1)[:, None]
        variance = scaling(sums)["std"].square()
        if scale:
            means, variance = (means - scale["mean"]) / scale["std"], torch.ones_like(variance)
        # Logits grow with the number of features; divided by its root they are of a size that a softmax can follow.
        temperature = 2 * variance.sum() / len(variance) ** 0.5
        return {**P.nested(SCALE, scale), **nearest_mean(means, sums["class.n"], temperature)}


class HeadOnly(LinearHead, OnFeatures):
    """A linear head on frozen features."""

    about: ClassVar[str] = "head"
    family = Family.FEATURES

    def check(self, model: Model) -> None:
        if "head.weight" not in model.weights:
            raise UserError(f'backbone.name = "{model.name}" has no head to tune')

    def init(self, model: Model, seed: int) -> Params:
        return self.start_head(model)

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return scaled(params, super().features(model, params, batch, ctx))

    def feature_roles(self) -> tuple[str, ...]:
        return (GIVEN,)


def scaled(params: Params, features: Tensor, name: str = SCALE) -> Tensor:
    """(B, d) as the head sees them: unchanged where there is no scale."""
    if f"{name}.mean" not in params:
        return features
    return (features - params[f"{name}.mean"]) / params[f"{name}.std"]


# ---- statistics, in double precision: sums of clients can be added in any order


def moments(features: Tensor) -> Params:
    """(B, d) -> their number, sum and sum of squares."""
    z = _double(features)
    return {"n": z.new_full((), len(z)), "sum": z.sum(0), "square": z.square().sum(0)}


def by_class(features: Tensor, y: Tensor, classes: int) -> Params:
    """(B, d), (B,) -> their numbers (classes,) and sums (classes, d)."""
    z = _double(features)
    at = y.to(z.device)
    counts = z.new_zeros(classes).index_add(0, at, z.new_ones(len(z)))
    return {"class.n": counts, "class.sum": z.new_zeros(classes, z.shape[1]).index_add(0, at, z)}


def scaling(sums: Params) -> Params:
    """Mean and deviation (d,) of moments()."""
    n = sums["n"].clamp(min=1)
    mean = sums["sum"] / n
    std = (sums["square"] / n - mean.square()).clamp(min=0).sqrt()
    floor = _FLAT * std.square().mean().sqrt()
    return {"mean": mean, "std": std.clamp(min=floor) if floor > 0 else torch.ones_like(std)}


def nearest_mean(means: Tensor, counts: Tensor, temperature: Tensor | float = 1.0) -> Params:
    """The head whose largest logit is that of the nearest mean: -|z - m|^2 / temperature, without |z|^2, which is the
    same for all classes."""
    bias = torch.where(counts > 0, -means.square().sum(1) / temperature, ABSENT)
    return {"head.weight": 2 * means / temperature, "head.bias": bias}


def _double(features: Tensor) -> Tensor:
    return (features if features.is_meta else features.cpu()).double()  # not every accelerator has double precision
