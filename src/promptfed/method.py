"""Method: HOW a tuning is federated. The contract of every method, each part with a default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from . import params as P
from .errors import UserError
from .models import Model
from .params import Params
from .phases import Batch, Context, Holdings, Normal, Optimizer, Phase, Update
from .tuning import FROZEN, GIVEN, STORED, Full, Tuning, Wrapper

State = Params  # what the server remembers: flat names to tensors, so that a checkpoint is one safetensors file
ONCE = "once"  # names below it are sent only once
SUMS = "sums"  # names below it stay with the server: what clients have sent of Tuning.sums(), added up


class Method(BaseModel):
    """FedAvg in all but name: everything has a default. Fields are the hyper-parameters.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017).

    A method overrides the hooks in which it differs. This one pulls clients to what they received, and the server goes
    only part of the way to their mean:

    >>> import torch
    >>> from promptfed import Method, Update, params
    >>> class Careful(Method):
    ...     pull: float = 0.1
    ...     rate: float = 0.5
    ...
    ...     def loss(self, model, values, batch, ctx):
    ...         loss, stats = super().loss(model, values, batch, ctx)
    ...         return loss + self.pull * params.sqdist(self.shared(values), ctx.down), stats
    ...
    ...     def aggregate(self, state, updates):
    ...         mean = super().aggregate(state, updates)
    ...         return {name: p + self.rate * (mean[name] - p) for name, p in state.items()}

    Two clients with 1 and 3 samples have moved one weight from 0 to 4 and to 8, whose mean is 7:

    >>> state = {"head.bias": torch.tensor([0.0])}
    >>> first = Update(client=0, sent=state, up={"head.bias": torch.tensor([4.0])}, n=1)
    >>> second = Update(client=1, sent=state, up={"head.bias": torch.tensor([8.0])}, n=3)
    >>> Careful().aggregate(state, [first, second])["head.bias"]
    tensor([3.5000])
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paper: ClassVar[str] = ""
    sends: ClassVar[str] = ""  # what a client sends besides parameters, for lists
    keeps: ClassVar[str] = ""  # what it keeps besides parameters, for lists
    private: ClassVar[tuple[str, ...]] = ()  # roles that stay with the client, besides the tuning's own "private"
    memory: ClassVar[tuple[str, ...]] = ()  # roles whose trained values the client also remembers
    own_down: ClassVar[bool] = False  # whether down() gives clients models of their own
    averages: ClassVar[bool] = True  # whether aggregate() averages updates; if not, rules cannot choose among them
    by_mean: ClassVar[bool] = False  # whether an aggregate() of its own uses only a mean, which a rule can replace
    needs: ClassVar[tuple[str, ...]] = ()  # roles that the tuning must have
    takes: ClassVar[str] = ""  # the tunings that it is for, in words, if it cannot tune all weights
    reference: ClassVar[bool] = False  # whether tables show it apart, to measure others by
    uses_validation: ClassVar[bool] = (
        False  # whether validation data take part in training: accuracy on them is too high
    )
    centralised: ClassVar[bool] = False  # whether all clients' training data are pooled
    tuned: ClassVar[type[Tuning]] = Full  # what is tuned unless a plug-in says otherwise; if not Full, none may
    wrapper: ClassVar[type[Wrapper] | None] = None  # what it wraps around any tuning

    tuning: Tuning = Field(default_factory=Full, description="what is trained")
    epochs: int = Field(5, ge=0, description="local epochs per round")
    batch_size: int = Field(16, ge=1, description="samples per step")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.005, gt=0, description="local learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    cosine_rounds: int = Field(
        0, ge=0, description="rounds in which learning rates fall to zero along a cosine; 0: they are constant"
    )
    finetune_epochs: int = Field(0, ge=0, description="local epochs after training, before evaluation (`+ft`)")

    # ---- hooks of a round, in its order

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """Server, before the first round: its state. By default the shared parameters under their own names."""
        return self.shared(init)

    def down(self, state: State, client: int) -> Params:
        """Server: what this client receives. Names below `once` are large and never change: they are sent only once,
        and are in ctx.once without the prefix."""
        return {name: p for name, p in state.items() if not name.startswith(f"{SUMS}.")}

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """Client: the parameters that local training starts with."""
        known = {**init, **private, **down}
        return {name: known[name] for name in init}

    def phases(self, round: int) -> tuple[Phase, ...]:
        """Client: the phases of local training."""
        return (self.phase(),)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """Client: the objective on a batch, and numbers to be summed into the update's stats."""
        logits = self.tuning.logits(model, params, batch, ctx)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}

    def upload(self, params: Params, ctx: Context) -> Params:
        """Client: what is sent, with the names and shapes of uploads()."""
        return self.shared(params)

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """Server: the new state. By default of the clients' mean, weighted by their numbers of samples."""
        return self.merge(state, P.mean([u.up for u in updates], [u.n for u in updates]))

    def adapt(self) -> tuple[Phase, ...]:
        """Client: training before an evaluation, on a copy, by plain cross-entropy: fine-tuning baselines. A private
        prompt is not trained."""
        return (self.fine_tune(epochs=self.finetune_epochs),) if self.finetune_epochs else ()

    # ---- hooks that few methods need

    def check(self, model: Model, init: Params) -> None:
        """Before a run: raises UserError if the method does not fit the model."""
        for role in set(self.needs) - {self.tuning.role(name) for name in init}:
            raise UserError(
                f'method.name: {type(self).__name__} needs a "{role}", and backbone "{model.name}" has none'
            )
        started = set(self.tuning.started())
        if started and not started <= set(self.begin(model, init, 0)):
            raise UserError(
                f'method.head_init = "class-mean": {type(self).__name__} has no one head that all clients start from '
                "(allowed: random, zero)"
            )

    def serve(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """Client: the parameters that it predicts with. They differ from start() where training starts elsewhere, or
        where a client that has not trained yet lacks a part of its own."""
        return self.start(init, down, private, memory)

    def secrets(self) -> Params:
        """Client, before its first contact: what it makes for itself and never sends."""
        return {}

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """Client, at its first contact: what it tells the server about itself. By default the sums of its tuning."""
        told: Params = {}
        if self.tuning.collects:
            ctx = Context({}, {}, None, own.label_counts.sum(), own.label_counts)
            for batch in own.train():
                told = _added(told, P.nested(SUMS, self.tuning.sums(model, init, batch, ctx)))
        return told

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        """Server, at the first contact with a client: at the start (round 0), or before the given round. By default
        what the tuning computes from the sums of all clients that are there at the start."""
        sums = P.under(hello, SUMS)
        return self.add_sums(state, sums) if sums and round == 0 else state

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        """Client: its values that are constant during a phase, in ctx.reference."""
        return {}

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        """Client: values of each sample that are constant during a phase, (B, ...) each, in batch.extra."""
        return {}

    def step(self, grad: Callable[[Params], Params], params: Params, phase: Phase, normal: Normal) -> Params:
        """Client: the direction the optimiser descends, by default the gradient of loss(). Parameters may be those of
        several clients, stacked along a first axis, and must not mix; normal(*shape) gives each client random numbers
        of its own. Of several gradients taken, the loss of the first is recorded."""
        return grad(params)

    def end_phase(self, params: Params, ctx: Context) -> Params:
        """Client, after a phase that is not plain: the parameters that the next one, or a prediction, starts from."""
        return params

    def finish(self, params: Params, ctx: Context) -> Params:
        """Client, after training: the parameters, with those learned other than by descent (sums are in ctx.stats)."""
        return params

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """Client, after training: further tensors sent with the update, in its stats."""
        return {}

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """Client, after training: what it stores besides private parameters, under names that no parameter has.
        Values stored earlier under other names remain. Parameters that upload() sends as they are have the values that
        the server gets, noise of privacy included."""
        return {}

    def uploads(self, shared: Params, client: int) -> Params:
        """Server: the shared parameters in the shapes that this client sends. They differ between clients where those
        that down() sends do."""
        return shared

    def unusable(self, state: State, update: Update) -> str:
        """Server: why an update's stats cannot be aggregated; empty if they can. The client may be untrusted: whatever
        aggregate() and send_second() rely on is checked here, and names and sizes of all stats. Parameters have been
        checked. By default a method takes no stats unless its loss() or report() makes some."""
        kind = type(self)
        silent = kind.loss is Method.loss and kind.report is Method.report
        return unknown_stats(update, () if silent else update.stats)

    def stride(self, n: int) -> float:
        """Server: what the change of a client with n samples is divided by where aggregate() compares clients."""
        return 1.0

    def merge(self, state: State, mean: Params) -> State:
        """Server: the new state, by the clients' mean alone. A method that needs no more overrides this instead of
        aggregate(): updates are then added up as they come, and a round needs the memory of one."""
        return {**state, **mean}

    def send_second(self, state: State, updates: list[Update]) -> dict[int, Params]:
        """Server, after aggregation: a second message to some of the round's clients."""
        return {}

    def receive_second(self, received: Params, private: Params) -> Params:
        """Client: everything it keeps to itself from now on, given the second message and what it kept."""
        return private

    def common(self, state: State) -> Params | None:
        """Server: the one model that a personal method has besides the clients' own, for clients that never train."""
        return None

    def describe(self, state: State, clients: Sequence[int]) -> dict[str, float]:
        """Server, at an evaluation: numbers about its state for the record, given the clients that have a model."""
        return {}

    def assign(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor | None:
        """Evaluation: (B,) the group of each sample, if the method has groups."""
        return None

    # ---- for use in hooks

    def roles(self) -> tuple[str, ...]:
        """The roles of the tuning that this method trains: all but "private", which the tuning trains itself, and
        those that are not trained."""
        untrained = ("private", GIVEN, FROZEN, STORED)
        return tuple(role for role in self.tuning.role_names() if role not in untrained)

    def stays(self, name: str) -> bool:
        """Whether the parameter of this name never leaves its client."""
        return self.stays_role(self.tuning.role(name))

    def stays_role(self, role: str) -> bool:
        return role in ("private", STORED) or role in self.private

    def shared(self, params: Params) -> Params:
        return {n: p for n, p in params.items() if not self.stays(n) and self.tuning.role(n) not in (GIVEN, FROZEN)}

    def kept(self, params: Params) -> Params:
        return {n: p for n, p in params.items() if self.stays(n)}

    def add_sums(self, state: State, sums: Params) -> State:
        """The state with a client's sums added, and what the tuning computes from them all."""
        total = _added(P.under(state, SUMS), sums)
        made = {name: p.float() for name, p in self.tuning.constants(total).items()}
        return {**state, **P.nested(SUMS, total), **made}

    def unmoved(self, init: Params, ctx: Context) -> Params:
        """What a client would send had training changed nothing: by what it received alone."""
        with torch.no_grad():
            return self.upload(self.start(init, ctx.down, {}, {}), ctx)

    def remembered(self, params: Params) -> Params:
        return {name: p for name, p in params.items() if self.remembers_role(self.tuning.role(name))}

    def remembers_role(self, role: str) -> bool:
        return role in self.memory

    def sgd(self, lr: float | None = None) -> Optimizer:
        """The configured optimiser, with another learning rate if given."""
        return Optimizer(kind=self.optimizer, lr=lr or self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def phase(self, roles: tuple[str, ...] | None = None, lr: float | None = None, **settings: Any) -> Phase:
        """A phase on the given roles (default: all that this method trains)."""
        settings = {"epochs": self.epochs, **settings}
        return Phase({role: self.sgd(lr) for role in roles or self.roles()}, self.batch_size, **settings)

    def fine_tune(self, **settings: Any) -> Phase:
        return self.phase(**{"epochs": 0, **settings}, name="fine-tune", plain=True)

    # ---- what the round loop asks

    @model_validator(mode="after")
    def _composes(self) -> Method:
        for role in self.needs:
            if role not in self.roles():
                raise UserError(f'method.name: {type(self).__name__} needs a tuning with a "{role}"')
        return self

    def schedule(self, round: int) -> tuple[Phase, ...]:
        """A round's local training: this method's phases, combined with those of its tuning."""
        phases = self.tuning.schedule(self.phases(round))
        if not self.cosine_rounds:
            return phases
        passed = min(round - 1, self.cosine_rounds - 1) / self.cosine_rounds
        return tuple(phase.slower((1 + math.cos(math.pi * passed)) / 2) for phase in phases)

    @property
    def personal(self) -> bool:
        """Whether clients end up with models of their own, rather than one global model."""
        keeps = bool(self.private) or not {"private", STORED}.isdisjoint(self.tuning.role_names())
        return keeps or self.own_down or bool(self.adapt())

    @property
    def serves(self) -> bool:
        """Whether there is a model for a client that never trains."""
        return not self.personal or type(self).common is not Method.common

    @property
    def streams(self) -> bool:
        """Whether the server needs only the mean of a round's updates."""
        return type(self).aggregate is Method.aggregate and type(self).send_second is Method.send_second

    @property
    def enrolls(self) -> bool:
        """Whether clients have anything to make or to send before their first round."""
        own = type(self).enroll is not Method.enroll or type(self).secrets is not Method.secrets
        return own or self.tuning.collects or STORED in self.tuning.role_names()


class FedAvg(Method):
    """The contract's defaults, under their own name."""

    paper = "McMahan et al., AISTATS 2017"


def split_once(down: Params) -> tuple[Params, Params]:
    """What a client receives -> what is sent every time, and what is sent only once, without the prefix."""
    return {name: p for name, p in down.items() if not name.startswith(f"{ONCE}.")}, P.under(down, ONCE)


def unknown_stats(update: Update, known: Iterable[str]) -> str:
    """Names of stats beyond the known ones, as a reason to leave the update out; empty if there are none."""
    names = sorted(set(update.stats) - set(known))
    return f"unknown stats: {', '.join(repr(name[:50]) for name in names[:3])}" if names else ""


def _added(a: Params, b: Params) -> Params:
    return {name: a[name] + b[name] if name in a and name in b else {**a, **b}[name] for name in {**a, **b}}
