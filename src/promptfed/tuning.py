"""Tuning: WHAT is trained, and how it enters the model. How it is federated is a Method's business."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from .errors import UserError
from .models import CLIP, Model, ViT
from .models.base import normal
from .models.text import Sentences
from .params import Params
from .seeding import torch_rng

if TYPE_CHECKING:
    from .method import Batch, Context, Phase


class Optimizer(BaseModel):
    """An elementwise optimiser, so that clients stacked in one tensor stay independent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


class Tuning(BaseModel):
    """The trained parameters: their initial values, their roles, and the prediction they make.

    Each parameter has a role, found by the first matching prefix in `roles`. A Method speaks of roles only: "body" and
    "head" are the usual ones, and a parameter whose role is "private" never leaves its client under any method.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    roles: ClassVar[dict[str, str]] = {"body.": "body", "head.": "head"}
    about: ClassVar[str] = ""
    backbones: ClassVar[str] = "any"  # which ones it can enter: any, transformers, CLIP, or CLIP with a ViT
    images: ClassVar[bool] = False  # whether batches carry images besides what is frozen of them

    def role(self, name: str) -> str:
        for prefix, role in self.roles.items():
            if name.startswith(prefix):
                return role
        raise KeyError(f'no role for parameter "{name}" in {type(self).__name__}.roles')

    def role_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.roles.values()))

    def check(self, model: Model) -> None:
        """Raises UserError where this tuning cannot enter this model."""

    def init(self, model: Model, seed: int) -> Params:
        raise NotImplementedError

    def frozen_name(self, model: Model) -> str:
        """What frozen() gives, such that two things of one name are equal; empty if it gives nothing."""
        return ""

    def why_not_cached(self, model: Model) -> str:
        """Why nothing is computed once, where frozen_name() is empty."""
        return "all weights are trained"

    def frozen(self, model: Model, x: Tensor) -> Params:
        """Values (B, ...) of samples that depend on frozen weights only: computed once and given back in batch.frozen,
        in place of the images unless `images` says besides."""
        return {}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, d): what the head sees."""
        return model.features({**model.weights, **params}, batch.x, batch.tokens)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        """(B, d) -> (B, classes)."""
        return model.classify({**model.weights, **params}, features)

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, classes)."""
        return self.head(model, params, self.features(model, params, batch, ctx))

    def schedule(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """The method's phases with this tuning's own ones among them."""
        return phases


class Full(Tuning):
    """Every weight of the backbone."""

    about: ClassVar[str] = "all weights"

    def init(self, model: Model, seed: int) -> Params:
        return {name: p.clone() for name, p in model.weights.items()}


class OnFeatures(Tuning):
    """Whatever works on the features of a frozen image model."""

    def frozen_name(self, model: Model) -> str:
        return "features"

    def frozen(self, model: Model, x: Tensor) -> Params:
        return {"features": model.features(model.weights, x)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        if batch.frozen:
            return batch.frozen["features"]
        return model.features(model.weights, batch.x, batch.tokens)  # inside a private prompt, which changes the input


class HeadOnly(OnFeatures):
    """A linear head on frozen features."""

    roles: ClassVar[dict[str, str]] = {"head.": "head"}
    about: ClassVar[str] = "the head"

    def check(self, model: Model) -> None:
        if "head.weight" not in model.weights:
            raise UserError(f'backbone.name = "{model.name}" has no head to tune')

    def init(self, model: Model, seed: int) -> Params:
        return {name: model.weights[name].clone() for name in ("head.weight", "head.bias")}


class Tokens(Tuning):
    """Prompt tokens in a frozen vision transformer, and a head: Jia et al., "Visual Prompt Tuning" (ECCV 2022)."""

    roles: ClassVar[dict[str, str]] = {"tokens.": "body", "head.": "head"}
    about: ClassVar[str] = "prompt tokens + head"
    backbones: ClassVar[str] = "transformers"

    tokens: int = Field(10, ge=1, description="prompt tokens at each of their layers")
    layers: Literal["first", "all"] | tuple[int, ...] = Field(
        "first", description="layers that tokens enter, counted from 0: the first (shallow), all (deep), or a list"
    )
    mode: Literal["deep", "stay"] = Field("deep", description="tokens take the place of earlier ones, or join them")

    def at(self, model: Model) -> tuple[int, ...]:
        assert isinstance(model, ViT)
        if self.layers == "first":
            return (0,)
        return tuple(range(model.depth)) if self.layers == "all" else self.layers

    def check(self, model: Model) -> None:
        if not isinstance(model, ViT):
            raise UserError(f'backbone.name = "{model.name}" takes no tokens (of a CLIP: backbone.part=image)')
        layers = self.at(model)
        if not layers or not all(0 <= i < model.depth for i in layers):
            raise UserError(f'method.layers = {list(layers)} must be layers of "{model.name}": 0 to {model.depth - 1}')

    def init(self, model: Model, seed: int) -> Params:
        assert isinstance(model, ViT)
        g, width = torch_rng(seed, "tokens"), model.weights[f"{model.at}.cls"].shape[-1]
        bound = math.sqrt(6 / (3 * model.patch**2 + width))  # as VPT starts them
        shape = (self.tokens, width)
        tokens = {f"tokens.{i}": torch.empty(shape).uniform_(-bound, bound, generator=g) for i in self.at(model)}
        return {**tokens, **{name: model.weights[name].clone() for name in ("head.weight", "head.bias")}}

    def frozen_name(self, model: Model) -> str:
        first = min(self.at(model))
        return f"input of layer {first}" if first else ""  # in front of the first layer there is nothing to save

    def why_not_cached(self, model: Model) -> str:
        return "tokens enter the first layer"

    def frozen(self, model: Model, x: Tensor) -> Params:
        assert isinstance(model, ViT)
        return {"hidden": model.encode(model.weights, model.embed(model.weights, x), stop=min(self.at(model)))}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        assert isinstance(model, ViT)
        h = batch.frozen["hidden"] if batch.frozen else model.embed(model.weights, batch.x)
        prompts = {i: params[f"tokens.{i}"] for i in self.at(model)}
        start = min(prompts) if batch.frozen else 0
        if batch.tokens is not None:  # a private prompt around this one; it enters in front
            prompts[0] = torch.cat([batch.tokens, prompts[0]]) if 0 in prompts else batch.tokens
        h = model.encode(model.weights, h, prompts, self.mode, start=start, first_tokens=1)
        return model.norm(model.weights, h[:, 0])


class TextContext(OnFeatures):
    """Context vectors in front of, around or behind a class name in a frozen CLIP: Zhou et al., "Learning to Prompt for
    Vision-Language Models" (IJCV 2022); federated as PromptFL by Guo et al. (2022)."""

    roles: ClassVar[dict[str, str]] = {"context": "body"}
    about: ClassVar[str] = "text context"
    backbones: ClassVar[str] = "CLIP"

    context: int = Field(16, ge=1, description="number of context vectors")
    name_position: Literal["front", "middle", "end"] = Field("end", description="where the class name stands")

    def check(self, model: Model) -> None:
        if not isinstance(model, CLIP):
            raise UserError(f'backbone.name = "{model.name}" has no text tower: text prompts need a CLIP')
        self.sentences(model)

    def sentences(self, model: Model) -> Sentences:
        assert isinstance(model, CLIP)
        return model.sentences(context=self.context, position=self.name_position)

    def init(self, model: Model, seed: int) -> Params:
        assert isinstance(model, CLIP)
        return {"context": normal(torch_rng(seed, "context"), self.context, model.text_width)}

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        assert isinstance(model, CLIP)
        return model.logits(model.weights, features, self.text(model, params))

    def text(self, model: Model, params: Params) -> Tensor:
        """(classes, d)"""
        assert isinstance(model, CLIP)
        return model.text(model.weights, self.sentences(model), params["context"])


