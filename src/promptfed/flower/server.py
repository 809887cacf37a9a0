"""The server of a consortium: a ServerApp around the round loop, with the run's folder on the server's own disk.

Flower does not resume a run whose SuperLink was killed. The folder does: the same name submitted again continues
after the last completed round.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import files
from ..errors import UserError
from ..runs import api, record
from ..runs import config as C
from ..runs.build import Parts
from ..server import Line
from . import consortium
from ._flwr import Context, Grid, ServerApp
from .clients import FlowerClients
from .signing import Signer
from .simulation import expected
from .site import AGREED, INTEGERS, read_agreed, read_numbers, run_name
from .wire import LIMITS

LINK = "PROMPTFED_LINK"  # environment variable: process id of the SuperLink
_HANDOVER = 15.0  # seconds in which the process of a killed SuperLink must have released a run
FOLDER = "PROMPTFED_CONSORTIUM"  # environment variable: the consortium's folder, which no message may name
SIZES = "sizes.json"  # of a run: training samples per client, as reported by it


def main(grid: Grid, context: Context) -> None:
    if FOLDER not in os.environ:
        raise UserError(f"{FOLDER} must name the folder of the consortium where the SuperLink is started")
    folder = Path(os.environ[FOLDER])
    path = folder / "runs" / run_name(context.run_config.get("run"))
    config = agreed(folder, path)
    _, named = read_agreed(folder)
    begun = (path / "checkpoint.safetensors").exists()

    def engine(parts: Parts, _: Path) -> FlowerClients:
        clients = FlowerClients(
            grid,
            expected(parts, consortium.nodes(folder)),
            timeout=config.engine.deadline,
            patience=config.engine.patience,
            poll=0.5,
            enough=1 if begun else None,
            sign=Signer(folder / consortium.REQUESTS, named.key, path.name) if named.key else None,
            limits=replace(LIMITS, bytes=named.answer_mb * 10**6),
            sizes=read_numbers(path / SIZES, INTEGERS, "client", "samples") if begun else None,
        )
        files.write(path / SIZES, (json.dumps(clients.sizes()) + "\n").encode())
        return clients

    threading.Thread(target=_end_with, args=(int(os.environ.get(LINK, "0")),), daemon=True).start()
    until = time.monotonic() + _HANDOVER
    while True:
        try:
            api.execute(api.RunPlan(config, path, resume=True), engine=engine)
            return
        except record.Busy:
            if time.monotonic() > until:
                raise UserError(f'run "{path.name}" is already running') from None
            time.sleep(0.5)


def _end_with(link: int) -> None:
    """Ends this process when the SuperLink's has ended: it would keep the run's folder locked for nothing."""
    try:
        while link:
            os.kill(link, 0)  # only checks that it exists
            time.sleep(0.5)
    except ProcessLookupError:
        os._exit(1)


def agreed(folder: Path, run: Path) -> C.Config:
    """The consortium's configuration, which must not change while a run is under way."""
    config, _ = read_agreed(folder)
    if not (run / "checkpoint.safetensors").exists():
        return config
    before, now = C.make(C.read(run / "config.toml")).complete(), config.complete()
    for key in now:
        if key not in ("rounds", "engine") and now[key] != before.get(key):
            what = _changed(key, before.get(key), now[key])
            raise UserError(f'{what} in {AGREED} when run "{run.name}" began: submit it under another name')
    return api.resumed(run, [{"rounds": config.rounds, "engine": now["engine"]}]).config


def _changed(key: str, before: Any, now: Any) -> str:
    """method.lr = 0.1 was 0.05"""
    if isinstance(before, dict) and isinstance(now, dict):
        name = next(name for name in {**now, **before} if now.get(name) != before.get(name))
        return _changed(f"{key}.{name}", before.get(name), now.get(name))
    return f"{key} = {now} was {before}"


server_app = ServerApp()
server_app.main()(main)


def told(line: Line, clients: int = 0) -> str:
    """A round in one line. `clients`: their number, to mention when a mean is over fewer."""
    parts = [f"round {line['round']}"]
    if line["train_loss"] is not None:
        parts.append(f"loss {line['train_loss']:.4f}")
    mean = line.get("aggregated", {}).get("summary", {}).get("local", {}).get("mean")
    if mean is not None:
        scored = len(line["aggregated"].get("clients", ()))
        some = f" (of {scored} of {clients} sites)" if scored < clients else ""
        parts.append(f"mean test accuracy {100 * mean:.1f} %{some}")
    parts.append(f"{line['seconds']['train'] + line['seconds'].get('evaluate', 0.0):.1f} s")
    parts += [f"without client {who['client']}: {who['why']}" for who in line["left_out"]]
    parts += [f"client {who['client']} is not evaluated: {who['why']}" for who in line.get("not_scored", ())]
    for row in line.get("aggregation", {}).get("clients", ()):
        if row.get("factor", 1.0) < 1:
            parts.append(f"update of client {row['client']} shortened to {row['factor']:.2g} of its length")
    return ", ".join(parts)
