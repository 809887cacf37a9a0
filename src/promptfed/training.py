"""Local training of a block of clients: pure functions of parameters and data.

A method's loss is written for one client. A block of K > 1 clients is trained as one: their states are stacked,
`vmap(loss)` gives K losses, and the gradient of their sum holds each client's own gradient. K = 1 skips vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from . import Batch, Context, Method, Model, Params, Phase
from . import params as P
from .optimizers import Sgd, optimizers
from .phases import Normal
from .precision import full, loss_scale
from .seeding import rng

CHUNK = 128  # samples per forward pass where no gradient is needed
MOMENTUM = "momentum"  # private values below it: momentum that a client keeps from round to round, by parameter


@dataclass(frozen=True)
class Samples:
    """Images as they are stored, and how they are normalised; or instead cached outputs of frozen layers."""

    x: Tensor  # (n, C, H, W) uint8
    y: Tensor  # (n,)
    mean: Tensor  # (C, 1, 1), on the scale of x
    std: Tensor  # (C, 1, 1)
    frozen: Params = field(default_factory=dict)  # (n, ...) each; x is (n, 0) then, unless the tuning needs both
    views: Views | None = None  # of training samples that vary

    def __len__(self) -> int:
        return len(self.y)

    def images(self, index: Tensor | slice) -> Tensor:
        return self.normalise(self.x[index].float())

    def normalise(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std if x.ndim == 4 else x


class Views(Protocol):
    """Random views of a client's training samples."""

    def draw(self, g: np.random.Generator) -> np.ndarray:
        """(n, ...): which views the samples have in an epoch."""

    def __call__(self, samples: Samples, at: Tensor, drawn: np.ndarray) -> tuple[Tensor, Params]:
        """`x` and `frozen` of a batch: samples at these places, in these views. They may be other clients'."""


@dataclass
class Work:
    """One client's part of a block."""

    client: int
    samples: Samples
    params: Params
    down: Params
    memory: Params
    once: Params = field(default_factory=dict)
    private: Params = field(default_factory=dict)
    draws: tuple[int, ...] = ()  # seed, round and client
    counts: tuple[Tensor, Tensor] | None = field(default=None, init=False)  # n and label_counts, once they are known


@dataclass(frozen=True)
class Trained:
    params: Params
    stats: Params = field(default_factory=dict)
    loss: float = 0.0  # mean over the samples drawn in the last phase
    passes: int = 0
    momentum: Params = field(default_factory=dict)  # of parameters whose momentum is kept


def train(
    method: Method, model: Model, block: Sequence[Work], phases: Sequence[Phase], seed: int, round: int
) -> list[Trained]:
    """Runs the phases on every client of the block."""
    if len({tuple(p.shape for p in work.params.values()) for work in block}) > 1:  # they cannot be stacked
        return [train(method, model, [work], phases, seed, round)[0] for work in block]
    done = [Trained(work.params, momentum=P.under(work.private, MOMENTUM)) for work in block]
    for number, phase in enumerate(phases):
        plans = [
            list(batches(len(work.samples), phase, rng(seed, round, work.client, "batches", number))) for work in block
        ]
        if not any(plans):
            continue
        noise = [rng(seed, round, work.client, "noise", number) for work in block]
        views = [
            drawn_views(work.samples, plan, partial(rng, seed, round, work.client, "views", number))
            for work, plan in zip(block, plans, strict=True)
        ]
        local = LocalPhase(method, model, block, done, phase, _normals(seed, round, block, number))
        for indices, drawn in zip(zip_longest(*plans), zip_longest(*views), strict=True):
            local.step(indices, np.stack([g.random(2, np.float32) for g in noise]), drawn)
        done = local.final()
        if not phase.plain and type(method).end_phase is not Method.end_phase:
            done = [
                _ended(method, model, work, client, phase) if plan else client
                for work, client, plan in zip(block, done, plans, strict=True)
            ]
    return done


def _ended(method: Method, model: Model, work: Work, client: Trained, phase: Phase) -> Trained:
    with torch.no_grad():
        return replace(client, params=method.end_phase(client.params, context(work, model, phase, client.stats)))


def _normals(seed: int, round: int, block: Sequence[Work], phase: int) -> Normal:
    """Standard normal numbers of each client of a block, (K, *shape), or (*shape) of one client."""
    generators: list[np.random.Generator] = []

    def normal(*shape: int) -> Tensor:
        if not generators:  # few methods ask
            generators.extend(rng(seed, round, work.client, "normal", phase) for work in block)
        drawn = [g.standard_normal(shape, np.float32) for g in generators]
        return _upload(np.stack(drawn) if len(drawn) > 1 else drawn[0], block[0].samples.y.device)

    return normal


