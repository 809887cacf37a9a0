"""The overhead of promptfed: training one client, and a round of many trivial ones, compared with plain PyTorch loops.

Both train pFedPT's CNN on the same 320 images for one epoch with SGD, on one thread. Pairs are interleaved, so that a
noisy machine affects both sides alike, and the median of their ratios is printed. The plain loop keeps normalised
float images in memory and uses nn.Module and torch.optim; promptfed normalises the stored bytes of each batch, and
records losses, sample counts and whether values are finite.

A trivial client takes one step of a linear layer on cached features of four images. All that a round of 50 of them
costs beyond these steps is overhead: sampling, messages, checks, aggregation. CPU milliseconds, in one process.

    python benchmarks/overhead.py [--pairs 12]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import noise
from promptfed import FedAvg, models
from promptfed.seeding import rng
from promptfed.training import Samples, Work, train

N, BATCH, LR = 320, 16, 0.005


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1600, 394), nn.ReLU(), nn.Linear(394, 192), nn.ReLU(), nn.Linear(192, 10),
        )  # fmt: skip


class PlainTuned(nn.Sequential):
    """The same, tuned by hand: pooling first and channels-last memory are faster on a CPU."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(64, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(1600, 394), nn.ReLU(), nn.Linear(394, 192), nn.ReLU(), nn.Linear(192, 10),
        )  # fmt: skip


def plain_loop(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), LR)
    order = torch.from_numpy(rng(0, 1, 0, "batches", 0).permutation(N))
    for i in range(0, N, BATCH):
        at = order[i : i + BATCH]
        loss = nn.functional.cross_entropy(net(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def trivial_clients(pairs: int, clients: int = 50) -> None:
    x, y = torch.randn(4, 128), torch.randint(10, (4,))

    def plain() -> None:
        for _ in range(clients):
            head = nn.Linear(128, 10)
            optimizer = torch.optim.SGD(head.parameters(), LR)
            nn.functional.cross_entropy(head(x), y).backward()
            optimizer.step()

    def milliseconds(work) -> float:
        started = time.process_time()
        work()
        return 1000 * (time.process_time() - started)

    method = {"name": "head-tune", "epochs": 1, "batch_size": BATCH}
    with tempfile.TemporaryDirectory() as name:
        held = noise.federation(Path(name), clients, len(y))
        engine = {"workers": 1, "device": "cpu"}
        with noise.rounds(Path(name), held, method=method, backbone="vit-mini", engine=engine) as ours:
            plain()
            ours()
            both = [(milliseconds(ours), milliseconds(plain)) for _ in range(pairs)]
    whole, steps = (statistics.median(column) for column in zip(*both, strict=True))
    beyond = sorted(a - b for a, b in both)
    print(f"a round of {clients} trivial clients: {whole:.0f} ms, a plain loop {steps:.0f} ms; overhead median "
          f"{statistics.median(beyond):.0f} ms of {pairs} pairs ({beyond[0]:.0f} to {beyond[-1]:.0f})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=12)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    g = np.random.default_rng(0)
    images = torch.from_numpy(g.integers(0, 256, (N, 3, 32, 32), np.uint8))
    labels = torch.from_numpy(g.integers(0, 10, N))
    half = torch.full((3, 1, 1), 127.5)
    x = (images.float() - half) / half

    method = FedAvg(epochs=1, lr=LR, batch_size=BATCH)
    model = models.build("cnn", (3, 32, 32), 10, seed=0)
    start = {name: p.clone() for name, p in model.weights.items()}
    work = Work(0, Samples(images, labels, half, half), start, start, {})

    def ours() -> None:
        train(method, model, [work], method.schedule(1), seed=0, round=1)

    for name, kind, layout in (
        ("plain loop", Plain, torch.contiguous_format),
        ("plain loop, pooled first, channels last", PlainTuned, torch.channels_last),
    ):
        net = kind().to(memory_format=layout)
        xs = x.contiguous(memory_format=layout)
        plain_loop(net, xs, labels)
        ours()
        ratios = []
        for _ in range(pairs):
            theirs = seconds(lambda net=net, xs=xs: plain_loop(net, xs, labels))
            ratios.append(seconds(ours) / theirs)
        print(f"promptfed / {name}: median {statistics.median(ratios):.3f} of {pairs} pairs "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    trivial_clients(pairs)


if __name__ == "__main__":
    main()
