"""From a configuration to the parts of a run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import models, processes, server, steps
from ..clients.base import Clients
from ..clients.frozen import FrozenValues
from ..clients.host import Host
from ..clients.local import LocalClients, Worker
from ..clients.messages import Ask
from ..clients.store import Store
from ..data import Dataset, Federation, Site, augment, load
from ..data.held_back import check_named, clients_of, federate_named, leave_out, novel_classes, without_classes
from ..errors import Unsuited, UserError
from ..method import Method
from ..models import Model
from ..params import Params
from ..scoring import unions
from ..secure.site import Masker
from ..tuning import NEEDS_CLIP
from . import protocols
from .config import Config, make

_TRAINING = 3  # passing a sample in training takes as long as so many evaluations of it
_EVALUATION = 0.25  # of the time of training: what evaluations may take
_LOOKS = 10  # evaluations per run, at least


@dataclass(frozen=True)
class Parts:
    config: Config
    federation: Federation
    model: Model
    method: Method
    init: Params
    device: torch.device
    newcomers: tuple[int, ...] = ()

    @cached_property
    def held(self) -> Federation:
        """Who trains on what: as split, or with all training data at one client."""
        return pooled(self.federation, self.newcomers) if self.method.centralised else self.federation


def assemble(config: Config, federation: Federation | None = None, partition: Path | None = None) -> Parts:
    """Loads the data, splits them (or takes the split of a file) and builds the model."""
    device = pick_device(config.engine.device)
    held = federation or split(config, partition)
    if len(held.dataset.classes) < 2:
        raise UserError(f'dataset.name = "{held.dataset.name}" has one class only: two are the least to tell apart')
    model = build_model(config, held.dataset)
    if config.consortium and not model.preprocess and not (config.dataset.mean and config.dataset.std):
        raise UserError(
            f'dataset.mean and dataset.std must be set: backbone "{model.name}" has no normalisation of its own, and '
            "the sites of a consortium need the same one"
        )
    method, init = initial(config, model)
    return Parts(config, held, model, method, init, device, newcomers(config, held))


def initial(config: Config, model: Model) -> tuple[Method, Params]:
    """The method, and what it trains before the first round. Refuses a backbone that does not fit the method."""
    method = config.method.method
    method.tuning.check(model)
    init = method.tuning.init(model, config.seed)
    method.check(model, init)
    if protocols.needs_names(config.eval.model_dump()) and not isinstance(model, models.CLIP):
        raise Unsuited(
            f'backbone.name = "{model.name}" cannot name the classes that eval.novel or eval.datasets ask for: '
            f"{NEEDS_CLIP}"
        )
    return method, init


def split(config: Config, file: Path | None = None) -> Federation:
    """Who holds what: as drawn from the seed, as a file says, or of a consortium: each site its own, nothing here."""
    if config.consortium:
        return placeholder_federation(config)
    dataset = load(config.dataset, models.resize(config.backbone.name))
    file = file or (Path(config.partition.file) if config.partition.file else None)
    return saved(config, dataset, file) if file else drawn(config, dataset)


def drawn(config: Config, dataset: Dataset) -> Federation:
    """A split from the seed, without the classes and the domain that are held back from training."""
    found = federate_named(_base(config, dataset), config.partition.partition, config.split_seed)
    return leave_out(found, config.eval.leave_out) if config.eval.leave_out else found


def saved(config: Config, dataset: Dataset, file: Path) -> Federation:
    """The split of a file."""
    found = Federation.load(file, _base(config, dataset))
    if config.eval.novel:
        check_named(found, str(file))
    return found


def _base(config: Config, dataset: Dataset) -> Dataset:
    """The dataset, in which classes that are held back have no name."""
    novel = config.eval.novel
    return without_classes(dataset, novel_classes(dataset, novel)) if novel else dataset


def newcomers(config: Config, federation: Federation) -> tuple[int, ...]:
    """Clients that are not there from the start."""
    if config.eval.leave_out:
        return clients_of(federation, config.eval.leave_out)
    return config.join.newcomers(len(federation.sites))


def rounds(config: Config, sites: Sequence[Site], newcomers: tuple[int, ...]) -> server.Plan:
    """Which clients train and are evaluated in which rounds. `sites`: as split."""
    plan = server.Plan(
        rounds=config.rounds,
        fraction=config.fraction,
        seed=config.seed,
        after_local=config.eval.after_local,
        pooled=config.eval.pooled,
        newcomers=newcomers,
        join_round=config.join.round,
        aggregation=config.aggregation,
        secure=config.secure,
    )
    return replace(plan, eval_every=_interval(config, sites, plan))


def _interval(config: Config, sites: Sequence[Site], plan: server.Plan) -> int:
    """Rounds from one evaluation to the next: as set or, if it is `auto`, by samples passed and not by time, so that it
    is the same on every machine. It is also the same for methods that are compared, and for their seeds: one epoch
    setting is counted, and models of each client. Sites of a consortium, whose sizes nobody knows, are evaluated in
    every round."""
    method, every = config.method.method, config.eval.every
    if not method.schedule(1):  # what is not trained stays as it is
        return plan.rounds
    if every != "auto":
        return every
    sizes = {i: len(sites[i].train) for i in plan.train(range(len(sites)), 1)}
    able = sum(n > 0 for n in sizes.values())
    if not able:
        return 1
    share = len(plan.chosen(sizes, 1)) / able
    own = sum(len(site.val) + len(site.test) for site in sites)
    scored = own * (1 if plan.after_local == "none" else 1 + share)
    if plan.pooled == "every":
        scored += len(sites) * sum(len(site.test) for site in sites)
    trained = share * sum(sizes.values()) * max(1, method.epochs)
    return max(1, min(round(scored / (_EVALUATION * _TRAINING * trained)), plan.rounds // _LOOKS))


def pooled(federation: Federation, newcomers: Sequence[int]) -> Federation:
    """All training data at the first client, but for those of newcomers, which nobody has; the rest stays."""
    there = [i for i in range(len(federation.sites)) if i not in newcomers]
    train = np.sort(np.concatenate([federation.sites[i].train for i in there]))
    sites = (replace(site, train=train if i == there[0] else train[:0]) for i, site in enumerate(federation.sites))
    return replace(federation, sites=tuple(sites))


def placeholder_federation(config: Config) -> Federation:
    """A consortium as its server sees it: shapes and names, and no images."""
    agreed, given = config.consortium, config.dataset
    assert agreed
    assert given.size
    channels = given.channels or 3
    dataset = Dataset(
        name=given.name,
        images=np.zeros((0, channels, given.size, given.size), np.uint8),
        labels=np.zeros(0, np.int64),
        classes=agreed.classes,
        mean=given.mean or (0.5,) * channels,  # of use to models that bring their own; others must be given one
        std=given.std or (0.5,) * channels,
        fingerprint="",
        path=Path(),
    )
    return Federation(dataset, tuple(empty_site(f"site {i}") for i in range(agreed.clients)), {"name": "consortium"})


def empty_site(name: str = "") -> Site:
    """The place of a client whose images are elsewhere."""
    return Site(name, *(np.zeros(0, np.int64) for _ in range(3)))


def build_model(config: Config, dataset: Dataset) -> Model:
    channels, height, width = dataset.images.shape[1:]
    name, classes = config.backbone.name, dataset.classes
    model = models.build(name, (channels, height, width), len(classes), config.seed, classes)
    return chosen_part(config, model)


def chosen_part(config: Config, model: Model) -> Model:
    """What backbone.part names of a model."""
    if config.backbone.part == "whole":
        return model
    if not isinstance(model, models.CLIP):
        raise UserError(f'backbone.part = "image": backbone "{model.name}" is no CLIP, it has one part only')
    return models.image_vit(model, model.classes, config.seed, model.name)


def clients(parts: Parts, folder: Path) -> Clients:
    """The engine. The folder has the run's partition.json."""
    engine = parts.config.engine
    if parts.config.consortium:
        raise UserError("consortium: its images are at its sites; promptfed flower submit runs it")
    if engine.name == "flower":
        try:
            from ..flower.simulation import simulate
        except ImportError as error:
            raise UserError(f'engine.name = "flower" needs pip install "promptfed[flower]" ({error})') from None
        return simulate(parts, folder)
    count = worker_count(parts)
    sizes = {i: len(site.train) for i, site in enumerate(parts.held.sites)}
    processes.keep_freed_memory()
    hosts: list[Ask]
    if count > 1:
        hosts = [Worker(describe(parts, folder)) for _ in range(count)]
    else:
        limit_threads(engine.threads, parts.device)
        hosts = [make_host(parts, Store(folder / "clients"))]
    if steps.heard():
        tell_caching(parts)
    return LocalClients(sizes, hosts, _block(parts), unions(parts.method))


