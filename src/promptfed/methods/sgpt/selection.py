"""The group in which a sample trains: by its key, and by how often groups were selected before."""

import torch
from pydantic import Field
from torch import Tensor

from ... import Batch, Context, Method, Model, Params, State, Update
from ...method import unknown_stats
from .features import SharedGroup


class Selection(Method):
    tuning: SharedGroup = Field(default_factory=SharedGroup, description="what is trained")
    calibrate: bool = Field(True, description="weigh the selection in training by how often groups were selected (q_g)")
    floor: float = Field(5e-4, ge=0, description="added to q_g")
    majority: bool = Field(False, description="a training batch takes the group of most of its samples (authors' code)")

    # ---- client half

    def choose(self, near: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """The group (B,) in which each sample trains, given its similarity to the keys (B, G)."""
        score = (near - 1) * self.frequency(ctx) if self.calibrate else near  # below Eq. 6, or Eq. 5
        chosen = score.argmax(1)
        return self.count(chosen, batch).argmax().expand(len(chosen)) if self.majority else chosen

    def frequency(self, ctx: Context) -> Tensor:
        """q_g, (G,): the share of all selections that the server knows of and of the client's own ones in this round.
        All alike before the first one, which makes the calibrated selection the plain one."""
        seen = ctx.down["counts"]
        if "selected" in ctx.stats:
            seen = seen + ctx.stats["selected"]
        total = seen.sum()
        return torch.where(total > 0, seen / total.clamp(min=1) + self.floor, torch.ones_like(seen))

    def count(self, chosen: Tensor, batch: Batch) -> Tensor:
        """How many samples are in each group, (G,), leaving padding out."""
        own = (chosen[:, None] == torch.arange(self.tuning.groups, device=chosen.device)).float()
        return own.sum(0) if batch.weight is None else (own * batch.weight[:, None]).sum(0)

    def assign(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor | None:
        """The group that each sample has after training (Eq. 5), (B,); None where there are no groups."""
        return self.tuning.select(model, params, batch) if self.tuning.group_layers else None

    # ---- server half

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, and how often each group was selected so far: counts (G,)."""
        return {**super().begin(model, init, seed), "counts": torch.zeros(self.tuning.groups)}

    def unusable(self, state: State, update: Update) -> str:
        why, selected = unknown_stats(update, ["selected"]), update.stats.get("selected")
        if why or selected is None:
            return why
        if selected.shape == state["counts"].shape and bool((selected >= 0).all()):
            return ""
        return f"expected counts for {self.tuning.groups} groups, got {selected.flatten()[:20].tolist()}"
