"""A federation on Flower, simulated on this machine."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ..errors import UserError
from ..runs.build import Parts, describe, worker_count
from ._flwr import ClientApp, Context, Grid, ServerApp
from .app import client_app, parts_fingerprint, simulated
from .clients import Expected, FlowerClients


def expected(parts: Parts, nodes: Mapping[int, int] | None = None) -> Expected:
    """What nodes must agree with, from the server's own parts. `nodes`: which client each of them is."""
    data, shared = parts.federation.dataset, parts.method.shared(parts.init)
    if parts.config.secure.aggregation:  # masked updates are whole numbers
        shared = {name: p.to(torch.int32) for name, p in shared.items()}
    return Expected(
        clients=len(parts.federation.sites),
        classes=parts.model.classes,
        shared=shared,
        fingerprint=parts_fingerprint(parts),
        domains=len(data.domains),
        nodes=nodes,
    )


def simulate(parts: Parts, folder: Path) -> FlowerClients:
    """Clients on Flower's simulation. The folder has the run's partition.json."""
    if parts.config.method.name.startswith("__main__:"):
        raise UserError(
            'engine.name = "flower": other processes cannot import a method that is defined in the main script; '
            "put it into a module"
        )
    wanted = expected(parts)
    workers = worker_count(parts)
    file = (folder / "clients" / "host.json").absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(describe(parts, folder)))
    app = client_app(partial(simulated, str(file)))
    simulation = Simulation(app, wanted.clients, workers, gpus=float(parts.device.type == "cuda"))
    try:
        # Enough requests under way to keep all processes busy: Flower fetches messages ten times a second.
        return FlowerClients(
            simulation.grid(),
            wanted,
            poll=0.02,
            window=16 * workers,
            strict=True,
            patience=900.0,  # on a busy machine; if the simulation ends, `alive` says so at once
            alive=simulation.check,
            stop=simulation.close,
        )
    except BaseException:
        simulation.close()
        raise


class Simulation:
    """Flower's simulation, in a thread of its own: its ServerApp hands out the Grid and waits for close().

    The round loop stays where it is, in the caller's thread: errors and Ctrl-C reach the user as with any engine.
    It starts a Ray, which Flower shuts down in the end. Ray listens on all of the machine's addresses, whichever it is
    told to use; it answers only callers with the token made for this process (_flwr.py).
    """

    def __init__(self, app: ClientApp, nodes: int, workers: int, gpus: float = 0.0) -> None:
        try:
            import ray
        except ImportError:
            raise UserError('engine.name = "flower" needs Ray to simulate: pip install "promptfed[flower]"') from None
        if ray.is_initialized():
            raise UserError('engine.name = "flower": Ray runs in this process already, and Flower would shut it down')
        self._ray = ray
        self._python_path = os.environ.get("PYTHONPATH")  # which Flower changes
        self._handed: SimpleQueue[Grid] = SimpleQueue()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        init = {"num_cpus": workers, "address": "local", "log_to_driver": True}
        config = {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": gpus}}
        self._thread = threading.Thread(target=self._run, args=(app, nodes, config), name="flower", daemon=True)
        self._thread.start()

    def grid(self) -> Grid:
        while True:
            with suppress(Empty):
                return self._handed.get(timeout=0.1)
            self.check()

    def check(self) -> None:
        """Raises if the simulation has ended."""
        if not self._thread.is_alive():
            cause = self._error
            while cause is not None and cause.__cause__ is not None:
                cause = cause.__cause__  # Flower wraps the original exception
            why = (
                "without an error" if cause is None else f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
            )
            raise UserError(f'engine.name = "flower": the simulation has ended ({why})')

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)  # it waits for clients that are at work
        self._ray.shutdown()  # which ends them: what a round has stored, it has stored whole
        self._thread.join(60)
        if self._python_path is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = self._python_path

    def _run(self, app: ClientApp, nodes: int, config: Any) -> None:
        from ._flwr import run_simulation  # slow to import

        server = ServerApp()

        def main(grid: Grid, context: Context) -> None:
            self._handed.put(grid)
            self._stop.wait()

        server.main()(main)
        logger = logging.getLogger("flwr")
        before = logger.level
        logger.setLevel(logging.CRITICAL)  # that run_simulation() is deprecated; what goes wrong is raised here
        try:
            run_simulation(server, app, nodes, backend_config=config)
        except BaseException as error:
            self._error = error
        finally:
            logger.setLevel(before)