def tell_caching(parts: Parts) -> None:
    """Has the filling of the cache of frozen values watched. Workers fill it, and every process sees its files."""
    name = parts.method.tuning.frozen_name(parts.model)
    if not name:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a budget that is too small: hosts warn of it
        data, budget = parts.federation.dataset, parts.config.engine.frozen_gb * 1e9
        frozen = FrozenValues(parts.method.tuning, parts.model, data, parts.device, budget)
    held = [part for site in parts.held.sites for part in (site.val, site.test)]
    if not augment.configured(parts.config.dataset):  # images that vary in training have other values
        held += [site.train for site in parts.held.sites]
    index = np.unique(np.concatenate(held))
    if frozen.cached:
        steps.tell(steps.Step(f"caching {name}", len(index), lambda: frozen.known(index)))


def worker_count(parts: Parts) -> int:
    engine = parts.config.engine
    if engine.workers == 1 or parts.device.type != "cpu":
        return 1
    if parts.config.method.name.startswith("__main__:"):
        if engine.workers:
            warnings.warn(
                "engine.workers: a method that is defined in the main script runs in one process", stacklevel=2
            )
        return 1
    able = sum(len(site.train) > 0 for site in parts.held.sites)
    blocks = max(1, int(parts.config.fraction * able + 0.5) // _block(parts))
    return min(engine.workers or cores(), blocks)


def _block(parts: Parts) -> int:
    """Clients that are trained as one; 0: as many as the memory of the accelerator holds."""
    block = parts.config.engine.block
    return block if block != "auto" else int(parts.device.type == "cpu")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(parts: Parts, folder: Path) -> dict[str, Any]:
    """What another process builds its host from. Paths are absolute: it may have another working directory."""
    config = parts.config.complete()
    return {
        # The kind of device only: a process may be shown just the one that is its own.
        "config": {**config, "engine": {**config["engine"], "device": parts.device.type}},
        "dataset": str(parts.federation.dataset.path.absolute()),
        "partition": str((folder / "partition.json").absolute()),
        "store": str((folder / "clients").absolute()),
        "path": sys.path,  # a method of the user's own is found where the user found it
    }


def host_from(description: dict[str, Any]) -> Host:
    """A worker's host. The dataset is memory-mapped: workers share its pages."""
    config = make(description["config"])
    dataset = Dataset.open(Path(description["dataset"]))
    parts = assemble(config, saved(config, dataset, Path(description["partition"])))
    limit_threads(config.engine.threads, parts.device)
    return make_host(parts, Store(Path(description["store"])))


def make_host(parts: Parts, store: Store, kind: Callable[..., Host] = Host) -> Host:
    config = parts.config
    return kind(
        method=parts.method,
        model=parts.model,
        federation=parts.held,
        store=store,
        seed=config.seed,
        device=parts.device,
        precision=config.engine.precision,
        block=_block(parts),
        frozen_bytes=config.engine.frozen_gb * 1e9,
        augment=augment.configured(config.dataset),
        drift=config.eval.drift,
        privacy=config.privacy if config.privacy.on else None,
        noise_seed=None if config.consortium else config.seed,
        masker=Masker(config.secure, config.seed, store.path / "secure") if config.secure.aggregation else None,
    )


def limit_threads(threads: int, device: torch.device) -> None:
    if threads and device.type == "cpu":
        torch.set_num_threads(threads)


def pick_device(name: str, setting: str = "engine.device") -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    kind = name.split(":")[0]
    if kind not in available:
        raise UserError(f'{setting} = "{name}" is unknown (allowed: auto, cpu, cuda, cuda:N, mps)')
    if not available[kind]:
        raise UserError(f'{setting} = "{name}" is not available on this machine (allowed: auto takes what is)')
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f'{setting} = "{name}" is not of the form cuda:N') from None
