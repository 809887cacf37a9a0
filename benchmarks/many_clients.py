"""Memory of a simulation with 100, 1,000 and 10,000 clients, each with a private prompt.

Every client is trained once (100 clients per round), then all are evaluated, each with its own prompt; the prompts are
in LMDB. Each size runs in its own process, and its peak resident memory is printed in two parts: `own` (anonymous:
allocated by the program) and `mapped` (file pages that the system may drop at any time: data, LMDB).

    python benchmarks/many_clients.py [--sizes 100 1000 10000]
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SAMPLES = 4  # training samples per client


def resident() -> tuple[float, float]:
    """Own and mapped memory of this process in MB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(status[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile"))
    return own, mapped


def simulate(clients: int) -> None:
    import numpy as np
    import torch

    import promptfed
    from promptfed.data import Site

    torch.set_num_threads(1)
    g = np.random.default_rng(0)
    per = SAMPLES + 2
    images = g.integers(0, 256, (clients * per, 3, 16, 16), np.uint8)
    peak = [0.0, 0.0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for i, value in enumerate(resident()):
                peak[i] = max(peak[i], value)
            time.sleep(0.02)

    with tempfile.TemporaryDirectory() as folder:
        data = promptfed.Dataset.from_arrays(
            "noise", images, g.integers(0, 4, len(images)), ("a", "b", "c", "d"), path=Path(folder) / "data"
        )
        del images
        sites = tuple(
            Site(str(i), np.arange(SAMPLES) + i * per, np.arange(0), np.arange(SAMPLES, per) + i * per)
            for i in range(clients)
        )
        federation = promptfed.Federation(data, sites, {"name": "benchmark"})
        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.perf_counter()
        rounds = max(1, clients // 100)
        promptfed.run(
            method={"name": "pfedpt", "epochs": 1, "prompt_epochs": 1, "prompt_size": 2},
            federation=federation,
            rounds=rounds,
            fraction=100 / clients,
            eval={"every": rounds, "after_local": "none", "pooled": "never"},
            engine={"workers": 1},
            out=Path(folder) / "run",
        )
        spent = time.perf_counter() - started
        stop.set()
        watcher.join()
        stored = sum(p.stat().st_blocks * 512 for p in (Path(folder) / "run" / "clients").iterdir()) / 1e6
    print(f"{clients:>6} clients: {peak[0]:6.0f} MB own, {peak[1]:6.0f} MB mapped, "
          f"{stored:6.1f} MB on disk, {spent:5.0f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--one", type=int)
    given = parser.parse_args()
    if given.one:
        simulate(given.one)
        return
    for size in given.sizes:
        subprocess.run([sys.executable, __file__, "--one", str(size)], check=True)


if __name__ == "__main__":
    main()
