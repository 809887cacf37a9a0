"""How promptfed compares with the plain way to write the same training, side by side in one run.

Each part has its own process and prints the median ratio over interleaved pairs, plain / promptfed, so that a noisy
machine affects both sides alike; on a machine with other work only ratios of CPU seconds mean anything. The plain sides
are written here, in the manner of published implementations:

    fedavg    a round in the manner of PFLlib: a module and a data loader per client, trained one after another with all
              cores, and averaged. promptfed uses a process per core.
    pfedpt    a client's round in the manner of pFedPT's authors: the prompt is a module in front of the network; epochs
              of the prompt, then of the network, the other part frozen. One thread.
    promptfl  a step in the manner of CoOp and FLiP, and
    sgpt      a step of SGPT's second block in the manner of its authors: both towers or all layers in every step
              (benchmarks/frozen.py, parts text and prefix). One thread, ViT-B/16.

    python benchmarks/peers.py [--parts fedavg pfedpt promptfl sgpt] [--clients 50 1000] [--pairs 5]
"""

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import frozen
import noise
from overhead import Plain
from promptfed import models
from promptfed.methods import create
from promptfed.training import Samples, Work, train

SAMPLES, BATCH, LR = 48, 16, 0.005  # per client
PROMPT, PROMPT_LR = 4, 1.0  # width of the frame


