"""What a run would cost. No data, no hub and no weights are needed, and nothing is trained but a few steps.

Datasets are imagined from the catalogue, with classes (and domains) of one size, and dealt out by the real partition.
Published backbones have the shapes of models/known.py. Parameters are counted on tensors without values, in what the
method itself makes, sends and receives; bytes are those of the tensors and their names, without the few numbers that
some methods report besides. Time is that of the training steps alone: evaluation comes on top.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich import box
from rich.table import Table

from .. import models
from .. import params as P
from ..clients.wire import pack
from ..data import CATALOGUE, Dataset, DatasetConfig, Federation, Partition, federate, load
from ..data.images import Resize
from ..errors import UserError
from ..method import Method, split_once
from ..models import CLIP, Model
from ..models.pretrained.known import KNOWN, fresh, resize
from ..params import Params
from ..phases import Batch, Holdings, Phase
from ..seeding import torch_rng
from ..training import Samples, Work, train
from . import build
from .config import Config
from .tables import count, size

_GUESS = 100  # images a class and domain, where the catalogue does not know: for clients to have some
_CLASSES = 10  # of a model that is measured
_SECONDS = 30.0  # in which measurements are to be done
_SLOW = 2.0  # seconds of a step that is not repeated
_TOUCHED = 6  # times that training touches fresh memory of the size of what it trains
_PATIENCE = 5.0  # seconds that this may take


@dataclass(frozen=True)
class Estimate:
    """Of one run with one seed."""

    clients: int
    a_round: int  # clients that take part in a round
    rounds: int
    trained: int  # parameters
    up: int  # parameters, a client and round
    down: int
    bytes_up: int  # a client and round
    bytes_down: int
    once: int  # bytes that a client receives once
    traffic: int  # bytes of the whole run
    passes: int | None  # None: nobody knows how many images there are
    seconds: float | None
    why: str = ""  # there are no seconds


def estimate(config: Config, clock: Clock | None = None) -> Estimate:
    """Without a clock no time is measured."""
    federation, known = imagine(config)
    model = sketch(config, federation.dataset)
    method = config.method.method
    method.tuning.check(model)
    init = method.tuning.init(model, config.seed)
    method.check(model, init)
    n = len(federation.sites)
    late = config.join.newcomers(n)
    rounds = range(1, config.rounds + 1)
    there = [n - (0 if config.join.round and round >= config.join.round else len(late)) for round in rounds]
    taking_part = [min(able, max(1, int(config.fraction * able + 0.5))) for able in there]

    phases = method.schedule(1)
    roles = {role for phase in phases for role in phase.train}
    up = method.shared(init) if phases else {}
    received = receives(method, model, init, 1, 1)
    down = split_once(received)[0] if phases else {}
    first = _once(received)  # grows with the number of clients, and of each with its validation samples
    once = first
    if type(method).enroll is not Method.enroll:
        other, sample = (_once(receives(method, model, init, *more)) - first for more in ((2, 1), (1, 2)))
        held = sum(len(site.val) for site in federation.sites)
        once = first + (n - 1) * other + max(0, held - n) * sample
    each = _size({f"up/{name}": p for name, p in up.items()}) + _size(down)

    sizes = [len(site.train) for site in federation.sites if len(site.train)]
    work = [(_steps(phase, sizes), _passes(phase, sizes)) for phase in phases]  # of a client in a round, on average
    seconds, why = None, "" if known else "unknown number of images"
    if clock and known:
        spent = clock.measure(config, model)
        if isinstance(spent, Pace):
            total = sum(s * a + p * b for (s, p), (a, b) in zip(work, spent.phases, strict=True)) * sum(taking_part)
            seconds = (total + spent.frozen * len(federation.dataset)) / processes(config, taking_part[-1])
        else:
            why = spent
    return Estimate(
        clients=n,
        a_round=taking_part[-1],
        rounds=config.rounds,
        trained=sum(p.numel() for name, p in init.items() if method.tuning.role(name) in roles),
        up=P.numel(up),
        down=P.numel(down),
        bytes_up=_size({f"up/{name}": p for name, p in up.items()}),
        bytes_down=_size(down),
        once=once,
        traffic=each * sum(taking_part) + once * n,
        passes=round(sum(p for _, p in work) * sum(taking_part)) if known else None,
        seconds=seconds,
        why=why,
    )


# ---- data and models that are not there


def imagine(config: Config) -> tuple[Federation, bool]:
    """Who would hold what; and whether the number of images is known."""
    seed = config.seed if config.partition.seed is None else config.partition.seed
    named = config.backbone.name
    fetched = "/" in named and named not in KNOWN and not Path(named).expanduser().exists()  # sketch() refuses it
    published = None if fetched else resize(named)
    return _imagine(config.dataset, published, config.partition.partition, config.partition.file, seed)


@lru_cache(maxsize=32)
def _imagine(
    given: DatasetConfig, published: Resize | None, partition: Partition, file: str | None, seed: int
) -> tuple[Federation, bool]:
    entry = CATALOGUE.get(given.name)
    if entry is None:
        if not Path(given.name).expanduser().exists():
            raise UserError(
                f'dataset.name = "{given.name}" is neither a path nor in the catalogue, and --dry-run asks nobody else '
                f"(allowed: {', '.join(sorted(CATALOGUE))})"
            )
        dataset = load(given, published)
    else:
        kinds = max(1, entry.domains)
        n = min(entry.images or _GUESS * entry.classes * kinds, given.limit or 1 << 60)
        channels, side = (
            given.channels or entry.channels,
            given.size or (published.size[0] if published else entry.size),
        )
        domain = np.arange(n) // entry.classes % kinds if entry.domains else None
        names = tuple(f"domain {i}" for i in range(entry.domains))
        dataset = Dataset(
            name=given.name,
            images=np.broadcast_to(np.uint8(0), (n, channels, side, side)),
            labels=np.arange(n) % entry.classes,
            classes=tuple(f"class {i}" for i in range(entry.classes)),
            mean=(0.5,) * channels,
            std=(0.5,) * channels,
            domains=names,
            domain=domain,
            sites=names,
            site=domain,
            fingerprint="imagined",
            path=Path(),
        )
    if file:
        return Federation.load(Path(file), dataset), True
    return federate(dataset, partition, seed), entry is None or entry.images is not None


def sketch(config: Config, dataset: Dataset, classes: int | None = None, draw: bool = False) -> Model:
    """The backbone: of published ones the shapes alone, or with random numbers."""
    _, channels, height, width = dataset.images.shape
    backbone = config.backbone
    return _model(backbone.name, backbone.part, (channels, height, width), classes or len(dataset.classes), draw)


@lru_cache(maxsize=8)
def _model(name: str, part: str, image: tuple[int, int, int], classes: int, draw: bool) -> Model:
    names = [f"class {i}" for i in range(classes)]
    if name in KNOWN:
        model = fresh(name, classes, names, draw)
        if model.image != image:
            raise UserError(
                f'dataset.size: backbone "{name}" takes {model.image[1]}x{model.image[2]} pixels in 3 channels, got '
                f"{image[1]}x{image[2]} in {image[0]}"
            )
    elif "/" in name and not Path(name).expanduser().exists():
        raise UserError(
            f'backbone.name = "{name}" has shapes that only its files tell, and --dry-run fetches none '
            f"(known: {', '.join(KNOWN)})"
        )
    else:
        model = models.build(name, image, classes, 0, names)
    if part == "whole":
        return model
    if not isinstance(model, CLIP):
        raise UserError(f'backbone.part = "image": backbone "{name}" is no CLIP, it has one part only')
    return models.image_vit(model, classes, 0, name)


# ---- what travels


def receives(method: Method, model: Model, init: Params, clients: int, validation: int) -> Params:
    """What a client is sent in a round, where there are so many clients with so many validation samples each."""
    state = method.begin(model, init, 0)
    tells = type(method).enroll is not Method.enroll
    for client in range(clients):
        hello = method.enroll(model, init, _holdings(method, model, validation)) if tells else {}
        filled = {name: torch.zeros(p.shape, dtype=p.dtype) if p.is_meta else p for name, p in hello.items()}
        state = method.admit(state, client, filled, 0)
    return method.down(state, 0)


def _holdings(method: Method, model: Model, validation: int) -> Holdings:
    device = next(iter(model.weights.values())).device

    def samples(n: int) -> Batch:
        x, y = torch.zeros(n, *model.image, device=device), torch.zeros(n, dtype=torch.long, device=device)
        return Batch(x, y, None, torch.zeros(2), {})

    counts = torch.zeros(model.classes, dtype=torch.long)
    counts[0] = 2
    return Holdings(lambda: iter([samples(2)]), lambda: iter([samples(validation)]), counts, method.secrets())


def _once(received: Params) -> int:
    return P.nbytes(split_once(received)[1])


def _size(params: Params) -> int:
    """Bytes of a message."""
    return P.nbytes(params) + len(pack({name: torch.zeros(0) for name in params})) if params else 0


# ---- what is computed


def _steps(phase: Phase, sizes: Sequence[int]) -> float:
    """Steps of a client in a phase, on average."""
    return phase.steps or phase.epochs * float(np.mean([-(-n // phase.batch_size) for n in sizes]))


def _passes(phase: Phase, sizes: Sequence[int]) -> float:
    if not phase.steps:
        return phase.epochs * float(np.mean(sizes))
    return phase.steps * float(np.mean([n / -(-n // phase.batch_size) for n in sizes]))


def processes(config: Config, a_round: int) -> int:
    if config.engine.workers == 1 or build.pick_device(config.engine.device).type != "cpu":
        return 1
    return min(config.engine.workers or build.cores(), max(1, a_round // config.engine.block))


class Pace(NamedTuple):
    """Seconds: of each phase by the step and by the sample, and of frozen values by the image."""

    phases: tuple[tuple[float, float], ...]
    frozen: float


class Clock:
    """Measures training steps on random numbers, once for all methods that train alike on an architecture."""

    def __init__(self) -> None:
        self._known: dict[str, Pace | str] = {}
        self._begun, self._longest = time.perf_counter(), 0.0
        torch.ones(1 << 16)
        begun = time.perf_counter()
        torch.ones(1 << 22)
        self._touch = (time.perf_counter() - begun) / (1 << 22)  # seconds to write a number to fresh memory

    def measure(self, config: Config, model: Model) -> Pace | str:
        """Or why not. A step costs a + b n seconds for n samples; of a CLIP, a grows with the number of classes."""
        key = _alike(config, model)
        if key not in self._known:
            self._known[key] = self._anew(config, model)
        found = self._known[key]
        if isinstance(found, str) or not isinstance(model, CLIP):
            return found
        more = model.classes / min(model.classes, _CLASSES)
        return found._replace(phases=tuple((a * more, b) for a, b in found.phases))

    def _anew(self, config: Config, model: Model) -> Pace | str:
        method, device = config.method.method, build.pick_device(config.engine.device)
        phases = method.schedule(1)
        if not phases:
            return Pace((), 0.0)
        trained = P.numel(method.tuning.init(model, 0))
        if trained * self._touch * _TOUCHED > _PATIENCE:
            return "too large to be measured"
        begun = time.perf_counter()
        if begun - self._begun + self._longest > _SECONDS and self._longest:
            return "measuring took too long"
        threads = torch.get_num_threads()
        try:
            build.limit_threads(config.engine.threads, device)
            backbone = config.backbone
            drawn = _model(backbone.name, backbone.part, model.image, min(model.classes, _CLASSES), True).to(device)
            return _pace(method, drawn, phases, device)
        finally:
            torch.set_num_threads(threads)
            self._longest = max(self._longest, time.perf_counter() - begun)


def _alike(config: Config, model: Model) -> str:
    """Equal for runs whose training steps cost the same."""
    method = config.method.method
    phases = [(sorted(phase.train), phase.batch_size, phase.plain) for phase in method.schedule(1)]
    parts = ("loss", "step", "sample_constants", "client_constants")
    plain = all(getattr(type(method), part) is getattr(Method, part) for part in parts)
    own = "" if plain else config.method.complete()
    backbone = (config.backbone.name, config.backbone.part, model.image, config.engine.device)
    return repr((backbone, type(method.tuning), method.tuning, phases, own))


def _pace(method: Method, model: Model, phases: Sequence[Phase], device: torch.device) -> Pace:
    large = P.numel(model.weights) > 5e6
    init = P.to(method.tuning.init(model, 0), device)
    down = receives(method, model, init, 1, 1)
    sent, once = split_once(down)
    start = method.start(init, sent, {}, {})
    frozen = 0.0

    def samples(n: int) -> Samples:
        nonlocal frozen
        x = torch.randint(0, 256, (n, *model.image), dtype=torch.uint8, generator=torch_rng(0, "dry run"))
        y = torch.arange(n, device=device) % model.classes
        scale = torch.full((model.image[0], 1, 1), 127.5, device=device)
        values: Params = {}
        if method.tuning.frozen_name(model):
            begun = time.perf_counter()
            with torch.no_grad():
                values = method.tuning.frozen(model, (x.to(device).float() - scale) / scale)
            frozen = _since(begun, device) / n
        left_out = values and not method.tuning.images
        return Samples(y.new_empty(n, 0) if left_out else x.to(device), y, scale, scale, values)

    def seconds(phase: Phase, n: int) -> float:
        step = replace(phase, epochs=1, steps=0, batch_size=n)
        work = Work(0, samples(n), start, sent, method.remembered(start), once)
        begun = time.perf_counter()
        train(method, model, [work], [step], 0, 1)
        return _since(begun, device)

    found = []
    for phase in phases:
        few, many = (1, 3) if large else (max(1, min(phase.batch_size, 16) // 2), max(2, min(phase.batch_size, 16)))
        short = seconds(phase, few)
        if short > _SLOW:  # no second step: all of it is the images' if it has some, and else the text's
            found.append((0.0, short / few) if method.tuning.images or not frozen else (short, 0.0))
            continue
        short, long = seconds(phase, few), seconds(phase, many)  # the first time was slower
        b = min(max((long - short) / (many - few), 0.0), long / many)
        found.append((long - b * many, b))
    return Pace(tuple(found), frozen)


def _since(begun: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


# ---- for people


def table(rows: Sequence[tuple[str, int, Config]], timing: bool = True) -> Table:
    """Label, number of seeds and configuration of each row."""
    clock = Clock() if timing else None
    found = [(label, seeds, estimate(config, clock)) for label, seeds, config in rows]
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption_justify="left")
    headers = ["", "clients", "rounds", "trained", "up", "down", "bytes", "total", "passes", *(["time"] * timing)]
    for i, header in enumerate(headers):
        shown.add_column(header, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for label, _, e in found:
        time_ = [_duration(e.seconds)] if timing else []
        numbers = (f"{e.trained:,}", f"{e.up:,}", f"{e.down:,}", size(e.bytes_up + e.bytes_down), size(e.traffic))
        passes = "unknown" if e.passes is None else count(e.passes)
        shown.add_row(label, f"{e.a_round} of {e.clients}", str(e.rounds), *numbers, passes, *time_)
    shown.caption = "\n".join(_notes(rows, [(seeds, e) for _, seeds, e in found], timing))
    return shown


def _notes(rows: Sequence[tuple[str, int, Config]], found: Sequence[tuple[int, Estimate]], timing: bool) -> list[str]:
    runs = sum(seeds for seeds, _ in found)
    known = [(seeds, e.passes) for seeds, e in found if e.passes is not None]
    total = f"{runs} run{'s' if runs > 1 else ''}: {size(sum(seeds * e.traffic for seeds, e in found))} sent"
    if known:
        total += f", {count(sum(seeds * passes for seeds, passes in known))} sample passes"
    timed = [seeds * e.seconds for seeds, e in found if e.seconds is not None]
    if timed:
        total += f", {_duration(sum(timed))} of training"
    if len(timed) < len(found) and timing:
        total += f"; {len(found) - len(timed)} rows not timed: {', '.join(sorted({e.why for _, e in found if e.why}))}"
    lines = [
        total,
        "trained, up, down: parameters (up, down, bytes: of a client in a round); passes: training samples drawn",
    ]
    once = max(e.once for _, e in found)
    if once:
        lines.append(f"total has, besides, what a client receives once: up to {size(once)}")
    if timing:
        config = rows[0][2]
        count_ = processes(config, found[0][1].a_round)
        where = f"{build.pick_device(config.engine.device)}, {count_} process{'es' if count_ > 1 else ''}"
        lines.append(f"time: training steps on this machine ({where}), from a few that were measured; no evaluation")
    return lines


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{math.ceil(seconds)} s"


__all__ = ["Clock", "Estimate", "estimate", "imagine", "sketch", "table"]
