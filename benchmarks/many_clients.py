"""Memory and time of a simulation with 100 to 100,000 clients, each with a private prompt in LMDB.

In each of three rounds 1,000 clients (or all, if there are fewer) are trained, then all clients are evaluated, each
with its own prompt. `start` is the time from the call to the first round. Each size runs in its own process, without
workers, and its peak resident memory is printed in two parts: `own` (anonymous: allocated by the program) and `mapped`
(file pages that the system may drop at any time: data, LMDB, updates on disk).

`--all` trains all clients in one round instead, and they have no test images: what the server holds of their updates.
With `--median`, aggregation needs all updates at once: beyond 256 MB they are held on disk.

    python benchmarks/many_clients.py [--sizes 100 1000 10000 100000] [--all [--median]]
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import noise
import promptfed
from promptfed import State, Update
from promptfed.clients.base import Notice

PARTICIPANTS, ROUNDS, SAMPLES = 1000, 3, 4  # samples per client


class Median(promptfed.FedAvg):
    """Each coordinate's median over clients."""

    def aggregate(self, state: State, updates: list[Update]) -> State:
        middle = {}
        for name, p in state.items():
            values = torch.stack([u.up[name].flatten()[:1000] for u in updates])  # a part will do for a benchmark
            middle[name] = p.clone()
            middle[name].view(-1)[:1000] = values.median(dim=0).values
        return middle


class Watch(threading.Thread):
    """The most memory so far, own and mapped, in MB; and when the first round began."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.called, self.start_up, self.peak, self.trained = time.perf_counter(), 0.0, [0.0, 0.0], False
        self.start()

    def run(self) -> None:
        while True:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            now = [int(status[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile")]
            self.peak = [max(pair) for pair in zip(self.peak, now, strict=True)]
            time.sleep(0.02)

    def begin(self, round: int, clients: object) -> None:
        self.start_up = self.start_up or time.perf_counter() - self.called

    def on_notice(self, notice: Notice) -> None:
        if notice.ask == "evaluate" and not self.trained:
            self.trained = True
            self.print("after training  ")

    def print(self, when: str) -> None:
        own, mapped = self.peak
        spent = time.perf_counter() - self.called
        print(f"  {when} {own:6.0f} MB own, {mapped:6.0f} MB mapped; start {self.start_up:4.1f} s, "
              f"{spent:5.0f} s so far", flush=True)  # fmt: skip

    def end(self, line: object) -> None: ...


def simulate(clients: int, everyone: bool, median: bool) -> None:
    torch.set_num_threads(1)
    method = {"name": "pfedpt", "epochs": 1, "prompt_epochs": 1, "prompt_size": 2}
    count = 1 if everyone else ROUNDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held = noise.federation(folder, clients, SAMPLES, 0 if everyone else 2, size=16)
        print(f"{clients:,} clients", flush=True)
        watch = Watch()
        promptfed.run(
            method={"name": "__main__:Median", "epochs": 1} if median else method,
            federation=held,
            rounds=count,
            fraction=1.0 if everyone else min(1.0, PARTICIPANTS / clients),
            eval={"every": count, "after_local": "none", "pooled": "never"},
            engine={"workers": 1},
            out=folder / "run",
            view=watch,
        )
        watch.print("after evaluation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--all", action="store_true", help="all clients train in one round")
    parser.add_argument("--median", action="store_true", help="aggregate medians instead of means")
    parser.add_argument("--one", action="store_true", help="in this process")
    given = parser.parse_args()
    if given.one:
        simulate(given.sizes[0], given.all, given.median)
        return
    flags = [f"--{name}" for name in ("all", "median") if getattr(given, name)]
    for size in given.sizes:
        subprocess.run([sys.executable, __file__, "--one", "--sizes", str(size), *flags], check=True)


if __name__ == "__main__":
    main()
