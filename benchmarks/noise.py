"""What benchmarks share: random images split evenly among clients, an engine to train them round by round, and a
process for each part that is measured."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from promptfed import Dataset, Federation, server
from promptfed.data import Site
from promptfed.runs import api, build

CLASSES = 10


def federation(folder: Path, clients: int, train: int, test: int = 0, size: int = 32) -> Federation:
    """Images are written in parts, so that they are never all in memory."""
    g, each = np.random.default_rng(0), train + test
    file = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, (clients * each, 3, size, size))
    for i in range(0, len(file), 10_000):
        file[i : i + 10_000] = g.integers(0, 256, file[i : i + 10_000].shape, np.uint8)
    names = tuple(f"class {i}" for i in range(CLASSES))
    data = Dataset.from_arrays("noise", file, g.integers(0, CLASSES, len(file)), names, path=folder / "data")
    sites = []
    for client in range(clients):
        at = np.arange(client * each, (client + 1) * each)
        sites.append(Site(str(client), at[:train], at[:0], at[train:]))
    return Federation(data, tuple(sites), {"name": "benchmark"})


@contextmanager
def rounds(folder: Path, held: Federation, **settings: Any) -> Iterator[Callable[..., server.Line]]:
    """-> a function that trains one more round, of all clients or of a share of them, without evaluation or records,
    and gives its line."""
    (folder / "run").mkdir(parents=True)
    config = api.prepare(None, settings, out=folder / "run", federation=held).config
    parts = build.assemble(config, held)
    held.save(folder / "run" / "partition.json")
    clients = build.clients(parts, folder / "run")
    last = 1 << 30
    plan = server.Plan(last, config.fraction, config.seed, last, after_local="none", secure=config.secure)
    state = server.admit(parts.method, parts.method.begin(parts.model, parts.init, 0), clients, clients.ids(), 0)
    done = 0

    def one(share: float = config.fraction) -> server.Line:
        nonlocal state, done
        done += 1
        state, line, _ = server.step(parts.method, parts.init, clients, replace(plan, fraction=share), state, done)
        assert not line["left_out"], line["left_out"]
        return line

    try:
        yield one
    finally:
        clients.close()


def in_own_process(work: Callable[..., None], *arguments: Any) -> None:
    """A part that fails ends the benchmark."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)
