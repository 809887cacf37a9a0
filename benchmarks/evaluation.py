"""Time of scoring personal models and text prompts, with and without what evaluations share.

Each ratio is the median over interleaved pairs of CPU seconds on one thread, without divided by with. Every pair checks
that counts and losses are the same: to the last bit, or losses to 1e-5 in the part union.

    text    PromptFL on clip-mini, 1024 images whose features are cached, in batches of 128: the text tower runs for
            every batch, or once.
    pooled  FedPer on pFedPT's CNN: the models of 10 clients, which have one body and their own heads, are scored on the
            same 128 images: each by itself, or with the features of the body computed once.
    union   1,024 clients of one model, four test images each, from request to answer: each by itself, or in batches of
            32 clients. FedAvg on pFedPT's CNN and on vit-mini, a head on cached features of vit-mini.

    python benchmarks/evaluation.py [--pairs 5]
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import noise
from promptfed import models, server
from promptfed.clients import local
from promptfed.data.shapes import SHAPES
from promptfed.methods import create
from promptfed.runs import api, build
from promptfed.scoring import Pooled, Score, evaluate
from promptfed.training import Samples, Work

SCALE = torch.full((3, 1, 1), 127.5)


def text() -> tuple[Callable[[], list[Score]], Callable[[], list[Score]]]:
    model, method = models.build("clip-mini", (3, 32, 32), len(SHAPES), 0, SHAPES), create("promptfl")
    g = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(1024, model.embedding, generator=g), dim=-1)
    y = torch.randint(len(SHAPES), (1024,), generator=g)
    data = Samples(torch.empty(1024, 0), y, SCALE, SCALE, {"features": features})
    work = Work(0, data, method.tuning.init(model, 0), {}, {})

    def once() -> list[Score]:
        model._texts.entries.clear()
        return [evaluate(method, model, work, work.params, data)]

    def every_batch() -> list[Score]:
        kept, model._texts = model._texts, lambda sentences, prompts, compute: compute()
        try:
            return [evaluate(method, model, work, work.params, data)]
        finally:
            model._texts = kept

    return every_batch, once


def pooled() -> tuple[Callable[[], list[Score]], Callable[[], list[Score]]]:
    model, method = models.build("cnn", (3, 32, 32), 10, seed=0), create("fedper")
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (128, 3, 32, 32), generator=g, dtype=torch.uint8), torch.randint(10, (128,), generator=g)
    data = Samples(x, y, SCALE, SCALE)
    works = []
    for client in range(10):
        head = {
            name: torch.randn(p.shape, generator=g) for name, p in model.weights.items() if name.startswith("head.")
        }
        works.append(Work(client, data, {**model.weights, **head}, {}, {}))

    def alone() -> list[Score]:
        return [evaluate(method, model, work, work.params, data) for work in works]

    def shared() -> list[Score]:
        held = Pooled(data)
        return [held.score(method, model, work, work.params) for work in works]

    return alone, shared


@contextmanager
def union(method: str, backbone: str) -> Iterator[tuple[Callable[[], list[Score]], Callable[[], list[Score]]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held = noise.federation(folder, 1024, train=1, test=4)
        settings = {"method": method, "backbone": backbone, "engine": {"workers": 1, "device": "cpu"}}
        parts = build.assemble(api.prepare(None, settings, out=folder / "run", federation=held).config, held)
        clients = build.clients(parts, folder / "run")
        state = server.admit(parts.method, parts.method.begin(parts.model, parts.init, 0), clients, clients.ids(), 0)
        sent = server.outgoing(parts.method, state, clients.ids())

        def scored(many: int) -> list[Score]:
            local.MANY = many
            found = clients.evaluate(sent, as_of=1, pooled=False, after_local=False)
            return [scores.parts["test"] for scores in found]

        yield lambda: scored(1024), lambda: scored(256)
        clients.close()


def seconds(work: Callable[[], list[Score]]) -> tuple[float, list[tuple]]:
    begun = time.process_time()
    scores = work()
    return time.process_time() - begun, [(s.n, s.loss, *s.tp, *s.fp, *s.fn) for s in scores]


def same(a: list[tuple], b: list[tuple], relative: float) -> bool:
    losses = all(math.isclose(x[1], y[1], rel_tol=relative) for x, y in zip(a, b, strict=True))
    return losses and [(x[0], *x[2:]) for x in a] == [(y[0], *y[2:]) for y in b]


def measure(
    name: str, sides: tuple[Callable[[], list[Score]], Callable[[], list[Score]]], pairs: int, near: float
) -> None:
    without, shared = sides
    without(), shared()
    ratios = []
    for _ in range(pairs):
        (a, expected), (b, found) = seconds(without), seconds(shared)
        if not same(expected, found, near):
            raise AssertionError(f"{name}: scores differ")
        ratios.append(a / b)
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"{name}: median {statistics.median(ratios):.1f} ({spread}) of {pairs} pairs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    for part in (text, pooled):
        measure(part.__name__, part(), pairs, 0.0)
    for method, backbone in (("fedavg", "cnn"), ("fedavg", "vit-mini"), ("head-tune", "vit-mini")):
        with union(method, backbone) as sides:
            measure(f"union, {method} on {backbone}", sides, pairs, 1e-5)


if __name__ == "__main__":
    main()