def batches(n: int, phase: Phase, g: np.random.Generator) -> Iterator[np.ndarray]:
    """Indices of the samples of each step: a new order every epoch, the last batch of an epoch may be shorter."""
    steps = phase.steps
    for _ in range(phase.epochs or (steps if n else 0)):
        order = g.permutation(n)
        for i in range(0, n, phase.batch_size):
            yield order[i : i + phase.batch_size]
            if phase.steps:
                steps -= 1
                if not steps:
                    return


def drawn_views(
    samples: Samples, plan: Sequence[np.ndarray], generator: Callable[[], np.random.Generator]
) -> Iterator[np.ndarray | None]:
    """The views of the samples of each step. An epoch draws those of all samples in their order: a sample's view does
    not depend on its batch."""
    if samples.views is None:
        yield from [None] * len(plan)
        return
    g, left = generator(), 0  # left: samples of the epoch that are still to come
    for index in plan:
        if not left:
            epoch, left = samples.views.draw(g), len(samples)
        left -= len(index)
        yield epoch[index]


class LocalState(NamedTuple):
    """A client within a phase. A tuple of tensors, so that vmap can split a stack of clients."""

    trained: Params  # parameters that the phase trains
    fixed: Params  # the others
    down: Params
    memory: Params
    n: Tensor  # ()
    label_counts: Tensor  # (classes,)
    reference: Params  # client_constants()
    stats: Params  # summed so far in this round


_STACKED = Batch._make([0, 0, 0, 0, 0, 0, None])  # the stacked axis of each part, for vmap; there are no tokens yet


def client_loss(
    method: Method, model: Model, phase: Phase, once: Params, state: LocalState, batch: Batch
) -> tuple[Tensor, Params]:
    """The objective of one client, and numbers to be summed into its stats."""
    ctx = Context(state.down, state.memory, phase, state.n, state.label_counts, state.reference, state.stats, once)
    objective = Method.loss if phase.plain else type(method).loss
    return objective(method, model, {**state.fixed, **state.trained}, batch, ctx)


