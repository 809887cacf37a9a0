"""Time of scoring personal models and text prompts, with and without what evaluations share.

Each ratio is the median over interleaved pairs of CPU seconds on one thread, without divided by with. Every pair checks
that counts and losses are the same to the last bit.

    text    PromptFL on clip-mini, 1024 images whose features are cached, in batches of 128: the text tower runs for
            every batch, or once.
    pooled  FedPer on pFedPT's CNN: the models of 10 clients, which have one body and their own heads, are scored on the
            same 128 images: each by itself, or with the features of the body computed once.

    python benchmarks/evaluation.py [--pairs 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from promptfed import models
from promptfed.data.shapes import SHAPES
from promptfed.methods import create
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


def seconds(work: Callable[[], list[Score]]) -> tuple[float, list[tuple]]:
    begun = time.process_time()
    scores = work()
    return time.process_time() - begun, [(s.n, s.loss, *s.tp, *s.fp, *s.fn) for s in scores]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    for part in (text, pooled):
        without, shared = part()
        without(), shared()
        ratios = []
        for _ in range(pairs):
            (a, expected), (b, found) = seconds(without), seconds(shared)
            if expected != found:
                raise AssertionError(f"{part.__name__}: scores differ")
            ratios.append(a / b)
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(f"{part.__name__}: median {statistics.median(ratios):.1f} ({spread}) of {pairs} pairs")


if __name__ == "__main__":
    main()
