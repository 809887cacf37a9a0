"""The cost of Flower: start-up, seconds per round and bytes, compared with the local engine on the same images.

    python benchmarks/flower.py                                  # local engine and simulation, 3, 10 and 50 clients
    python benchmarks/flower.py --deployed 3 10 --simulated      # local engine and a SuperLink with 3 and 10 nodes

Every client trains on 14 images for one epoch; private heads on `vit-mini`. A deployment uses TLS and keys, and
every byte between nodes and SuperLink passes through a counter: `wire` is per client and round, both directions, with
everything that Flower and TLS add; `payload` is what promptfed sends. Idle nodes poll for messages; that traffic is
printed separately. `start` is the time from the command to the first round; in a deployment the nodes are already
connected. Ray, which the simulation starts, listens on all addresses of the machine:
`unshare -rn sh -c 'ip link set lo up && python benchmarks/flower.py'` isolates it.
"""

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import promptfed
from promptfed.runs import record

ROUNDS = 4
IMAGES = 20  # per client: 14 for training, 2 for validation, 4 for testing
METHOD = {"name": "fedper+vpt", "epochs": 1, "batch_size": 16}
PROMPTFED = [sys.executable, "-m", "promptfed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, nargs="*", default=[3, 10, 50], metavar="CLIENTS")
    parser.add_argument("--deployed", type=int, nargs="*", default=[], metavar="CLIENTS")
    given = parser.parse_args()
    print("clients  engine      start      round   payload      wire")
    for clients in sorted({*given.simulated, *given.deployed}):
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder)
            local = in_one_process(clients, {"name": "local"}, at / "local")
            show(clients, "local", *local)
            if clients in given.simulated:
                show(clients, "simulated", *in_one_process(clients, {"name": "flower"}, at / "flower"))
            if clients in given.deployed:
                deployed(clients, at)


def show(clients: int, engine: str, start: float, a_round: float, payload: float, wire: float | None = None) -> None:
    sent = "        -" if wire is None else f"{wire / 1000:6.1f} kB"
    print(f"{clients:7}  {engine:9} {start:5.1f} s  {a_round:7.2f} s  {payload / 1000:5.1f} kB  {sent}", flush=True)


def spent(line: dict[str, Any]) -> float:
    return float(line["seconds"]["train"] + line["seconds"].get("evaluate", 0.0))


def numbers(folder: Path) -> tuple[float, float]:
    """Seconds per round, without the first, whose caches are cold; bytes per client and round."""
    lines = record.read_lines(folder)
    seconds = [line["seconds"]["train"] for line in lines[1:]]
    moved = [(line["bytes"]["up"] + line["bytes"]["down"]) / line["bytes"]["clients"] for line in lines]
    return float(np.mean(seconds)), float(np.mean(moved))


def in_one_process(clients: int, engine: dict[str, str], out: Path) -> tuple[float, float, float]:
    started = time.perf_counter()
    promptfed.run(
        method=METHOD,
        dataset={"name": "shapes", "limit": IMAGES * clients},
        partition={"name": "iid", "clients": clients, "split": [0.7, 0.1, 0.2]},
        backbone="vit-mini",
        rounds=ROUNDS,
        eval={"every": ROUNDS, "pooled": "never", "after_local": "none"},
        engine=engine,
        out=out,
    )
    whole = time.perf_counter() - started
    lines = record.read_lines(out)
    return whole - sum(map(spent, lines)), *numbers(out)


# ---- a deployment


class Counter(threading.Thread):
    """Forwards traffic between nodes and the SuperLink, and counts its bytes."""

    def __init__(self, target: int) -> None:
        super().__init__(daemon=True)
        self.target, self.bytes = target, 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self.listener.getsockname()[1]
        self.start()

    def run(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        server = await asyncio.start_server(self.connected, sock=self.listener)
        await server.serve_forever()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the SuperLink exited before its nodes
            writer.close()
            return
        await asyncio.gather(self.pass_on(reader, back), self.pass_on(there, writer))

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.bytes += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()


def deployed(clients: int, folder: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server, running = folder / "server", []
    settings = [f"method.{key}={value}" for key, value in METHOD.items()]
    settings += [
        f"rounds={ROUNDS}",
        f"eval.every={ROUNDS}",
        "eval.after_local=none",
        "backbone=vit-mini",
        "dataset.size=32",
    ]
    classes = images(folder, clients)
    flower("init", server, *settings, "--clients", clients, "--classes", classes, "--address", f"127.0.0.1:{port}")
    flower("certs", server)
    counter = Counter(port)
    try:
        running.append(background(folder / "link.log", "link", server))
        wait(lambda: connects(port))
        # Sites connect to the counter; everything else that they have agreed on is the same.
        theirs = folder / "consortium.toml"
        theirs.write_text(
            (server / "consortium.toml").read_text().replace(f"127.0.0.1:{port}", f"127.0.0.1:{counter.port}")
        )
        started = time.perf_counter()
        for client in range(clients):
            at, data = folder / f"site{client}", folder / "images" / str(client)
            where = ("--consortium", theirs, "--ca", server / "tls" / "ca.pem", "--data", data)
            flower("site", at, *where, "--client", client)
            flower("admit", server, at / "site.pub", "--client", client)
        made = time.perf_counter() - started
        started = time.perf_counter()
        running += [background(folder / f"{c}.log", "node", folder / f"site{c}") for c in range(clients)]
        wait(lambda: all("is connected" in (folder / f"{c}.log").read_text() for c in range(clients)))
        up = time.perf_counter() - started
        time.sleep(20)
        before, started = counter.bytes, time.perf_counter()
        time.sleep(30)
        idle = (counter.bytes - before) / clients / (time.perf_counter() - started) * 60
        before, started = counter.bytes, time.perf_counter()
        flower("submit", server, "--name", "bench")
        took, sent = time.perf_counter() - started, counter.bytes - before
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)
    lines = record.read_lines(server / "runs" / "bench")
    start = took - sum(map(spent, lines))
    show(clients, "deployed", start, *numbers(server / "runs" / "bench"), sent / clients / ROUNDS)
    print(
        f"         {clients} nodes: {made / clients:.1f} s to set one up, {up:.1f} s to start all, "
        f"{idle / 1000:.1f} kB per minute idle",
        flush=True,
    )


def images(folder: Path, clients: int) -> str:
    """Write each site's folder of images; -> the classes, separated by commas"""
    data = promptfed.load_dataset(promptfed.DatasetConfig(name="shapes", limit=IMAGES * clients))
    for client in range(clients):
        for i in range(client * IMAGES, (client + 1) * IMAGES):
            at = folder / "images" / str(client) / data.classes[data.labels[i]]
            at.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(data.images[i]).transpose(1, 2, 0)).save(at / f"{i}.png")
    return ",".join(data.classes)


def flower(*words: object) -> None:
    done = subprocess.run([*PROMPTFED, "flower", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(re.sub(r"\s+", " ", done.stdout[-2000:] + done.stderr[-2000:]))


def background(log: Path, *words: object) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        return subprocess.Popen([*PROMPTFED, "flower", *map(str, words)], stdout=out, stderr=subprocess.STDOUT)


def connects(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


def wait(ready: Callable[[], bool], seconds: float = 900) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            sys.exit(f"not ready after {seconds:g} s")
        time.sleep(0.3)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
