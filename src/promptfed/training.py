"""Local training and evaluation of a block of clients: pure functions of parameters and data.

A method's loss is written for one client. A block of K > 1 clients is trained as one: their parameters are stacked,
`vmap(loss)` gives K losses, and the gradient of their sum holds each client's own gradient. K = 1 skips vmap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from . import params as P
from .method import Method
from .models import Model
from .params import Params
from .phases import Batch, Context, Optimizer, Phase
from .seeding import rng

_Fields = tuple[Tensor, Tensor, Tensor | None, Tensor, Params, Params]  # of a Batch, but for its tokens

CHUNK = 128  # samples a forward pass where no gradient is needed


@dataclass(frozen=True)
class Samples:
    """Images as they are stored, and how they are normalised; or in their place what is frozen of them."""

    x: Tensor  # (n, C, H, W) uint8
    y: Tensor  # (n,)
    mean: Tensor  # (C, 1, 1), on the scale of x
    std: Tensor  # (C, 1, 1)
    frozen: Params = field(default_factory=dict)  # (n, ...) each; x is (n, 0) then, unless the tuning wants both

    def __len__(self) -> int:
        return len(self.y)

    def images(self, index: Tensor | slice) -> Tensor:
        x = self.x[index].float()
        return (x - self.mean) / self.std if x.ndim == 4 else x


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


@dataclass(frozen=True)
class Trained:
    params: Params
    stats: Params
    loss: float  # mean over the samples drawn in the last phase
    passes: int


def train(
    method: Method, model: Model, block: Sequence[Work], phases: Sequence[Phase], seed: int, round: int
) -> list[Trained]:
    """Runs the phases on every client of the block."""
    k = len(block)
    params = [work.params for work in block]
    stats: list[Params] = [{} for _ in block]
    losses, passes = [0.0] * k, [0] * k
    for number, phase in enumerate(phases):
        plans = [
            list(batches(len(work.samples), phase, rng(seed, round, work.client, "batches", number))) for work in block
        ]
        if not any(plans):
            continue
        params, sums, stats = _train_phase(method, model, block, params, phase, plans, stats, seed, round, number)
        for i, plan in enumerate(plans):
            drawn = sum(len(index) for index in plan)
            passes[i] += drawn
            losses[i] = float(sums[i]) / max(drawn, 1)
    return [Trained(params[i], stats[i], losses[i], passes[i]) for i in range(k)]


def batches(n: int, phase: Phase, g: np.random.Generator) -> Iterator[np.ndarray]:
    """Indices of the samples of each step: a new order every epoch, the last batch of an epoch as long as it comes."""
    steps = phase.steps
    for _ in range(phase.epochs or (steps if n else 0)):
        order = g.permutation(n)
        for i in range(0, n, phase.batch_size):
            yield order[i : i + phase.batch_size]
            if phase.steps:
                steps -= 1
                if not steps:
                    return


def _train_phase(
    method: Method,
    model: Model,
    block: Sequence[Work],
    params: list[Params],
    phase: Phase,
    plans: list[list[np.ndarray]],
    before: list[Params],
    seed: int,
    round: int,
    number: int,
) -> tuple[list[Params], Tensor, list[Params]]:
    """-> parameters, loss summed over the samples drawn (K,), stats added to those of the phases before."""
    k, device = len(block), block[0].samples.y.device
    samples, offsets = _concatenate([work.samples for work in block])
    extra = _prepare(method, model, block, params, phase)
    noises = np.stack(
        [
            rng(seed, round, work.client, "noise", number).random((max(map(len, plans)), 2), np.float32)
            for work in block
        ],
        1,
    )  # (steps, K, 2)
    noise = torch.from_numpy(noises).to(device)

    # Stacked (K, ...) where the block has several clients, as they are where it has one.
    join = P.stack if k > 1 else lambda items: items[0]
    moving = [name for name in params[0] if method.tuning.role(name) in phase.train]
    trained = join([{name: p[name].detach().clone() for name in moving} for p in params])
    fixed = join([{name: v for name, v in p.items() if name not in trained} for p in params])
    down, memory = join([work.down for work in block]), join([work.memory for work in block])
    counts = [label_counts(work.samples, model.classes) for work in block]
    n = torch.tensor([len(work.samples) for work in block], device=device)
    reference = join(_refer(method, model, block, params, phase))
    about = (fixed, down, memory, n if k > 1 else n[0], torch.stack(counts) if k > 1 else counts[0], reference)
    once = block[0].once
    objective = Method.loss if phase.plain else type(method).loss

    def loss(
        trained: Params,
        batch: _Fields,
        fixed: Params,
        down: Params,
        memory: Params,
        n: Tensor,
        counts: Tensor,
        reference: Params,
        stats: Params,
    ) -> tuple[Tensor, Params]:
        ctx = Context(down, memory, phase, n, counts, reference, stats, once)
        return objective(method, model, {**fixed, **trained}, Batch(*batch), ctx)

    stacked_loss = vmap(loss) if k > 1 else loss

    for p in trained.values():
        p.requires_grad_()
    optimizers = _optimizers(method, phase, trained)
    sums = torch.zeros(k, device=device)
    stats = join(before)
    for step in range(max(map(len, plans))):
        batch, active, drawn = _batch(
            samples, offsets, [plan[step] if step < len(plan) else None for plan in plans], noise[step], extra
        )

        found: list[tuple[Tensor, Params]] = []  # by the first gradient of the step

        def grad(
            at: Params,
            batch: _Fields = batch,
            stats: Params = stats,
            found: list[tuple[Tensor, Params]] = found,
        ) -> Params:
            value, numbers = stacked_loss(at, batch, *about, stats)
            gradients = torch.autograd.grad(value.sum(), list(at.values()), allow_unused=True)
            if not found:
                found.append((value.detach(), numbers))
            return {
                name: g if g is not None else torch.zeros_like(at[name]) for name, g in zip(at, gradients, strict=True)
            }

        direction = grad(trained) if phase.plain else method.step(grad, trained, phase)
        value, numbers = found[0]
        sums += value * drawn
        for name, s in numbers.items():
            s = s.detach() if all(active) else s.detach() * _rows(active, s)
            stats = {**stats, name: stats[name] + s if name in stats else s}
        stand = None if all(active) else [p.detach().clone() for p in trained.values()]
        for name, p in trained.items():
            p.grad = direction[name]
        for optimizer in optimizers:
            optimizer.step()
        if stand is not None:  # a client that has no batches left stands still, whatever momentum or decay would do
            with torch.no_grad():
                for p, old in zip(trained.values(), stand, strict=True):
                    p.copy_(torch.where(_rows(active, p), p, old))
    done = {name: p.detach() for name, p in trained.items()}
    if k == 1:
        return [{name: done.get(name, p) for name, p in params[0].items()}], sums, [stats]
    parts = P.unstack(done, k)
    merged = [{name: part.get(name, p) for name, p in old.items()} for part, old in zip(parts, params, strict=True)]
    return merged, sums, P.unstack(stats, k)


def _concatenate(parts: list[Samples]) -> tuple[Samples, list[int]]:
    offsets = [0, *np.cumsum([len(part) for part in parts]).tolist()][:-1]
    if len(parts) == 1:
        return parts[0], offsets
    x, y = (torch.cat(values) for values in zip(*((p.x, p.y) for p in parts), strict=True))
    frozen = {name: torch.cat([p.frozen[name] for p in parts]) for name in parts[0].frozen}
    return Samples(x, y, parts[0].mean, parts[0].std, frozen), offsets


def _batch(
    samples: Samples, offsets: list[int], indices: list[np.ndarray | None], noise: Tensor, extra: Params
) -> tuple[_Fields, list[bool], Tensor]:
    """The next batch of each client, padded to one length where they are stacked; who has one; samples drawn (K,)."""
    device = samples.y.device
    active = [index is not None for index in indices]
    sizes = [0 if index is None else len(index) for index in indices]
    drawn = torch.tensor(sizes, device=device, dtype=torch.float32)
    if len(indices) == 1:
        at = torch.from_numpy(indices[0]).to(device)
        one = (samples.images(at), samples.y[at], None, noise[0], _take(extra, at), _take(samples.frozen, at))
        return one, active, drawn
    width = max(sizes)
    flat = np.zeros((len(indices), width), np.int64)
    weight = np.zeros((len(indices), width), np.float32)
    for row, (index, offset) in enumerate(zip(indices, offsets, strict=True)):
        if index is not None:
            flat[row, : len(index)] = index + offset
            weight[row, : len(index)] = 1
    at = torch.from_numpy(flat.ravel()).to(device)

    def fold(v: Tensor) -> Tensor:
        return v.reshape(len(indices), width, *v.shape[1:])

    batch = (
        fold(samples.images(at)),
        fold(samples.y[at]),
        torch.from_numpy(weight).to(device),
        noise,
        {k: fold(v) for k, v in _take(extra, at).items()},
        {k: fold(v) for k, v in _take(samples.frozen, at).items()},
    )
    return batch, active, drawn


def _prepare(method: Method, model: Model, block: Sequence[Work], params: list[Params], phase: Phase) -> Params:
    """sample_constants() of every sample of the block, (sum of n, ...) each."""
    if phase.plain or type(method).sample_constants is Method.sample_constants:
        return {}
    parts: list[Params] = []
    with torch.no_grad():
        for work, p in zip(block, params, strict=True):
            ctx = context(work, model, phase)
            for batch in chunks(work.samples):
                parts.append(method.sample_constants(model, p, batch, ctx))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _refer(method: Method, model: Model, block: Sequence[Work], params: list[Params], phase: Phase) -> list[Params]:
    if phase.plain or type(method).client_constants is Method.client_constants:
        return [{} for _ in block]
    with torch.no_grad():
        return [
            method.client_constants(model, p, context(work, model, phase))
            for work, p in zip(block, params, strict=True)
        ]


def chunks(samples: Samples) -> Iterator[Batch]:
    """The samples in order. The noise of a chunk depends on its place only, so that an evaluation is repeatable."""
    for i in range(0, len(samples), CHUNK):
        at = slice(i, i + CHUNK)
        noise = torch.from_numpy(rng(0, "evaluation", i).random(2, np.float32)).to(samples.y.device)
        yield Batch(samples.images(at), samples.y[at], None, noise, {}, _take(samples.frozen, at))


def _take(values: Params, at: Tensor | slice) -> Params:
    return {name: v[at] for name, v in values.items()}


def context(work: Work, model: Model, phase: Phase | None = None, stats: Params | None = None) -> Context:
    n = torch.tensor(len(work.samples), device=work.samples.y.device)
    counts = label_counts(work.samples, model.classes)
    return Context(work.down, work.memory, phase, n, counts, {}, stats or {}, work.once, work.private)


def label_counts(samples: Samples, classes: int) -> Tensor:
    return torch.bincount(samples.y, minlength=classes)


def _rows(active: list[bool], like: Tensor) -> Tensor:
    """(K,) booleans, shaped to select rows of a stacked tensor."""
    return torch.tensor(active, device=like.device).reshape(-1, *[1] * (like.ndim - 1))


def _optimizers(method: Method, phase: Phase, trained: Params) -> list[torch.optim.Optimizer]:
    kinds: dict[Optimizer, list[Tensor]] = {}
    for name, p in trained.items():
        kinds.setdefault(phase.train[method.tuning.role(name)], []).append(p)
    return [_optimizer(settings, tensors) for settings, tensors in kinds.items()]


def _optimizer(o: Optimizer, tensors: list[Tensor]) -> torch.optim.Optimizer:
    if o.kind == "sgd":
        return torch.optim.SGD(tensors, o.lr, o.momentum, weight_decay=o.weight_decay, foreach=True)
    kind = torch.optim.Adam if o.kind == "adam" else torch.optim.AdamW
    return kind(tensors, o.lr, weight_decay=o.weight_decay, foreach=True)
