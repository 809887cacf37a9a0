"""TPFL and ATPFL: a text context and a pixel prompt on a frozen CLIP, both shared by all clients.

Zhao et al., "Inclusive Data Representation in Federated Learning: A Novel Approach Integrating Textual and Visual
Prompt" (UbiComp/ISWC Adjunct 2023). The paper leaves open how the pixel prompt starts (here as the context does, from
N(0, .02)), the temperature and weight of Eq. 4, the local epochs and the batch size; docs/methods/atpfl.md says what
was taken.
"""

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params
from ..seeding import torch_rng
from ..tuning import Family, as_clip
from ..tunings.pixels import Pixels
from ..tunings.text import TextContext
from .moon import contrast
from .on_frozen import OnFrozen


class Twin(Pixels, TextContext):
    """p(y = c | x) = softmax over c of sim(text feature of c, image feature of x + v) / temperature (Eq. 2)."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "prompt.": "body"}
    about = "text context + pixel prompt"
    family = Family.BOTH
    uncached = "a prompt changes what enters the model"

    prompt_size: int = Field(
        0, ge=0, description="width of the frame or side of the patch, in pixels (p); 0: 30 of 224, in proportion"
    )
    prompt_scale: float = Field(0.02, gt=0, description="standard deviation of the prompt's initial values")

    def side(self, model: Model) -> int:
        return self.prompt_size or max(1, round(30 / 224 * min(model.image[1:])))

    def check(self, model: Model) -> None:
        super().check(model)
        self.check_pixels(model)

    def init(self, model: Model, seed: int) -> Params:
        pixels = self.pixels(model, torch_rng(seed, "pixel prompt"))
        return {**super().init(model, seed), **pixels}

    def frozen_name(self, model: Model) -> str:
        return ""

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return model.features(model.weights, batch.x + self.canvas(model, params, batch.noise))


class Tpfl(OnFrozen):
    """Both prompts are trained by cross-entropy and averaged by numbers of samples (Eq. 3)."""

    paper = "Zhao et al., UbiComp/ISWC Adjunct 2023"
    tuned = Twin

    tuning: Twin = Field(default_factory=Twin, description="what is trained")


class Atpfl(Tpfl):
    """TPFL with both features drawn to those of the received prompts and away from those of the client's previous ones
    (Eq. 4-5). In a client's first round the previous prompts are the received ones."""

    memory = ("body",)

    mu: float = Field(1.0, ge=0, description="weight of the contrastive terms")
    temperature: float = Field(0.5, gt=0, description="temperature of the contrastive terms")

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        return {"received": self.tuning.text(model, ctx.down), "previous": self.tuning.text(model, ctx.memory)}

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        return {
            "received": self.tuning.features(model, ctx.down, batch, ctx),
            "previous": self.tuning.features(model, ctx.memory, batch, ctx),
        }

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        image = self.tuning.features(model, params, batch, ctx)  # (B, d)
        text = self.tuning.text(model, params)  # (classes, d)
        logits = as_clip(model).logits(model.weights, image, text)
        own = F.cross_entropy(logits, batch.y, reduction="none")
        seen = contrast(image, batch.extra["received"], batch.extra["previous"], self.temperature)  # (B,)
        said = contrast(text, ctx.reference["received"], ctx.reference["previous"], self.temperature)  # (classes,)
        return batch.mean(own + self.mu * seen) + self.mu * said.mean(), {}