class Pixels(BaseModel):
    """A prompt on the pixels: three templates after Bahng et al., "Exploring Visual Prompts for Adapting Large-Scale
    Models" (2022)."""

    prompt: Literal["padding", "fixed-patch", "random-patch"] = Field(
        "padding", description="template: a frame, a patch in the upper left corner, or a patch that moves every batch"
    )
    prompt_size: int = Field(4, ge=1, description="width of the frame or side of the patch, in pixels (p)")

    def check_pixels(self, model: Model) -> None:
        _, height, width = model.image
        most = (min(height, width) - 1) // (2 if self.prompt == "padding" else 1)
        if self.prompt_size > most:
            raise UserError(
                f'method.prompt_size = {self.prompt_size} covers the whole image: a "{self.prompt}" prompt on '
                f"{height}x{width} pixels may be 1 to {most}"
            )

    def pixels(self, model: Model, g: torch.Generator) -> Params:
        """Normally distributed."""
        channels, height, width = model.image
        p = self.prompt_size
        if self.prompt != "padding":  # C p^2 parameters
            return {"prompt.patch": torch.randn(channels, p, p, generator=g)}
        sides = {"top": (p, width), "bottom": (p, width), "left": (height - 2 * p, p), "right": (height - 2 * p, p)}
        # 2 C p (H + W - 2p) parameters
        return {f"prompt.{side}": torch.randn(channels, *shape, generator=g) for side, shape in sides.items()}

    def canvas(self, model: Model, params: Params, noise: Tensor) -> Tensor:
        """The prompt as an image (C, H, W), zero elsewhere. noise (2,) in [0, 1) places a random patch."""
        channels, height, width = model.image
        p = self.prompt_size
        if self.prompt == "padding":
            hole = params["prompt.left"].new_zeros(channels, height - 2 * p, width - 2 * p)
            middle = torch.cat([params["prompt.left"], hole, params["prompt.right"]], dim=2)
            return torch.cat([params["prompt.top"], middle, params["prompt.bottom"]], dim=1)
        patch = params["prompt.patch"]
        if self.prompt == "fixed-patch":
            return F.pad(patch, (0, width - p, 0, height - p))
        # Tensor arithmetic in place of slicing, so that every client of a stacked block has a place of its own.
        rows = torch.arange(height, device=patch.device) - (noise[0] * (height - p + 1)).long()
        columns = torch.arange(width, device=patch.device) - (noise[1] * (width - p + 1)).long()
        inside = ((rows >= 0) & (rows < p))[:, None] & ((columns >= 0) & (columns < p))[None, :]
        spread = patch[:, rows.clamp(0, p - 1)][:, :, columns.clamp(0, p - 1)]
        return torch.where(inside, spread, 0.0)


