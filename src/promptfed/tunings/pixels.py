"""Prompts on the pixels, for any backbone."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, PrivatePrompt, UserError
from ..seeding import torch_rng


class Pixels(BaseModel):
    """A prompt on the pixels: three templates after Bahng et al., "Exploring Visual Prompts for Adapting Large-Scale
    Models" (2022)."""

    prompt: Literal["padding", "fixed-patch", "random-patch"] = Field(
        "padding", description="template: a frame, a patch in the upper left corner, or a patch that moves every batch"
    )
    prompt_size: int = Field(4, ge=1, description="width of the frame or side of the patch, in pixels (p)")
    prompt_scale: float = Field(1.0, gt=0, description="standard deviation of the prompt's initial values")

    @property
    def draws(self) -> bool:
        return self.prompt == "random-patch"

    def side(self, model: Model) -> int:
        """p"""
        return self.prompt_size

    def check_pixels(self, model: Model) -> None:
        _, height, width = model.image
        most = (min(height, width) - 1) // (2 if self.prompt == "padding" else 1)
        if self.side(model) > most:
            raise UserError(
                f'method.prompt_size = {self.side(model)} covers the whole image: a "{self.prompt}" prompt on '
                f"{height}x{width} pixels may be 1 to {most}"
            )

    def pixels(self, model: Model, g: torch.Generator) -> Params:
        """Normally distributed. pFedPT's N(0, 1) hides what a pretrained model would see, a scale of .02 does not."""
        channels, height, width = model.image
        p = self.side(model)
        if self.prompt != "padding":  # C p^2 parameters
            return {"prompt.patch": self.prompt_scale * torch.randn(channels, p, p, generator=g)}
        sides = {"top": (p, width), "bottom": (p, width), "left": (height - 2 * p, p), "right": (height - 2 * p, p)}
        # 2 C p (H + W - 2p) parameters
        return {
            f"prompt.{side}": self.prompt_scale * torch.randn(channels, *shape, generator=g)
            for side, shape in sides.items()
        }

    def canvas(self, model: Model, params: Params, noise: Tensor) -> Tensor:
        """The prompt as an image (C, H, W), zero elsewhere. noise (2,) in [0, 1) places a random patch."""
        channels, height, width = model.image
        p = self.side(model)
        if self.prompt == "padding":
            hole = params["prompt.left"].new_zeros(channels, height - 2 * p, width - 2 * p)
            middle = torch.cat([params["prompt.left"], hole, params["prompt.right"]], dim=2)
            return torch.cat([params["prompt.top"], middle, params["prompt.bottom"]], dim=1)
        patch = params["prompt.patch"]
        if self.prompt == "fixed-patch":
            return F.pad(patch, (0, width - p, 0, height - p))
        # Tensor arithmetic instead of slicing, so that every client of a stacked block has its own position.
        rows = torch.arange(height, device=patch.device) - (noise[0] * (height - p + 1)).long()
        columns = torch.arange(width, device=patch.device) - (noise[1] * (width - p + 1)).long()
        inside = ((rows >= 0) & (rows < p))[:, None] & ((columns >= 0) & (columns < p))[None, :]
        spread = patch[:, rows.clamp(0, p - 1)][:, :, columns.clamp(0, p - 1)]
        return torch.where(inside, spread, 0.0)


class PixelPrompt(Pixels, PrivatePrompt):
    """pFedPT's visual prompt: pixels added to the normalised image. Li et al., "Visual Prompt Based Personalized
    Federated Learning" (TMLR 2024), Section 3.2."""

    about = "private pixel prompt"
    paper = "Li et al., TMLR 2024"

    def check(self, model: Model) -> None:
        super().check(model)
        self.check_pixels(model)

    def start(self, model: Model, seed: int) -> Params:
        return self.pixels(model, torch_rng(seed, "pixel prompt"))

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        canvas = self.canvas(model, params, batch.noise)
        return self.inner.features(model, params, batch._replace(x=batch.x + canvas), ctx)
