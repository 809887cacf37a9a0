"""Every client's model on every client's validation set: how the sets are sent, and what is told of the losses.

Validation data are sent as images (`privacy = "open"`), as patch embeddings (`embeddings`), or these with every loss
encrypted (`sealed`, sealed.py). A patch embedding can be turned back into its image, and labels are sent in the clear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from ... import Batch, Context, Method, Model, Params, State, Update, UserError
from ... import params as P
from ...method import ONCE, unknown_stats
from ...phases import Holdings
from ...training import CHUNK
from ...tuning import as_clip
from ...tunings.maple import Maple


class CrossValidated(Method):
    uses_validation = True
    sealed: ClassVar[bool] = False

    tuning: Maple = Field(default_factory=Maple, description="what is trained")
    privacy: Literal["open", "embeddings", "sealed"] = Field(
        "embeddings", description="validation data are sent as images, as embeddings, or these with encrypted losses"
    )

    @model_validator(mode="after")
    def _in_its_class(self) -> CrossValidated:
        if (self.privacy == "sealed") is not self.sealed:
            other = "Dp2fl" if self.sealed else "SealedDp2fl"
            raise UserError(f'method.privacy = "{self.privacy}" is not a mode of {type(self).__name__}, use {other}')
        return self

    def sets(self, state: State) -> dict[str, Params]:
        """Validation sets {x, y} by the names that clients know them by: their owners' numbers."""
        return P.groups(P.under(state, "val"))

    def sent_sets(self, state: State) -> Params:
        sets = sorted(self.sets(state).items())
        return P.nested(ONCE, {f"set.{name}.{part}": data[part] for name, data in sets for part in "xy"})

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """Its validation set: x (n, C, H, W) or (n, 1 + patches, width), labels y (n,)."""
        batches = list(own.val())
        if not batches:
            return {}
        x = [batch.x if self.privacy == "open" else self.tuning.embed(model, batch.x) for batch in batches]
        return {"x": torch.cat(x), "y": torch.cat([batch.y for batch in batches])}

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """Losses loss_kj of the trained model on each set j, their sum, and L."""
        losses = self.losses(model, params, received_sets(ctx), ctx)
        before = self.before(model, params, ctx)
        return {
            "total": number(math.fsum(losses.values())),
            **{f"loss.{j}": number(loss) for j, loss in losses.items()},
            **({} if before is None else {"before": number(before)}),
        }

    def own_set(self, ctx: Context) -> str:
        """The name of the client's own validation set, whether or not it has one."""
        return str(int(ctx.down["client"]))

    def begun(self, params: Params, ctx: Context) -> Params:
        """The model that the client started the round with."""
        return self.start(params, ctx.down, ctx.private, ctx.memory)

    def before(self, model: Model, params: Params, ctx: Context) -> float | None:
        """L: the loss of that model on the client's own validation set, if it has one."""
        mine = self.own_set(ctx)
        own = {name: data for name, data in received_sets(ctx).items() if name == mine}
        return self.losses(model, self.begun(params, ctx), own, ctx)[mine] if own else None

    def losses(self, model: Model, params: Params, sets: Mapping[str, Params], ctx: Context) -> dict[str, float]:
        """Mean cross-entropy on each set. Sets never share a batch: a loss must not depend on their order."""
        text, found = self.tuning.text(model, params), {}
        for name, data in sets.items():
            total = 0.0
            for x, y in zip(torch.split(data["x"], CHUNK), torch.split(data["y"], CHUNK), strict=True):
                batch = Batch(x, y, None, x.new_zeros(2), {})
                if self.privacy != "open":
                    batch = batch._replace(x=y.new_empty(len(y), 0), frozen={"hidden": x})
                logits = as_clip(model).logits(model.weights, self.tuning.features(model, params, batch, ctx), text)
                total += float(F.cross_entropy(logits.cpu().double(), y.cpu(), reduction="sum"))
            found[name] = total / len(data["y"])
        return found

    def unusable(self, state: State, update: Update) -> str:
        reported = ["total", *(f"loss.{name}" for name in self.sets(state))]
        return unknown_stats(update, [*reported, "before"]) or self.faulty(update, reported, optional=["before"])

    def faulty(self, update: Update, losses: Sequence[str], optional: Sequence[str] = ()) -> str:
        if not update.stats.keys() >= set(losses):
            return "no losses on some of the validation sets that it was sent"
        told = [update.stats[name] for name in (*losses, *optional) if name in update.stats]
        if any(loss.numel() != 1 or float(loss) < 0 for loss in told):
            return "losses must be single non-negative numbers"
        return ""


def received_sets(ctx: Context) -> dict[str, Params]:
    """Validation sets {x, y} by name."""
    return P.groups(P.under(ctx.once, "set"))


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
