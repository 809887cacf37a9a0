"""Method: HOW a tuning is federated. The contract that every method fills in, each part with a default."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from . import params as P
from .errors import UserError
from .models import Model
from .params import Params
from .phases import Batch, Context, Holdings, Optimizer, Phase, Update
from .tuning import Full, Tuning, Wrapper

State = Params  # what the server remembers: flat names to tensors, so that a checkpoint is one safetensors file
ONCE = "once."  # how the names begin of what travels once


class Method(BaseModel):
    """FedAvg in all but name: everything has a default. Fields are the hyper-parameters.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paper: ClassVar[str] = ""
    private: ClassVar[tuple[str, ...]] = ()  # roles that stay with the client, besides the tuning's own "private"
    memory: ClassVar[tuple[str, ...]] = ()  # roles whose trained values the client also remembers
    own_down: ClassVar[bool] = False  # whether down() makes clients models of their own
    needs: ClassVar[tuple[str, ...]] = ()  # roles that the tuning must have
    tuned: ClassVar[type[Tuning]] = Full  # what is tuned unless a plug-in says otherwise; if not Full, none may
    wrapper: ClassVar[type[Wrapper] | None] = None  # what it puts around whatever is tuned

    tuning: Tuning = Field(default_factory=Full, description="what is trained")
    epochs: int = Field(5, ge=0, description="local epochs a round")
    batch_size: int = Field(16, ge=1, description="samples a step")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.005, gt=0, description="local learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    cosine_rounds: int = Field(
        0, ge=0, description="rounds in which learning rates fall to zero along a cosine; 0: they stay as they are"
    )
    finetune_epochs: int = Field(0, ge=0, description="local epochs after training, before evaluation (`+ft`)")

    @model_validator(mode="after")
    def _composes(self) -> Method:
        for role in self.needs:
            if role not in self.roles():
                raise UserError(f'method.name: {type(self).__name__} needs a tuning with a "{role}"')
        return self

    def check(self, model: Model, init: Params) -> None:
        """Raises UserError where the method does not fit the model."""
        for role in set(self.needs) - {self.tuning.role(name) for name in init}:
            raise UserError(
                f'method.name: {type(self).__name__} needs a "{role}", and backbone "{model.name}" has none'
            )

    # ---- roles

    def roles(self) -> tuple[str, ...]:
        """The roles of the tuning that this method trains: all but "private", which the tuning trains itself."""
        return tuple(role for role in self.tuning.role_names() if role != "private")

    def stays(self, name: str) -> bool:
        """Whether the parameter of this name never leaves its client."""
        role = self.tuning.role(name)
        return role == "private" or role in self.private

    def shared(self, params: Params) -> Params:
        return {name: p for name, p in params.items() if not self.stays(name)}

    def kept(self, params: Params) -> Params:
        return {name: p for name, p in params.items() if self.stays(name)}

    def remembered(self, params: Params) -> Params:
        return {name: p for name, p in params.items() if self.tuning.role(name) in self.memory}

    def sgd(self, lr: float | None = None) -> Optimizer:
        """The configured optimiser, at another learning rate if given."""
        return Optimizer(kind=self.optimizer, lr=lr or self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def phase(self, roles: tuple[str, ...] | None = None, lr: float | None = None, **settings: Any) -> Phase:
        """A phase on the given roles (default: all that this method trains)."""
        settings = {"epochs": self.epochs, **settings}
        return Phase({role: self.sgd(lr) for role in roles or self.roles()}, self.batch_size, **settings)

    # ---- client half

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """What local training and evaluation begin with."""
        known = {**init, **private, **down}
        return {name: known[name] for name in init}

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        """Values of each sample that stay the same during a phase, (B, ...) each: found again in batch.extra."""
        return {}

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        """Values of the client, not of a sample, that stay the same during a phase: found again in ctx.reference."""
        return {}

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(),)

    def schedule(self, round: int) -> tuple[Phase, ...]:
        """A round's local training: this method's phases, and its tuning's own ones among them."""
        phases = self.tuning.schedule(self.phases(round))
        if not self.cosine_rounds:
            return phases
        passed = min(round - 1, self.cosine_rounds - 1) / self.cosine_rounds
        return tuple(phase.slower((1 + math.cos(math.pi * passed)) / 2) for phase in phases)

    def adapt(self) -> tuple[Phase, ...]:
        """Training before an evaluation, on a copy, by plain cross-entropy: fine-tuning baselines. A private prompt
        stays as it is."""
        return (self.fine_tune(epochs=self.finetune_epochs),) if self.finetune_epochs else ()

    def fine_tune(self, **settings: Any) -> Phase:
        return self.phase(**{"epochs": 0, **settings}, name="fine-tune", plain=True)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """The client's objective on a batch, and numbers to be summed into the update's stats."""
        logits = self.tuning.logits(model, params, batch, ctx)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}

    def step(self, grad: Callable[[Params], Params], params: Params, phase: Phase) -> Params:
        """The direction the optimiser descends: by default the gradient of loss(). Elementwise in params, which may
        hold one client or a stack of them. Of several gradients taken, the first is the one that is recorded."""
        return grad(params)

    def finish(self, params: Params, ctx: Context) -> Params:
        """After training: the parameters, with what is learnt otherwise than by descent (ctx.stats has the sums)."""
        return params

    def upload(self, params: Params, ctx: Context) -> Params:
        """What goes up: names and shapes of the shared parameters."""
        return self.shared(params)

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """After training: further tensors sent with the update, in its stats."""
        return {}

    def assign(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor | None:
        """(B,): which of its groups each sample falls into, where the method has groups."""
        return None

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """After training: what the client keeps to itself besides private parameters. Under names that no parameter
        has; what it kept under other names before stays."""
        return {}

    def receive_second(self, received: Params, private: Params) -> Params:
        """The answer to send_second(): all that the client keeps to itself from now on, given what it kept."""
        return private

    def secrets(self) -> Params:
        """What a client makes for itself before its first contact, and never sends."""
        return {}

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """First contact: what the client tells the server about itself."""
        return {}

    # ---- server half

    def begin(self, model: Model, init: Params, seed: int) -> State:
        return self.shared(init)

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        """A client joins: at the start (round 0), or before the given round."""
        return state

    def down(self, state: State, client: int) -> Params:
        """What this client receives. Names that begin with `once.` are large and never change: they travel once, and
        are found again in ctx.once without the prefix."""
        return state

    def unusable(self, state: State, update: Update) -> str:
        """Why an update's stats cannot be aggregated; empty if they can. They may come from a stranger: whatever
        aggregate() and send_second() rely on is looked at here. Parameters have been."""
        return ""

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """Mean of what the clients sent, weighted by their numbers of samples."""
        return {**state, **P.mean([u.up for u in updates], [u.n for u in updates])}

    def send_second(self, state: State, updates: list[Update]) -> dict[int, Params]:
        """After aggregation: a second message to some of the round's clients, for their receive_second()."""
        return {}

    def common(self, state: State) -> Params | None:
        """The one model that a personal method has besides the clients' own: for clients that never train."""
        return None

    # ---- what it is

    @property
    def personal(self) -> bool:
        """Whether clients end up with models of their own, rather than one global model."""
        keeps = bool(self.private) or "private" in self.tuning.role_names()
        return keeps or self.own_down or bool(self.adapt())

    @property
    def serves(self) -> bool:
        """Whether there is a model for a client that never trains."""
        return not self.personal or type(self).common is not Method.common

    @property
    def enrolls(self) -> bool:
        """Whether clients have anything to make or to tell before their first round."""
        return type(self).enroll is not Method.enroll or type(self).secrets is not Method.secrets


class FedAvg(Method):
    """The contract's defaults, under their own name."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"


def split_once(down: Params) -> tuple[Params, Params]:
    """What a client receives: what is sent every time, and what travels once, without the prefix."""
    once = {name.removeprefix(ONCE): p for name, p in down.items() if name.startswith(ONCE)}
    return {name: p for name, p in down.items() if not name.startswith(ONCE)}, once
