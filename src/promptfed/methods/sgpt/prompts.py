"""Shared prompts and group prompts: the layers that they enter, and how they start."""

from typing import ClassVar, Literal

import torch
from pydantic import Field

from ... import Model, Params, UserError
from ...seeding import torch_rng
from ...tuning import as_vit
from ...tunings.heads import SCALE, LinearHead
from ...tunings.tokens import blank_cls, uniform
from .keys import Keys

ALONE = f"{SCALE}.alone"  # of features without group prompts, which Block I trains on


class Prompts(Keys):
    """Without group layers there are neither groups nor keys, without shared layers no shared prompts."""

    roles: ClassVar[dict[str, str]] = {"shared.": "body", "group.": "group", "keys": "keys", **LinearHead.roles}

    shared_layers: tuple[int, ...] = Field((0, 1, 2), description="layers that shared prompts enter, counted from 0")
    group_layers: tuple[int, ...] = Field(
        (3, 4, 5), description="layers that group prompts enter, after the shared ones"
    )
    prompt_length: int = Field(1, ge=1, description="prompt tokens at each of their layers")
    initial: Literal["uniform", "code", "cls"] = Field(
        "uniform",
        description="prompts start uniform, shared ones at zero as in the authors' code, or group prompts around the "
        "class token of a blank image at their layer",
    )

    def role_names(self) -> tuple[str, ...]:
        absent = (() if self.shared_layers else ("body",)) + (() if self.group_layers else ("group", "keys"))
        return tuple(role for role in super().role_names() if role not in absent)

    def check(self, model: Model) -> None:
        super().check(model)
        depth = as_vit(model).depth
        for setting, layers in (("shared_layers", self.shared_layers), ("group_layers", self.group_layers)):
            if len(set(layers)) < len(layers) or not all(0 <= i < depth for i in layers):
                raise UserError(
                    f'method.{setting} = {list(layers)} must be different layers of "{model.name}": 0 to {depth - 1}'
                )
        last = max(self.shared_layers, default=-1)
        if min(self.group_layers, default=depth) <= last:
            raise UserError(
                f"method.group_layers = {list(self.group_layers)} must all come after the shared ones, the last of "
                f"which is layer {last}"
            )

    def init(self, model: Model, seed: int) -> Params:
        vit, g = as_vit(model), torch_rng(seed, "shared and group prompts")
        params = {f"shared.{i}": uniform(vit, g, self.prompt_length) for i in self.shared_layers}
        if self.initial == "code":
            params = {name: torch.zeros_like(p) for name, p in params.items()}
        if self.group_layers:
            params |= {f"group.{i}": uniform(vit, g, self.groups, self.prompt_length) for i in self.group_layers}
            if self.initial == "cls":
                states = blank_cls(vit, model.weights, max(self.group_layers) + 1)
                params |= {f"group.{i}": states[i] + params[f"group.{i}"].to(states[i]) for i in self.group_layers}
            params |= self.start_keys(params[f"group.{self.group_layers[0]}"].shape[-1], seed)
        if self.standardise and self.two_scales:
            params |= self.start_scale(model, ALONE)
        return {**params, **self.start_head(model)}

    @property
    def two_scales(self) -> bool:
        """Whether the head sees features both without and with group prompts, whose statistics differ."""
        return bool(self.shared_layers and self.group_layers)

    def frozen_name(self, model: Model) -> str:
        return super().frozen_name(model) if self.group_layers else ""
