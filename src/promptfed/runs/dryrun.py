"""What a run would cost: parameters, bytes and sample passes. Needs no data, no hub and no weights; trains nothing.

Placeholders of the catalogue's datasets, with equally frequent classes (and domains), are split by the real partition.
Parameters are counted on tensors without values, in what the method itself makes, sends and receives; bytes are those
of tensors and their names. Time is not estimated: it depends on the machine, caches and evaluation.
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
from ..data import CATALOGUE, Dataset, DatasetConfig, Federation, Partition, held_back, load
from ..errors import UserError
from ..method import Method, split_once
from ..models import Model
from ..models.pretrained.known import KNOWN, fresh, resize
from ..params import Params
from ..phases import Batch, Holdings
from . import build
from .cells import count, size
from .config import Config

_GUESS = 100  # images per class and domain where the catalogue does not know, for clients to have some


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
    _offline(config)
    partition = config.partition
    drawn = None if partition.file else partition.partition
    aside = (config.eval.novel, config.eval.leave_out)
    federation = _split(config.dataset, config.backbone.name, drawn, partition.file, config.split_seed, *aside)
    model = sketch(config, federation.dataset)
    method, init = build.initial(config, model)
    late = tuple(i for i, site in enumerate(federation.sites) if not len(site.train))
    newcomers = late if config.eval.leave_out else config.join.newcomers(len(federation.sites))
    sites = (build.pooled(federation, newcomers) if method.centralised else federation).sites
    plan = build.rounds(config, federation.sites, newcomers)
    sizes = {i: len(site.train) for i, site in enumerate(sites)}
    turns = [len(plan.chosen(sizes, round_)) for round_ in range(1, config.rounds + 1)]

    phases = method.schedule(1)
    roles = {role for phase in phases for role in phase.train}
    up = method.shared(init) if phases else {}
    received = receives(method, model, init, 1, 1)
    down = split_once(received)[0] if phases else {}
    once = first = _once(received)
    if method.enrolls:  # grows with the clients, and their validation samples
        other, sample = (_once(receives(method, model, init, *more)) - first for more in ((2, 1), (1, 2)))
        held = sum(len(site.val) for site in sites)
        once += (len(sites) - 1) * other + max(0, held - len(sites)) * sample
    bytes_up, bytes_down = _size({f"up/{name}": p for name, p in up.items()}), _size(down)
    a_client = [np.mean([phase.passes(n) for n in sizes.values() if n]) for phase in phases]  # in a round
    passes = float(sum(a_client))
    entry = CATALOGUE.get(config.dataset.name)
    known = partition.file or entry is None or entry.images is not None
    return Estimate(
        clients=len(sites),
        a_round=turns[-1],
        rounds=config.rounds,
        trained=sum(p.numel() for name, p in init.items() if method.tuning.role(name) in roles),
        up=P.numel(up),
        down=P.numel(down),
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        once=once,
        traffic=(bytes_up + bytes_down) * sum(turns) + once * len(sites),
        passes=round(passes * sum(turns)) if known else None,
    )


def check_fit(config: Config) -> None:
    """Refuses a method that does not fit its backbone. Published backbones are shapes alone here, and of datasets in
    the catalogue nothing is loaded."""
    try:
        build.initial(config, sketch(config, placeholder(config.dataset, config.backbone.name)))
    except RuntimeError:  # it looks at values, which a sketch has not: the run will tell
        return


def _offline(config: Config) -> None:
    """Refuses what would have to be fetched."""
    data, backbone = config.dataset.name, config.backbone.name
    if data not in CATALOGUE and not Path(data).expanduser().exists():
        raise UserError(
            f'dataset.name = "{data}" is neither a path nor in the catalogue, and --dry-run asks nobody else '
            f"(allowed: {', '.join(sorted(CATALOGUE))})"
        )
    if "/" in backbone and backbone not in KNOWN and not Path(backbone).expanduser().exists():
        raise UserError(
            f'backbone.name = "{backbone}" has shapes that only its files tell, and --dry-run fetches none '
            f"(known: {', '.join(KNOWN)})"
        )


# ---- data and models that are not there


@lru_cache(maxsize=32)
def _split(
    given: DatasetConfig,
    backbone: str,
    drawn: Partition | None,
    file: str | None,
    seed: int,
    novel: held_back.Novel,
    left: str,
) -> Federation:
    dataset = placeholder(given, backbone)
    if given.name in CATALOGUE:  # a placeholder has other names: as many classes, and any domain
        novel = len(novel) / len(dataset.classes) if isinstance(novel, tuple) else novel
        left = left and dataset.domains[0] if dataset.domains else left
    if novel:
        dataset = held_back.without_classes(dataset, held_back.novel_classes(dataset, novel))
    if not drawn:
        return Federation.load(Path(file or ""), dataset)
    found = held_back.federate_named(dataset, drawn, seed)
    return held_back.leave_out(found, left) if left else found


def placeholder(given: DatasetConfig, backbone: str) -> Dataset:
    """A dataset of the catalogue, with blank images; any other is loaded."""
    entry, published = CATALOGUE.get(given.name), resize(backbone)
    if entry is None:
        return load(given, published)
    kinds = max(1, entry.domains)
    n = min(entry.images or _GUESS * entry.classes * kinds, given.limit or 1 << 60)
    channels, side = given.channels or 3, given.size or (published.size[0] if published else entry.size)
    domain = np.arange(n) // entry.classes % kinds if entry.domains else None
    names = tuple(f"domain {i}" for i in range(entry.domains))
    test = n * entry.test // (entry.images or n)
    return Dataset(
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
        split=(np.arange(n) >= n - test) * np.int8(2) if test else None,
        fingerprint="placeholder",
        path=Path(),
    )


def sketch(config: Config, dataset: Dataset) -> Model:
    """The backbone; of a published one only the shapes."""
    _, *image = dataset.images.shape
    model = _model(config.backbone.name, (image[0], image[1], image[2]), dataset.classes)
    return build.chosen_part(config, model)


@lru_cache(maxsize=2)
def _model(name: str, image: tuple[int, int, int], classes: tuple[str, ...]) -> Model:
    if name not in KNOWN:
        return models.build(name, image, len(classes), 0, classes)
    return fresh(name, len(classes), classes, image)


# ---- what is sent


def receives(method: Method, model: Model, init: Params, clients: int, validation: int) -> Params:
    """What a client is sent in a round, where there are so many clients with so many validation samples each."""
    state, known = method.begin(model, init, 0), P.to(init, next(iter(model.weights.values())).device)
    for client in range(clients):
        hello = method.enroll(model, known, _holdings(method, model, validation)) if method.enrolls else {}
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
    runs = sum(seeds for _, seeds, _ in found)
    traffic = sum(seeds * e.traffic for _, seeds, e in found)
    drawn = sum(seeds * (e.passes or 0) for _, seeds, e in found)
    notes = [
        f"{runs} run{'s' * (runs > 1)}: {size(traffic)} sent, {count(drawn)} sample passes",
        "trained, up, down: parameters (up, down, bytes: per client and round); passes: training samples drawn",
    ]
    if once := max(e.once for _, _, e in found):
        notes.append(f"total includes what a client receives only once: up to {size(once)}")
    shown.caption = "\n".join(notes)
    return shown
