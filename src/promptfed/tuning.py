"""Tuning: WHAT is trained, and how it enters the model. How it is federated is up to the Method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from .errors import UserError
from .models import CLIP, Model, ViT
from .params import Params
from .phases import Batch, Context, Optimizer, Phase

# Roles of values that are neither trained nor sent by clients.
GIVEN = "given"  # the server computes them, and clients receive them
FROZEN = "frozen"  # every client has them from init(), and they stay so
STORED = "stored"  # a client computes them from its own training data

NEEDS_VIT = "a transformer is needed (allowed: vit-mini, vit-tiny, a published ViT, or a CLIP with backbone.part=image)"
NEEDS_CLIP = "a CLIP is needed (allowed: clip-mini, or a published one)"
FEATURES = "features"  # frozen_name() of the features of an image without any prompt


class Family(StrEnum):
    """What is tuned, in the order in which methods are listed."""

    TEXT = "text prompts of a CLIP"
    BOTH = "prompts on images and text of a CLIP"
    TOKENS = "prompt tokens of a vision transformer"
    PRIVATE = "private prompts, added to any tuning"
    LAYERS = "low-rank updates, biases or adapters in frozen layers"
    FEATURES = "a head or attention on frozen features"
    WEIGHTS = "all weights, or what a plug-in tunes instead"
    OTHER = "something else"


class Tuning(BaseModel):
    """The trained parameters: their initial values, their roles, and the prediction they make.

    Each parameter has a role, found by the first matching prefix in `roles`. A Method speaks of roles only: "body" and
    "head" are the usual ones, a parameter whose role is "private" never leaves its client under any method, one whose
    role is "given" is computed by the server, one whose role is "stored" is computed by the client from its own
    training data, and one whose role is "frozen" keeps its initial value everywhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    roles: ClassVar[dict[str, str]] = {"body.": "body", "head.": "head"}
    about: ClassVar[str] = ""
    role_words: ClassVar[dict[str, str]] = {}  # what lists call a role by, where not all roles are sent
    family: ClassVar[Family | None] = Family.OTHER  # None: that of the tuning it is around
    paper: ClassVar[str] = ""  # of a tuning that is published as a method with FedAvg
    per_class: ClassVar[bool] = False  # whether it has values for each class, so that no unseen one can be named
    backbones: ClassVar[str] = "any"  # which ones it can enter: any, transformers, CLIP, or CLIP with a ViT
    images: ClassVar[bool] = False  # whether batches hold images besides cached outputs of frozen layers
    uncached: ClassVar[str] = "all weights are trained"  # why, where frozen_name() is empty

    def role(self, name: str) -> str:
        for prefix, role in self.roles.items():
            if name.startswith(prefix):
                return role
        raise KeyError(f'no role for parameter "{name}" in {type(self).__name__}.roles')

    def role_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.roles.values()))

    def check(self, model: Model) -> None:
        """Raises UserError if this tuning cannot enter this model."""

    @abstractmethod
    def init(self, model: Model, seed: int) -> Params:
        """What is trained, at its start: by name, the same for all clients."""

    def frozen_name(self, model: Model) -> str:
        """The name of what frozen() returns: equal names mean equal values. Empty if it returns nothing."""
        return ""

    def frozen(self, model: Model, x: Tensor) -> Params:
        """Values (B, ...) of samples that depend only on frozen weights: computed once, and in batch.frozen instead of
        the images, or besides them if `images` is set."""
        return {}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, d): what the head sees."""
        return model.features({**model.weights, **params}, batch.x, batch.tokens)

    def feature_roles(self) -> tuple[str, ...]:
        """The roles that features() depends on, if on nothing else of a client: clients with equal parameters of these
        roles then share features in an evaluation. Empty: they do not."""
        return ()

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        """(B, d) -> (B, classes)."""
        return model.classify({**model.weights, **params}, features)

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        """(B, classes)."""
        return self.head(model, params, self.features(model, params, batch, ctx))

    def schedule(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """The method's phases, combined with this tuning's own."""
        return phases

    @property
    def draws(self) -> bool:
        """Whether features depend on a batch's noise."""
        return False

    @property
    def collects(self) -> bool:
        """Whether clients send sums() before the first round."""
        return False

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        """Client: sums over a batch of its training samples, with the initial parameters."""
        return {}

    def summed(self, model: Model, features: Tensor, y: Tensor) -> Params:
        """The same, given the features."""
        return {}

    def started(self) -> tuple[str, ...]:
        """Trained parameters among constants(): the server must have one initial value of each."""
        return ()

    def stored(self, model: Model, params: Params, batches: Iterator[Batch]) -> Params:
        """Client, at its first contact: its values of the role "stored", from its training samples and the initial
        parameters. A client that never had this contact keeps their initial values."""
        return {}

    def constants(self, sums: Params) -> Params:
        """Server: initial values of parameters, from the sums over all clients' training samples."""
        return {}


