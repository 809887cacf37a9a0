"""The nouns of a round: what local training is made of, and what a client holds, sees and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from .params import Params
from .seeding import torch_rng

Normal = Callable[..., Tensor]  # (*shape) -> standard normal numbers of that shape, from a client's own generator


class Optimizer(BaseModel):
    """An elementwise optimiser, so that clients stacked in one tensor stay independent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    kept: bool = False  # momentum goes on in the client's next round instead of starting at zero


@dataclass(frozen=True)
class Phase:
    """One block of local training: which roles are trained, with which optimiser, for how long."""

    train: Mapping[str, Optimizer]  # role -> optimiser
    batch_size: int
    epochs: int = 0
    steps: int = 0  # instead of epochs
    name: str = "train"
    plain: bool = False  # plain cross-entropy instead of the method's own loss

    def length(self, n: int) -> int:
        """Its number of steps on n samples."""
        return self.steps if n and self.steps else self.epochs * -(-n // self.batch_size)

    def passes(self, n: int) -> float:
        """How many of n samples its steps draw, with repetition."""
        return self.steps * n / -(-n // self.batch_size) if n and self.steps else self.epochs * n

    def slower(self, factor: float) -> Phase:
        """The same with learning rates multiplied by this factor."""
        return replace(self, train={role: o.model_copy(update={"lr": o.lr * factor}) for role, o in self.train.items()})


class Batch(NamedTuple):
    """Samples of ONE client. A tuple, so that vmap can split a stack of them."""

    x: Tensor  # (B, C, H, W), normalised
    y: Tensor  # (B,)
    weight: Tensor | None  # (B,) 1 for a sample, 0 for padding; None if there is no padding
    noise: Tensor  # (2,) uniform random numbers of this batch, for tunings that draw
    extra: Params  # the result of sample_constants() for these samples
    # The result of the tuning's frozen() for them; x is empty (B, 0) then.
    frozen: Params = {}  # noqa: RUF012 - never written to
    tokens: Tensor | None = None  # (T, width), set by a token prompt for the tuning that it wraps

    def mean(self, values: Tensor) -> Tensor:
        """The mean of (B,) values over the samples, without padding."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp(min=1)

    def half(self, which: Literal[0, 1]) -> Batch:
        """The even or the odd samples. A batch of one sample is both its halves."""
        if len(self.y) < 2:
            return self
        # In a padded batch the odd half may be all padding: then the even samples replace it.
        lone = None if self.weight is None or which == 0 else self.weight[1::2].sum() == 0

        def cut(v: Tensor) -> Tensor:
            part = v[which::2]
            return part if lone is None else torch.where(lone, v[: 2 * len(part) : 2], part)

        weight = None if self.weight is None else cut(self.weight)
        extra = {name: cut(v) for name, v in self.extra.items()}
        frozen = {name: cut(v) for name, v in self.frozen.items()}
        return self._replace(x=cut(self.x), y=cut(self.y), weight=weight, extra=extra, frozen=frozen)


@dataclass(frozen=True)
class Context:
    """What a loss may use besides parameters and batch; of ONE client."""

    down: Params  # as received this round
    memory: Params  # what the client remembered of earlier rounds (empty the first time)
    phase: Phase | None  # None outside of training
    n: Tensor  # () number of training samples
    label_counts: Tensor  # (classes,) of the training samples
    reference: Params = field(default_factory=dict)  # the result of client_constants() for this phase
    stats: Params = field(default_factory=dict)  # summed so far in this round; empty before the first step
    # What was sent once and kept by the client. In a loss it must be the same for all clients: a block shares it.
    once: Params = field(default_factory=dict)
    private: Params = field(default_factory=dict)  # everything the client keeps to itself; not available in a loss
    draws: tuple[int, ...] = ()  # seed, round and client, which name what random() draws; not available in a loss

    def trains(self, role: str) -> bool:
        return self.phase is not None and role in self.phase.train

    def random(self, use: str) -> torch.Generator:
        """The client's own in this round: the same one whenever it is asked for this use."""
        return torch_rng(*self.draws, use)

    def within(self, phase: str) -> bool:
        return self.phase is not None and self.phase.name == phase


@dataclass(frozen=True)
class Holdings:
    """What a client may use at its first contact with the server."""

    train: Callable[[], Iterator[Batch]]  # its samples in batches, in order
    val: Callable[[], Iterator[Batch]]
    label_counts: Tensor  # (classes,) of the training samples
    private: Params  # the result of secrets()


@dataclass(frozen=True)
class Update:
    """A client's answer to a round."""

    client: int
    sent: Params  # what the server had sent
    up: Params
    n: int
    stats: Params = field(default_factory=dict)
    loss: float | None = 0.0  # None: not reported
    passes: int = 0  # samples drawn in training
    bytes_down: int = 0
    bytes_up: int = 0
    error: str = ""  # why it must not be used
    moved: Mapping[str, float] = field(default_factory=dict)  # role -> L2 change in training, if recorded