class LocalPhase:
    """One phase of a block's local training: initialised, then step() for each batch, then final()."""

    def __init__(
        self,
        method: Method,
        model: Model,
        block: Sequence[Work],
        before: Sequence[Trained],
        phase: Phase,
        normal: Normal,
    ) -> None:
        self.method, self.phase, self.before, self.normal = method, phase, before, normal
        self.samples, self.offsets = _concatenate([work.samples for work in block])
        # Where samples vary, the constants of each client's batch are computed with the batch.
        varies = _has_constants(method, phase) and _vary(method, self.samples)
        self.constants: list[Callable[[Batch], Params]] = []
        states, extra = [], []
        for work, client in zip(block, before, strict=True):
            ctx = context(work, model, phase, client.stats)
            reference, parts = _constants(method, model, client.params, work.samples, ctx)
            extra += parts
            if varies:
                self.constants.append(partial(method.sample_constants, model, client.params, ctx=ctx))
            moving = {n: p.detach().clone() for n, p in client.params.items() if method.tuning.role(n) in phase.train}
            fixed = {name: p for name, p in client.params.items() if name not in moving}
            given = (ctx.down, ctx.memory, ctx.n, ctx.label_counts)
            states.append(LocalState(moving, fixed, *given, reference, client.stats))
        self.state = _stack(states)
        # Of every sample of the block, (sum of n, ...) each.
        self.extra = {name: torch.cat([part[name] for part in extra]) for name in extra[0]} if extra else {}
        for p in self.state.trained.values():
            p.requires_grad_()
        loss = partial(client_loss, method, model, phase, block[0].once)
        self.loss = vmap(loss, in_dims=(0, _STACKED)) if len(block) > 1 else loss
        self.optimizers = optimizers(method, phase, self.state.trained)
        self.momentum = self._resume_momentum()
        self.loss_sums = torch.zeros(len(block), device=self.samples.y.device)
        self.drawn = np.zeros(len(block), np.int64)

    def step(self, indices: Sequence[np.ndarray | None], noise: np.ndarray, views: Sequence[np.ndarray | None]) -> None:
        """One step on the next batch of each client, in these views if its samples vary; None where a client has no
        batches left. noise: (K, 2)."""
        sizes = [0 if index is None else len(index) for index in indices]
        active = [index is not None for index in indices]
        trained = self.state.trained
        device = self.samples.y.device
        batch, scale = self._batch(indices, _upload(noise, device), views), loss_scale(device)
        found: list[tuple[Tensor, Params]] = []  # by the first gradient of the step

        def grad(at: Params) -> Params:
            value, stats = self.loss(self.state._replace(trained=at), batch)
            with full(value.device):
                total = value.sum() if value.ndim else value
                whole = total if scale == 1 else scale * total
                gradients = torch.autograd.grad(whole, list(at.values()), allow_unused=True)
            if not found:
                found.append((value.detach(), stats))
            return {
                name: torch.zeros_like(at[name]) if g is None else g if scale == 1 else g / scale
                for name, g in zip(at, gradients, strict=True)
            }

        direction = grad(trained) if self.phase.plain else self.method.step(grad, trained, self.phase, self.normal)
        value, stats = found[0]
        self.drawn += sizes
        self.loss_sums += value * _upload(np.array(sizes, np.float32), device)
        self._add(stats, active)
        self._descend(direction, active)

    def final(self) -> list[Trained]:
        """Of each client: its parameters, the stats and passes of all phases so far, the mean loss of this one."""
        k = len(self.before)
        trained = {name: p.detach() for name, p in self.state.trained.items()}
        parts = P.unstack(trained, k) if k > 1 else [trained]
        stats = P.unstack(self.state.stats, k) if k > 1 else [self.state.stats]
        momentum = P.unstack(self.momentum, k) if k > 1 else [self.momentum]
        return [
            Trained(
                {name: parts[i].get(name, p) for name, p in old.params.items()},
                stats[i],
                float(self.loss_sums[i]) / max(int(self.drawn[i]), 1),
                old.passes + int(self.drawn[i]),
                {**old.momentum, **momentum[i]},
            )
            for i, old in enumerate(self.before)
        ]

    def _resume_momentum(self) -> Params:
        """Gives SGD the momentum that clients have kept: zero for a client's first time. It is updated in place."""
        found: Params = {}
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Sgd) or not optimizer.settings.kept:
                continue
            for name in optimizer.moving:
                each = [c.momentum.get(name, torch.zeros_like(c.params[name])).clone() for c in self.before]
                found[name] = torch.stack(each) if len(each) > 1 else each[0]
            optimizer.momentum = [found[name] for name in optimizer.moving]
        return found

    def _batch(self, indices: Sequence[np.ndarray | None], noise: Tensor, views: Sequence[np.ndarray | None]) -> Batch:
        """The next batch of each client, padded to one length where they are stacked."""
        if len(indices) == 1:
            assert indices[0] is not None
            one = self._take(indices[0], views[0])._replace(noise=noise[0])
            return one._replace(extra=self._varying(0, one)) if self.constants else one
        k, width = len(indices), max(len(index) for index in indices if index is not None)
        places = [None if i is None else i + offset for i, offset in zip(indices, self.offsets, strict=True)]
        weight = _padded([None if i is None else np.ones(len(i), np.float32) for i in indices], width)
        shown = _padded(views, width) if self.samples.views else None
        batch = self._take(_padded(places, width), shown)

        def fold(v: Tensor) -> Tensor:
            return v.reshape(k, width, *v.shape[1:])

        stacked = Batch(
            fold(batch.x),
            fold(batch.y),
            fold(_upload(weight, noise.device)),
            noise,
            {name: fold(v) for name, v in batch.extra.items()},
            {name: fold(v) for name, v in batch.frozen.items()},
        )
        if not self.constants:
            return stacked
        each = (
            Batch(stacked.x[i], stacked.y[i], None, noise[i], {}, {name: v[i] for name, v in stacked.frozen.items()})
            for i in range(k)
        )
        return stacked._replace(extra=P.stack([self._varying(i, one) for i, one in enumerate(each)]))

    def _take(self, places: np.ndarray, views: np.ndarray | None) -> Batch:
        samples, at = self.samples, _upload(places, self.samples.y.device)
        if views is None:
            x, frozen = samples.images(at), _take(samples.frozen, at)
        else:
            assert samples.views is not None
            x, frozen = samples.views(samples, at, views)
        return Batch(x, samples.y[at], None, x.new_empty(0), _take(self.extra, at), frozen)

    @torch.no_grad()
    def _varying(self, client: int, batch: Batch) -> Params:
        return self.constants[client](batch)

    def _add(self, stats: Params, active: list[bool]) -> None:
        summed = dict(self.state.stats)
        for name, s in stats.items():
            s = s.detach().float() if s.dtype in (torch.bfloat16, torch.float16) else s.detach()  # sums need fp32
            s = s if all(active) else s * _rows(active, s)
            summed[name] = summed[name] + s if name in summed else s
        self.state = self.state._replace(stats=summed)

    def _descend(self, direction: Params, active: list[bool]) -> None:
        trained = self.state.trained
        moving = [*trained.values(), *self.momentum.values()]
        before = None if all(active) else [p.detach().clone() for p in moving]
        for name, p in trained.items():
            p.grad = direction[name]
        for optimizer in self.optimizers:
            optimizer.step()
        if before is not None:  # a client without a batch does not move, whatever momentum or decay would do
            with torch.no_grad():
                for p, old in zip(moving, before, strict=True):
                    p.copy_(torch.where(_rows(active, p), p, old))


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device, without waiting until it has computed all that was asked of it before."""
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def _padded(parts: Sequence[np.ndarray | None], width: int) -> np.ndarray:
    """(K width, ...): of each client a part, and zeros up to this width."""
    some = next(part for part in parts if part is not None)
    padded = np.zeros((len(parts), width, *some.shape[1:]), some.dtype)
    for row, part in zip(padded, parts, strict=True):
        if part is not None:
            row[: len(part)] = part
    return padded.reshape(-1, *some.shape[1:])


def _stack(states: Sequence[LocalState]) -> LocalState:
    """(K, ...) where the block has several clients, unchanged where it has one."""
    if len(states) == 1:
        return states[0]
    parts = zip(*states, strict=True)
    return LocalState._make(P.stack(part) if isinstance(part[0], dict) else torch.stack(part) for part in parts)


def _concatenate(parts: list[Samples]) -> tuple[Samples, list[int]]:
    """The samples of all clients, and the place of each client's first one."""
    if len(parts) == 1:
        return parts[0], [0]
    offsets = [0, *np.cumsum([len(part) for part in parts]).tolist()][:-1]
    x, y = (torch.cat(values) for values in zip(*((p.x, p.y) for p in parts), strict=True))
    frozen = {name: torch.cat([p.frozen[name] for p in parts]) for name in parts[0].frozen}
    return Samples(x, y, parts[0].mean, parts[0].std, frozen, parts[0].views), offsets