class Full(Tuning):
    """Every weight of the backbone."""

    about = "all weights"
    family = Family.WEIGHTS

    def init(self, model: Model, seed: int) -> Params:
        return {name: p.clone() for name, p in model.weights.items()}

    def feature_roles(self) -> tuple[str, ...]:
        return ("body",)


class OnFeatures(Tuning):
    """A tuning on top of the features of a frozen image model."""

    def frozen_name(self, model: Model) -> str:
        return FEATURES

    def frozen(self, model: Model, x: Tensor) -> Params:
        return {"features": model.features(model.weights, x)}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        if batch.frozen:
            return batch.frozen["features"]
        return model.features(model.weights, batch.x, batch.tokens)  # inside a private prompt, which changes the input


class Wrapper(Tuning):
    """A tuning around another one, with parameters of its own besides that one's."""

    uncached = ""  # it is up to the inner tuning
    family: ClassVar[Family | None] = None

    inner: Tuning = Field(default_factory=Full, description="the tuning that is wrapped")

    def role(self, name: str) -> str:
        return super().role(name) if name.startswith(tuple(self.roles)) else self.inner.role(name)

    def role_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().role_names(), *self.inner.role_names())))

    def check(self, model: Model) -> None:
        self.inner.check(model)

    def init(self, model: Model, seed: int) -> Params:
        return self.inner.init(model, seed)

    def frozen_name(self, model: Model) -> str:
        return self.inner.frozen_name(model)

    def frozen(self, model: Model, x: Tensor) -> Params:
        return self.inner.frozen(model, x)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.inner.head(model, params, features)

    def schedule(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return self.inner.schedule(phases)

    @property
    def draws(self) -> bool:
        return self.inner.draws

    @property
    def collects(self) -> bool:
        return self.inner.collects

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        return self.inner.summed(model, self.features(model, params, batch, ctx), batch.y)

    def constants(self, sums: Params) -> Params:
        return self.inner.constants(sums)

    def started(self) -> tuple[str, ...]:
        return self.inner.started()

    def stored(self, model: Model, params: Params, batches: Iterator[Batch]) -> Params:
        return self.inner.stored(model, params, batches)


class Transparent(Wrapper):
    """A wrapper that predicts as what it is around: it gives roles, or has parameters that a method alone uses."""

    roles = {}

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.features(model, params, batch, ctx)

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        return self.inner.logits(model, params, batch, ctx)


class PrivatePrompt(Wrapper):
    """A prompt that each client keeps for itself, wrapped around any tuning and trained before it (pFedPT, Eq. 5)."""

    roles = {"prompt.": "private"}
    family = Family.PRIVATE
    uncached = "a prompt changes what enters the model"

    prompt_epochs: int = Field(5, ge=0, description="epochs on the prompt alone at the start of a round (E_g)")
    prompt_lr: float = Field(1.0, gt=0, description="learning rate of the prompt (SGD)")
    prompt_momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the prompt's SGD")
    keep_momentum: bool = Field(
        False, description="the prompt's momentum goes on from round to round instead of starting at zero"
    )
    joint: bool = Field(False, description="train prompt and weights at once instead of one after the other (Table 8)")

    def frozen_name(self, model: Model) -> str:
        return ""

    def init(self, model: Model, seed: int) -> Params:
        return {**self.start(model, seed), **self.inner.init(model, seed)}

    @abstractmethod
    def start(self, model: Model, seed: int) -> Params:
        """The prompt's initial value, the same for all clients."""

    def schedule(self, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        optimizer = Optimizer(
            lr=self.prompt_lr, momentum=self.prompt_momentum, kept=self.keep_momentum and self.prompt_momentum > 0
        )
        if self.joint:
            both = self.inner.schedule(phases)
            return tuple(replace(phase, train={**phase.train, "private": optimizer}) for phase in both)
        if not phases or not self.prompt_epochs:
            return self.inner.schedule(phases)
        # Eq. 5 is plain cross-entropy whatever the method's own objective: `plain`.
        own = Phase({"private": optimizer}, phases[0].batch_size, self.prompt_epochs, name="prompt", plain=True)
        return (own, *self.inner.schedule(phases))


def as_vit(model: Model) -> ViT:
    """The model, if prompt tokens can enter each of its layers."""
    if not isinstance(model, ViT):
        raise UserError(f'backbone.name = "{model.name}" takes no tokens: {NEEDS_VIT}')
    return model


def as_clip(model: Model) -> CLIP:
    if not isinstance(model, CLIP):
        raise UserError(f'backbone.name = "{model.name}" has no text tower: {NEEDS_CLIP}')
    return model
