"""What a run would cost: parameters, bytes and sample passes. Needs no data, no hub and no weights; trains nothing.

Datasets are made up from the catalogue, with equally frequent classes (and domains), and split by the real partition.
Published backbones have the shapes of models/pretrained/known.py. Parameters are counted on tensors without values, in
what the method itself makes, sends and receives; bytes are those of the tensors and their names, without the few
numbers that some methods report in addition. Time is not estimated: it depends on the machine, caches and evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

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
from .config import Config
from .tables import count, size

_GUESS = 100  # images a class and domain, where the catalogue does not know: for clients to have some


@dataclass(frozen=True)
class Estimate:
    """Of one run with one seed."""

    clients: int
    a_round: int  # clients that take part in a round
    rounds: int
    trained: int  # parameters
    up: int  # parameters per client and round
    down: int
    bytes_up: int  # per client and round
    bytes_down: int
    once: int  # bytes that a client receives once
    traffic: int  # bytes of the whole run
    passes: int | None  # None: the number of images is unknown


def estimate(config: Config) -> Estimate:
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
    if method.enrolls:
        other, sample = (_once(receives(method, model, init, *more)) - first for more in ((2, 1), (1, 2)))
        held = sum(len(site.val) for site in federation.sites)
        once = first + (n - 1) * other + max(0, held - n) * sample
    each = _size({f"up/{name}": p for name, p in up.items()}) + _size(down)

    sizes = [len(site.train) for site in federation.sites if len(site.train)]
    passes = sum(_passes(phase, sizes) for phase in phases)  # of a client in a round, on average
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
        passes=round(passes * sum(taking_part)) if known else None,
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
        channels, side = given.channels or 3, given.size or (published.size[0] if published else entry.size)
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


def sketch(config: Config, dataset: Dataset) -> Model:
    """The backbone; of a published one only the shapes."""
    _, channels, height, width = dataset.images.shape
    backbone = config.backbone
    return _model(backbone.name, backbone.part, (channels, height, width), len(dataset.classes))


@lru_cache(maxsize=8)
def _model(name: str, part: str, image: tuple[int, int, int], classes: int) -> Model:
    names = [f"class {i}" for i in range(classes)]
    if name in KNOWN:
        model = fresh(name, classes, names)
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
    for client in range(clients):
        hello = method.enroll(model, init, _holdings(method, model, validation)) if method.enrolls else {}
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


def _passes(phase: Phase, sizes: Sequence[int]) -> float:
    if not phase.steps:
        return phase.epochs * float(np.mean(sizes))
    return phase.steps * float(np.mean([n / -(-n // phase.batch_size) for n in sizes]))


# ---- for people


def table(rows: Sequence[tuple[str, int, Config]]) -> Table:
    """Label, number of seeds and configuration of each row."""
    found = [(label, seeds, estimate(config)) for label, seeds, config in rows]
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption_justify="left")
    headers = ("", "clients", "rounds", "trained", "up", "down", "bytes", "total", "passes")
    for i, header in enumerate(headers):
        shown.add_column(header, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for label, _, e in found:
        numbers = (f"{e.trained:,}", f"{e.up:,}", f"{e.down:,}", size(e.bytes_up + e.bytes_down), size(e.traffic))
        passes = "unknown" if e.passes is None else count(e.passes)
        shown.add_row(label, f"{e.a_round} of {e.clients}", str(e.rounds), *numbers, passes)
    shown.caption = "\n".join(_notes([(seeds, e) for _, seeds, e in found]))
    return shown


def _notes(found: Sequence[tuple[int, Estimate]]) -> list[str]:
    runs = sum(seeds for seeds, _ in found)
    known = [(seeds, e.passes) for seeds, e in found if e.passes is not None]
    total = f"{runs} run{'s' if runs > 1 else ''}: {size(sum(seeds * e.traffic for seeds, e in found))} sent"
    if known:
        total += f", {count(sum(seeds * passes for seeds, passes in known))} sample passes"
    lines = [
        total,
        "trained, up, down: parameters (up, down, bytes: per client and round); passes: training samples drawn",
    ]
    once = max(e.once for _, e in found)
    if once:
        lines.append(f"total includes what a client receives only once: up to {size(once)}")
    return lines


__all__ = ["Estimate", "estimate", "imagine", "sketch", "table"]