def cpu_seconds() -> float:
    """Of this process and its workers. Other work on the machine hardly changes them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = (Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split() for child in children)
    return time.process_time() + sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def ratios(
    pairs: int, plain: Callable[[], object], ours: Callable[[], object], warm: Callable[[], object] | None = None
) -> float:
    """-> wall seconds of the plain side. `warm`: in place of the first of each, which is a warm-up."""

    def spent(work: Callable[[], object]) -> tuple[float, float]:
        started = time.perf_counter(), cpu_seconds()
        work()
        return time.perf_counter() - started[0], cpu_seconds() - started[1]

    if warm:
        warm()
    else:
        plain()
        ours()
    both = [(spent(plain), spent(ours)) for _ in range(pairs)]
    for i, clock in enumerate(("wall", "CPU")):
        seconds = [statistics.median(side[i] for side in column) for column in zip(*both, strict=True)]
        found = sorted(a[i] / b[i] for a, b in both)
        spread = f"median {statistics.median(found):.2f} of {pairs} pairs ({found[0]:.2f} to {found[-1]:.2f})"
        print(f"  {clock} seconds: plain {seconds[0]:.3f}, promptfed {seconds[1]:.3f}; ratio {spread}", flush=True)
    return statistics.median(side[0] for side, _ in both)


# ---- FedAvg in the manner of PFLlib


class PlainFedAvg:
    """Every client has a copy of the network for the whole run."""

    def __init__(self, x: Tensor, y: Tensor, clients: int) -> None:
        self.net = Plain()
        self.data = [list(zip(*part, strict=True)) for part in zip(x.chunk(clients), y.chunk(clients), strict=True)]
        self.nets = [copy.deepcopy(self.net) for _ in range(clients)]
        self.optimizers = [torch.optim.SGD(net.parameters(), LR) for net in self.nets]

    def round(self, share: float = 1.0) -> None:
        """`share`: of the clients that are trained."""
        for net in self.nets:
            for new, old in zip(self.net.parameters(), net.parameters(), strict=True):
                old.data = new.data.clone()
        chosen = slice(max(1, int(share * len(self.nets))))
        for net, data, optimizer in zip(self.nets[chosen], self.data[chosen], self.optimizers[chosen], strict=True):
            for x, y in DataLoader(data, BATCH, shuffle=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
        for p in self.net.parameters():
            p.data.zero_()
        for net in self.nets:
            for total, p in zip(self.net.parameters(), net.parameters(), strict=True):
                total.data += p.data.clone() / len(self.nets)


def fedavg(pairs: int, clients: int) -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"fedavg: {clients} clients of {SAMPLES} images, CNN of 815,892 parameters, {cores} cores")
    torch.set_num_threads(cores)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held = noise.federation(folder, clients, SAMPLES)
        x = (torch.tensor(held.dataset.images[:]).float() - 127.5) / 127.5
        plain = PlainFedAvg(x, torch.from_numpy(held.dataset.labels), clients)
        method = {"name": "fedavg", "epochs": 1, "batch_size": BATCH, "lr": LR}
        with noise.rounds(folder, held, method=method, backbone="cnn", engine={"device": "cpu"}) as ours:
            share = min(1.0, 20 / clients)  # of the clients: enough for a warm-up
            wall = ratios(pairs, plain.round, ours, lambda: (plain.round(share), ours(share)))
        steps = clients * kernels() / cores
        print(f"  passes through the network alone, on {cores} cores: {steps:.3f} s; ratio {wall / steps:.2f}")


def kernels(clients: int = 20) -> float:
    """Seconds of one core that a client's passes through the network take without anything else: no data, optimizer,
    messages or aggregation. No engine with the same kernels can be faster."""
    torch.set_num_threads(1)
    model = models.build("cnn", (3, 32, 32), noise.CLASSES, 0)
    weights = {name: weight.requires_grad_() for name, weight in model.weights.items()}
    x, y = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % noise.CLASSES
    steps, spent = clients * SAMPLES // BATCH, 0.0
    for step in range(-3, steps):  # three to warm up
        started = time.process_time()
        loss = nn.functional.cross_entropy(model.classify(weights, model.features(weights, x)), y)
        torch.autograd.grad(loss, list(weights.values()))
        spent += time.process_time() - started if step >= 0 else 0.0
    return spent / clients


# ---- pFedPT in the manner of its authors


class Frame(nn.Module):
    """A prompt around the image, as four parameters."""

    def __init__(self) -> None:
        super().__init__()
        inner = 32 - 2 * PROMPT
        self.top, self.bottom = (nn.Parameter(torch.randn(1, 3, PROMPT, 32)) for _ in range(2))
        self.left, self.right = (nn.Parameter(torch.randn(1, 3, inner, PROMPT)) for _ in range(2))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        middle = torch.cat([self.left, torch.zeros(1, 3, self.inner, self.inner), self.right], dim=3)
        frame = torch.cat([self.top, middle, self.bottom], dim=2)
        return x + torch.cat(len(x) * [frame])


def pfedpt(pairs: int) -> None:
    print("pfedpt: a client of 320 images, one epoch of the prompt and one of the CNN")
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (320, 3, 32, 32), dtype=torch.uint8, generator=g)
    y, half = torch.randint(10, (320,), generator=g), torch.full((3, 1, 1), 127.5)
    data = list(zip((images.float() - half) / half, y, strict=True))
    frame, net = Frame(), Plain()
    whole = nn.Sequential(frame, net)
    steps = [torch.optim.SGD(frame.parameters(), PROMPT_LR), torch.optim.SGD(net.parameters(), LR)]

    def plain() -> None:
        for part, optimizer in zip(whole, steps, strict=True):
            whole.requires_grad_(False)
            part.requires_grad_(True)
            for x, labels in DataLoader(data, BATCH, shuffle=True):
                whole.zero_grad()
                nn.functional.cross_entropy(whole(x), labels).backward()
                optimizer.step()

    settings = {"epochs": 1, "batch_size": BATCH, "lr": LR, "prompt_epochs": 1, "prompt_size": PROMPT}
    method, model = create("pfedpt", {**settings, "prompt_lr": PROMPT_LR}), models.build("cnn", (3, 32, 32), 10, 0)
    start = method.tuning.init(model, 0)
    work = Work(0, Samples(images, y, half, half), start, method.shared(start), {})

    def ours() -> None:
        train(method, model, [work], method.schedule(1), seed=0, round=1)

    ratios(pairs, plain, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("fedavg", "pfedpt", "promptfl", "sgpt")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--clients", type=int, nargs="+", default=[50, 1000], help="of the part fedavg")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    alone = {
        "fedavg": [(fedavg, (given.pairs, clients)) for clients in given.clients],
        "pfedpt": [(pfedpt, (given.pairs,))],
        "promptfl": [(frozen.alone, ("text", given.pairs))],
        "sgpt": [(frozen.alone, ("prefix", given.pairs))],
    }
    for work, arguments in (one for part in given.parts for one in alone[part]):
        noise.in_own_process(work, *arguments)


if __name__ == "__main__":
    main()
