"""What secure aggregation costs per client and round, in bytes and in processor time, against plain updates.

    python benchmarks/secure.py

The CNN is trained on random images, four per client and one step, so that masks are most of the work. All clients are
in one process: a round's time divided by their number is the work of one client and its part of the server's.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

from noise import federation, rounds
from promptfed import Federation

CASES = ((3, 2), (10, 9), (50, 49), (50, 16))  # clients, and neighbours of each
ROUNDS = 5


def cost(folder: Path, held: Federation, neighbours: int) -> tuple[float, float, float]:
    """Of one client in a round: milliseconds, bytes up and bytes down. Without neighbours, updates are sent as they
    are."""
    secure = {"aggregation": bool(neighbours), "neighbours": neighbours + neighbours % 2}
    settings = {"method": {"name": "fedavg", "epochs": 1}, "backbone": "cnn", "engine": {"workers": 1}}
    spent = []
    with rounds(folder / str(neighbours), held, secure=secure, **settings) as one:
        one()  # caches and allocations
        for _ in range(ROUNDS):
            begun = time.process_time()
            line = one()
            spent.append(time.process_time() - begun)
    clients, moved = len(held.sites), line["bytes"]
    return 1000 * median(spent) / clients, moved["up"] / clients, moved["down"] / clients


def main() -> None:
    print("| clients | neighbours | bytes up | bytes down | ms | more bytes up | more bytes down | more ms |")
    print("|---|---|---|---|---|---|---|---|")
    for clients, neighbours in CASES:
        with tempfile.TemporaryDirectory() as name:
            held = federation(Path(name), clients, train=4)
            ms, up, down = cost(Path(name), held, 0)
            masked_ms, masked_up, masked_down = cost(Path(name), held, neighbours)
        cells = (clients, neighbours, up, down, ms, masked_up - up, masked_down - down, masked_ms - ms)
        print("|", " | ".join(f"{cell:,.0f}" for cell in cells), "|", flush=True)


if __name__ == "__main__":
    main()
