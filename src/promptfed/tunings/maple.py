"""Prompts in both towers of a CLIP."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, Tuning, UserError
from .. import params as P
from ..models import CLIP, ViT
from ..models.base import dense, normal
from ..models.text import Sentences
from ..seeding import torch_rng
from ..tuning import Family, as_clip
from .tokens import blank_cls


class BothTowers(Tuning):
    """Text prompts and image prompts at the first layers of a frozen CLIP."""

    family = Family.BOTH
    backbones = "CLIP with a ViT"
    uncached = "prompts enter the first layer"

    context: int = Field(2, ge=1, description="prompt vectors at each of these layers")
    depth: int = Field(9, ge=1, description="number of first layers of both towers that prompts enter")
    context_init: str = Field(
        "a photo of a",
        description="words before the class name: the first `context` ones initialise the vectors, the others stay; "
        "if there are too few, none is used and vectors are initialised from N(0, .02)",
    )

    def check(self, model: Model) -> None:
        most = min(image_tower(model).depth, as_clip(model).text_tower.depth)
        if self.depth > most:
            raise UserError(
                f'method.depth = {self.depth} must be 1 to {most}, the layers of the smaller tower of "{model.name}"'
            )
        self.sentences(model)

    def words(self, model: Model) -> tuple[str, str]:
        """What the vectors are initialised from (empty: random numbers), and the words kept with the class name."""
        words, tokenizer = self.context_init.split(), as_clip(model).tokenizer
        first = " ".join(words[: self.context])
        if tokenizer is None or len(tokenizer.words(first)) != self.context:
            return "", "{}."
        return first, " ".join([*words[self.context :], "{}."])

    def sentences(self, model: Model) -> Sentences:
        return as_clip(model).sentences(self.words(model)[1], self.context)

    def text_prompts(self, model: Model, g: torch.Generator) -> Params:
        """Their initial values."""
        clip, first = as_clip(model), self.words(model)[0]
        made = {"context": clip.words(first) if first else normal(g, self.context, clip.text_width)}
        return made | {f"deep.{i}": normal(g, self.context, clip.text_width) for i in range(1, self.depth)}

    @abstractmethod
    def image_prompts(self, params: Params) -> dict[int, Tensor]:
        """(context, width) for each layer, in their order."""

    def embed(self, model: Model, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 1 + patches, width): what features() takes as `hidden` instead of images (Eq. 5)."""
        return image_tower(model).embed(model.weights, x)

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        tower, weights = image_tower(model), model.weights
        h = batch.frozen["hidden"] if "hidden" in batch.frozen else self.embed(model, batch.x)
        prompts = self.image_prompts(params)
        if batch.tokens is not None:  # of a private prompt that wraps this tuning: they come first
            prompts[0] = torch.cat([batch.tokens, prompts[0]])
        h = tower.encode(weights, h, prompts, "deep", first_tokens=1)
        return as_clip(model).join(weights, tower.norm(weights, h[:, 0]))

    def deep(self, params: Params) -> dict[int, Tensor]:
        return {i: params[f"deep.{i}"] for i in range(1, self.depth)}

    def text(self, model: Model, params: Params) -> Tensor:
        """(classes, d)"""
        return as_clip(model).text(model.weights, self.sentences(model), params["context"], self.deep(params))

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return as_clip(model).logits(model.weights, features, self.text(model, params))


class Maple(BothTowers):
    """Linear maps turn text prompts into image prompts: Khattak et al., "MaPLe: Multi-modal Prompt Learning" (CVPR
    2023). The text prompts are DP2FL's task prompt P_T, the maps its data prompt P_D (Eq. 6 at every depth).
    """

    roles: ClassVar[dict[str, str]] = {"context": "body", "deep.": "body", "map.": "data"}
    about = "task prompt + data prompt"

    map_init: Literal["random", "blank"] = Field(
        "random",
        description="maps start at random, or so that image prompts start around the class token of a blank image",
    )

    def init(self, model: Model, seed: int) -> Params:
        g, width = torch_rng(seed, "coupled"), as_clip(model).text_width
        made = self.text_prompts(model, g)
        for i in range(self.depth):
            made[f"map.{i}.weight"], made[f"map.{i}.bias"] = dense(g, model.weights["body.image.cls"].shape[-1], width)
        made = P.to(made, model.weights["body.scale"].device)
        return self.centred(model, made) if self.map_init == "blank" else made

    def centred(self, model: Model, params: Params) -> Params:
        """With biases that make cls of a blank image, at each of its layers, the mean of the image prompts there."""
        moved = dict(params)
        states = blank_cls(image_tower(model), model.weights, self.depth)
        for i, prompts in self.image_prompts(params).items():
            moved[f"map.{i}.bias"] = params[f"map.{i}.bias"] + states[i] - prompts.mean(0)
        return moved

    def image_prompts(self, params: Params) -> dict[int, Tensor]:
        text = {0: params["context"], **self.deep(params)}
        return {i: F.linear(p, params[f"map.{i}.weight"], params[f"map.{i}.bias"]) for i, p in text.items()}


def image_tower(model: Model) -> ViT:
    tower = model.image_tower if isinstance(model, CLIP) else None
    if not isinstance(tower, ViT):
        raise UserError(
            f'backbone.name = "{model.name}": prompts in both towers need a CLIP whose image tower is a transformer '
            "(allowed: clip-mini, or a published CLIP with a ViT)"
        )
    return tower