class Wrapper(Tuning):
    """Something around another tuning, which stays what it is: parameters of its own besides that one's."""

    inner: Tuning = Field(default_factory=Full, description="what is tuned besides")

    def role(self, name: str) -> str:
        return super().role(name) if name.startswith(tuple(self.roles)) else self.inner.role(name)

    def role_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().role_names(), *self.inner.role_names())))

    def check(self, model: Model) -> None:
        self.inner.check(model)

    def frozen_name(self, model: Model) -> str:
        return self.inner.frozen_name(model)

    def why_not_cached(self, model: Model) -> str:
        return self.inner.why_not_cached(model)

    def frozen(self, model: Model, x: Tensor) -> Params:
        return self.inner.frozen(model, x)

    def schedule(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return self.inner.schedule(phases)


class PrivatePrompt(Wrapper):
    """A prompt that each client keeps for itself, wrapped around any tuning and trained before it (pFedPT, Eq. 5)."""

    roles: ClassVar[dict[str, str]] = {"prompt.": "private"}

    prompt_epochs: int = Field(5, ge=0, description="epochs on the prompt alone at the start of a round (E_g)")
    prompt_lr: float = Field(1.0, gt=0, description="learning rate of the prompt (SGD)")
    prompt_momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the prompt's SGD")
    joint: bool = Field(False, description="train prompt and weights at once instead of one after the other (Table 8)")

    def frozen_name(self, model: Model) -> str:
        return ""

    def why_not_cached(self, model: Model) -> str:
        return "a prompt changes what enters the model"

    def init(self, model: Model, seed: int) -> Params:
        return {**self.start(model, seed), **self.inner.init(model, seed)}

    def start(self, model: Model, seed: int) -> Params:
        """The prompt's initial value, the same for all clients."""
        raise NotImplementedError

    def schedule(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        optimizer = Optimizer(lr=self.prompt_lr, momentum=self.prompt_momentum)
        if self.joint:
            return tuple(phase.also("private", optimizer) for phase in self.inner.schedule(phases))
        if not phases or not self.prompt_epochs:
            return self.inner.schedule(phases)
        # Eq. 5 is plain cross-entropy whatever the method's own objective: `plain`.
        own = phases[0].like(name="prompt", train={"private": optimizer}, epochs=self.prompt_epochs, plain=True)
        return (own, *self.inner.schedule(phases))


class PixelPrompt(Pixels, PrivatePrompt):
    """pFedPT's visual prompt: pixels added to the normalised image. Li et al., "Visual Prompt Based Personalized
    Federated Learning" (TMLR 2024), Section 3.2."""

    about: ClassVar[str] = "private pixel prompt"

    def check(self, model: Model) -> None:
        super().check(model)
        self.check_pixels(model)

    def start(self, model: Model, seed: int) -> Params:
        return self.pixels(model, torch_rng(seed, "pixel prompt"))

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        canvas = self.canvas(model, params, batch.noise)
        return self.inner.features(model, params, batch._replace(x=batch.x + canvas), ctx)


class TokenPrompt(PrivatePrompt):
    """pFedPT with soft tokens behind cls in place of pixels (Table 6)."""

    about: ClassVar[str] = "private soft tokens"
    backbones: ClassVar[str] = "transformers"

    prompt_tokens: int = Field(4, ge=1, description="number of soft tokens")

    def check(self, model: Model) -> None:
        super().check(model)
        if model.width is None:
            raise UserError(f'backbone.name = "{model.name}" takes no tokens: soft-token prompts need a transformer')

    def start(self, model: Model, seed: int) -> Params:
        assert model.width is not None
        g = torch_rng(seed, "token prompt")
        return {"prompt.tokens": torch.randn(self.prompt_tokens, model.width, generator=g)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.features(model, params, batch._replace(tokens=params["prompt.tokens"]), ctx)
