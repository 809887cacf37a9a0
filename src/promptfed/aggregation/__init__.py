"""Robust aggregation: how the server keeps a minority of faulty or malicious clients from deciding the model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import UserError
from ..method import Method
from .base import Combination, Rule, apply
from .bulyan import Bulyan
from .fltrust import FlTrust
from .geometric_median import GeometricMedian
from .krum import Krum, MultiKrum
from .median import Median
from .norm_bound import NormBound
from .trimmed_mean import TrimmedMean

__all__ = ["Aggregation", "Rule", "apply", "check", "check_count"]


class Aggregation(BaseModel):
    """The [aggregation] section."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal[
        "mean",
        "norm-bound",
        "median",
        "trimmed-mean",
        "krum",
        "multi-krum",
        "bulyan",
        "geometric-median",
        "fltrust",
    ] = Field("mean", description="the method's own mean, or a rule by which a few clients cannot decide the model")
    malicious: float = Field(
        0.2, ge=0, lt=0.5, description="share of updates that trimmed-mean, krum, multi-krum and bulyan withstand"
    )
    bound: float = Field(3.0, gt=0, description="norm-bound: largest norm of an update, in medians of recent norms")
    trusted: int = Field(-1, ge=-1, description="fltrust: the client that the server trusts")

    def rule(self) -> Rule | None:
        """None: all updates, as the method aggregates them."""
        rules: dict[str, Rule] = {
            rule.name: rule
            for rule in (
                *(NormBound(self.bound), Median(), GeometricMedian(), FlTrust(self.trusted)),
                *(kind(self.malicious) for kind in (TrimmedMean, Krum, MultiKrum, Bulyan)),
            )
        }
        return rules.get(self.name)


def check(asked: Aggregation, method: Method, name: str, fraction: float) -> None:
    """Raises UserError if a method cannot take a rule."""
    rule = asked.rule()
    if rule is None:
        return
    if not method.averages and not isinstance(rule, NormBound):
        why, allowed = "its server does not average updates", "mean, norm-bound"
    elif isinstance(rule, Combination) and not (method.streams or method.by_mean):
        why, allowed = "its server needs each update, with weights of its own", "mean, norm-bound, krum, multi-krum"
    elif isinstance(rule, FlTrust) and asked.trusted < 0:
        raise UserError("aggregation.trusted must be set for fltrust: the number of the client that the server trusts")
    elif isinstance(rule, FlTrust) and fraction < 1:
        raise UserError(f"fraction = {fraction:g}: fltrust needs its trusted client in every round (allowed: 1)")
    else:
        return
    raise UserError(f'aggregation.name = "{asked.name}": "{name}" cannot take it, since {why} (allowed: {allowed})')


def check_count(asked: Aggregation, count: int) -> None:
    """Raises UserError if a round has too few clients for a rule."""
    rule = asked.rule()
    if rule and rule.needed(count) > count:
        f = int(asked.malicious * count + 1e-9)
        raise UserError(
            f"aggregation.malicious = {asked.malicious:g}: {asked.name} needs {rule.needed(count)} updates to "
            f"withstand {f} of them, and {count} clients take part in a round"
        )
