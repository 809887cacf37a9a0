"""The features of a ViT with shared prompts and those of each sample's group, as the head sees them."""

from typing import Literal

from pydantic import Field
from torch import Tensor

from ... import Batch, Context, Model, Params
from ... import params as P
from ...tuning import Family, as_vit
from ...tunings.heads import SCALE, moments, scaled, scaling
from .prompts import ALONE, Prompts


class SharedGroup(Prompts):
    """Shared prompts in early layers and those of the sample's group in later ones (Eq. 2, 3), keys, and a head.

    Prompts stay in the sequence: [cls, group prompts, shared prompts, patches].
    """

    about = "shared + group prompts, keys, head"
    family = Family.TOKENS
    backbones = "transformers"
    images = True  # only the query is frozen
    uncached = "no group is selected, and prompts enter early layers"

    pool: Literal["mean", "cls"] = Field(
        "mean", description="the head sees the mean of cls and the tokens of group prompts, or cls alone"
    )

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        chosen = self.select(model, params, batch) if self.group_layers else None
        return self.prompted(model, params, batch, chosen)

    def prompted(self, model: Model, params: Params, batch: Batch, chosen: Tensor | None) -> Tensor:
        """Features (B, width): the mean of cls and the tokens of the chosen groups (B,), after the final norm. Without
        groups, or with `pool = "cls"`: cls."""
        vit, weights = as_vit(model), model.weights
        prompts = {i: params[f"shared.{i}"] for i in self.shared_layers}
        first_tokens = 1
        if chosen is not None:
            prompts |= {i: params[f"group.{i}"][chosen] for i in self.group_layers}  # (B, length, width) each
            if self.pool == "mean":
                # Prompts of later layers stand before those of earlier ones: group prompts directly follow cls.
                first_tokens += self.prompt_length * len(self.group_layers)
        if "hidden" in batch.extra:
            h, start = batch.extra["hidden"], min(self.group_layers)
        else:
            h, start = vit.embed(weights, batch.x), 0
        h = vit.encode(weights, h, prompts, "stay", start=start, first_tokens=first_tokens)
        alone = chosen is None and self.two_scales
        return scaled(params, vit.norm(weights, h).mean(1), ALONE if alone else SCALE)

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        sums = super().sums(model, params, batch, ctx)
        if self.standardise and self.two_scales:
            sums |= P.nested("alone", moments(self.prompted(model, params, batch, chosen=None)))
        return sums

    def constants(self, sums: Params) -> Params:
        alone = P.under(sums, "alone")
        return {**super().constants(sums), **(P.nested(ALONE, scaling(alone)) if alone else {})}

    def hidden(self, model: Model, params: Params, batch: Batch) -> Params:
        """The input of the first group layer (B, tokens, width), with shared prompts; nothing if that is layer 0,
        before which there is nothing to save."""
        vit, weights = as_vit(model), model.weights
        first = min(self.group_layers)
        if not first:
            return {}
        prompts = {i: params[f"shared.{i}"] for i in self.shared_layers}
        return {"hidden": vit.encode(weights, vit.embed(weights, batch.x), prompts, "stay", stop=first)}
