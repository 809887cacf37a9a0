"""Prompt tokens in a vision transformer: shared ones, and a client's own."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Model, Params, PrivatePrompt, UserError
from ..models import ViT
from ..seeding import torch_rng
from ..tuning import GIVEN, NEEDS_VIT, Family, as_vit
from .heads import LinearHead, scaled


class Tokens(LinearHead):
    """Prompt tokens in a frozen vision transformer, and a head: Jia et al., "Visual Prompt Tuning" (ECCV 2022)."""

    roles: ClassVar[dict[str, str]] = {"tokens.": "body", **LinearHead.roles}
    about = "prompt tokens + head"
    role_words: ClassVar[dict[str, str]] = {"body": "prompt tokens"}
    family = Family.TOKENS
    paper = "Jia et al., ECCV 2022, averaged"
    backbones = "transformers"
    uncached = "tokens enter the first layer"

    tokens: int = Field(10, ge=1, description="prompt tokens at each of their layers")
    layers: Literal["first", "all"] | tuple[int, ...] = Field(
        "first", description="layers that tokens enter, counted from 0: the first (shallow), all (deep), or a list"
    )
    mode: Literal["deep", "stay"] = Field("deep", description="tokens replace those of earlier layers, or join them")

    def at(self, model: Model) -> tuple[int, ...]:
        if self.layers == "first":
            return (0,)
        return tuple(range(as_vit(model).depth)) if self.layers == "all" else self.layers

    def check(self, model: Model) -> None:
        layers, depth = self.at(model), as_vit(model).depth
        if not layers or not all(0 <= i < depth for i in layers):
            raise UserError(f'method.layers = {list(layers)} must be layers of "{model.name}": 0 to {depth - 1}')

    def init(self, model: Model, seed: int) -> Params:
        g = torch_rng(seed, "tokens")
        tokens = {f"tokens.{i}": uniform(as_vit(model), g, self.tokens) for i in self.at(model)}
        return {**tokens, **self.start_head(model)}

    def frozen_name(self, model: Model) -> str:
        first = min(self.at(model))
        return f"input of layer {first}" if first else ""  # before the first layer there is nothing to save

    def frozen(self, model: Model, x: Tensor) -> Params:
        vit, weights = as_vit(model), model.weights
        return {"hidden": vit.encode(weights, vit.embed(weights, x), stop=min(self.at(model)))}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        vit, weights = as_vit(model), model.weights
        h = batch.frozen["hidden"] if batch.frozen else vit.embed(weights, batch.x)
        prompts = {i: params[f"tokens.{i}"] for i in self.at(model)}
        start = min(prompts) if batch.frozen else 0
        if batch.tokens is not None:  # of a private prompt that wraps this tuning: they come first
            prompts[0] = torch.cat([batch.tokens, prompts[0]]) if 0 in prompts else batch.tokens
        h = vit.encode(weights, h, prompts, self.mode, start=start, first_tokens=1)
        return scaled(params, vit.norm(weights, h[:, 0]))

    def feature_roles(self) -> tuple[str, ...]:
        return ("body", GIVEN)


class TokenPrompt(PrivatePrompt):
    """pFedPT with soft tokens after cls instead of pixels (Table 6)."""

    about = "private soft tokens"
    paper = "Li et al., TMLR 2024, Table 6"
    backbones = "transformers"

    prompt_tokens: int = Field(4, ge=1, description="number of soft tokens")
    prompt_scale: float = Field(1.0, gt=0, description="standard deviation of the prompt's initial values")

    def check(self, model: Model) -> None:
        super().check(model)
        if model.width is None:
            raise UserError(f'backbone.name = "{model.name}" takes no tokens: {NEEDS_VIT}')

    def start(self, model: Model, seed: int) -> Params:
        assert model.width is not None
        g = torch_rng(seed, "token prompt")
        return {"prompt.tokens": self.prompt_scale * torch.randn(self.prompt_tokens, model.width, generator=g)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.features(model, params, batch._replace(tokens=params["prompt.tokens"]), ctx)


@torch.no_grad()
def blank_cls(tower: ViT, weights: Params, layers: int) -> list[Tensor]:
    """cls (width,) of a blank image at the input of each of the first layers."""
    h = tower.embed(weights, torch.zeros(1, *tower.image, device=weights[f"{tower.at}.cls"].device))
    found = []
    for i in range(layers):
        found.append(h[0, 0])
        h = tower.encode(weights, h, start=i, stop=i + 1)
    return found


def uniform(model: ViT, g: torch.Generator, *shape: int) -> Tensor:
    """(*shape, width): prompt tokens as VPT initialises them."""
    assert model.width is not None
    bound = math.sqrt(6 / (3 * model.patch**2 + model.width))
    return torch.empty(*shape, model.width).uniform_(-bound, bound, generator=g)