def _constants(
    method: Method, model: Model, params: Params, samples: Samples, ctx: Context
) -> tuple[Params, list[Params]]:
    """The constants of a client during a phase, and those of its samples in chunks."""
    if ctx.phase is None or ctx.phase.plain:
        return {}, []
    each = chunks(samples) if _has_constants(method, ctx.phase) and not _vary(method, samples) else ()
    with torch.no_grad():
        parts = [method.sample_constants(model, params, batch, ctx) for batch in each]
        return method.client_constants(model, params, ctx), parts


def _has_constants(method: Method, phase: Phase) -> bool:
    return not phase.plain and type(method).sample_constants is not Method.sample_constants


def _vary(method: Method, samples: Samples) -> bool:
    """Whether a sample's features differ from batch to batch with the same parameters."""
    return samples.views is not None or method.tuning.draws


def chunks(samples: Samples) -> Iterator[Batch]:
    """The samples in order. The noise of a chunk depends on its place only, so that an evaluation is repeatable."""
    for i in range(0, len(samples), CHUNK):
        at = slice(i, i + CHUNK)
        noise = torch.from_numpy(rng(0, "evaluation", i).random(2, np.float32)).to(samples.y.device)
        yield Batch(samples.images(at), samples.y[at], None, noise, {}, _take(samples.frozen, at))


def _take(values: Params, at: Tensor | slice) -> Params:
    return {name: v[at] for name, v in values.items()}


def context(work: Work, model: Model, phase: Phase | None = None, stats: Params | None = None) -> Context:
    if work.counts is None:
        y = work.samples.y
        work.counts = torch.tensor(len(y), device=y.device), torch.bincount(y, minlength=model.classes)
    return Context(work.down, work.memory, phase, *work.counts, {}, stats or {}, work.once, work.private, work.draws)


def _rows(active: list[bool], like: Tensor) -> Tensor:
    """(K,) booleans, shaped to select rows of a stacked tensor."""
    return _upload(np.array(active), like.device).reshape(-1, *[1] * (like.ndim - 1))
