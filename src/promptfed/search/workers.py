"""Processes that train runs, one after another. After every round the parent says whether a run goes on.

As with workers of clients, each is a fresh interpreter: a script without a main guard is not run twice. Their warnings
go into a log file, so that they do not disturb a live table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from threading import Event, Lock
from typing import IO, Any

from .. import processes
from ..clients.base import Notice
from ..errors import UserError
from ..runs import api, build, record
from ..runs import config as C
from ..server import Line

_COMMAND = [sys.executable, "-c", "from promptfed.search.workers import main; main()"]
_PATIENCE = 60  # seconds


@dataclass(frozen=True)
class Round:
    """What a worker tells of a completed round."""

    number: int
    train: float  # seconds
    evaluate: float
    val: float | None  # mean over clients; None: not evaluated


@dataclass(frozen=True)
class Job:
    """A run to train, or to go on with if its folder is there."""

    config: C.Config
    folder: Path
    on_round: Callable[[Round], bool] = lambda round: True  # whether it goes on


@dataclass(frozen=True)
class Ended:
    """How a job has ended: its result is in its folder if it is done."""

    how: str  # done, stopped by on_round, killed, or failed
    seconds: float
    error: UserError | None = None


class Pool:
    """One worker per core, or a single one on an accelerator; each starts with its first job."""

    def __init__(self, device: str, log: Path) -> None:
        self.size = build.cores() if build.pick_device(device).type == "cpu" else 1
        self._log = log.open("a")
        self._workers = [_Worker(self._log) for _ in range(self.size)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._workers:
            worker.kill()
        self._log.close()

    def run(
        self, take: Callable[[], Job | None], end: Callable[[Job, Ended], None], seconds: float | None = None
    ) -> None:
        """Trains what take() gives until it gives None. Neither function nor a job's on_round is called by two threads
        at once. After so many seconds workers are killed; the rounds that their runs have completed are kept."""
        lock, over = Lock(), False
        for worker in self._workers:
            worker.revive()

        def work(worker: _Worker) -> None:
            while True:
                with lock:
                    job = None if over else take()
                if job is None:
                    return
                ended = worker(job, lock)
                with lock:
                    end(job, ended)

        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(work, worker) for worker in self._workers]
            late: set[Future[None]] = set(futures)
            try:
                late = wait(futures, seconds, return_when=FIRST_EXCEPTION).not_done
            finally:  # also of Ctrl-C
                over = True
                if late:
                    for worker in self._workers:
                        worker.kill()
        for future in futures:
            future.result()


class _Worker:
    """The parent's end."""

    def __init__(self, log: IO[str]) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._killed = Event()
        self._guard = Lock()  # a process that is just starting is killed too

    def revive(self) -> None:
        """After kill(): the next job starts another process."""
        self._killed.clear()

    def __call__(self, job: Job, lock: Lock) -> Ended:
        begun = time.monotonic()
        with self._guard:
            if self._killed.is_set():
                return Ended("killed", 0.0)
            process = self._process = self._process or self._start()
        _send(process, {"config": job.config.complete(), "folder": str(job.folder.absolute()), "path": sys.path})
        while told := _read(process):
            if "how" in told:
                if told["how"] == "traceback":
                    raise RuntimeError("in a worker process:\n" + told["text"])
                error = UserError(told["text"]) if told["text"] else None
                return Ended(told["how"], time.monotonic() - begun, error)
            with lock:
                go_on = job.on_round(Round(**told))
            _send(process, go_on)
        code = process.wait()
        if self._killed.is_set():
            return Ended("killed", time.monotonic() - begun)
        raise UserError(f"a worker process ended with code {code} (out of memory?); the same command goes on")

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return processes.start(_COMMAND, stdin=pipe, stdout=pipe, stderr=self._log, text=True)

    def kill(self) -> None:
        with self._guard:
            self._killed.set()
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _send(process: subprocess.Popen[str], message: Any) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died: reading finds that out too
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next message; empty if there is none any more."""
    assert process.stdout is not None
    text = process.stdout.readline()
    told: dict[str, Any] = json.loads(text) if text.endswith("\n") else {}
    return told


# ---- in the worker


class _Stopped(Exception):
    """The parent has said so."""


def main() -> None:
    processes.end_with_parent()
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print must not land among the messages

    def say(**message: Any) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    for text in iter(sys.stdin.readline, ""):
        asked = json.loads(text)
        sys.path[:] = asked["path"]
        try:
            _train(C.make(asked["config"]), Path(asked["folder"]), _Told(say))
            say(how="done", text="")
        except _Stopped:
            say(how="stopped", text="")
        except UserError as error:
            say(how="failed", text=str(error))
        except Exception:
            say(how="traceback", text=traceback.format_exc())


def _train(config: C.Config, folder: Path, view: record.View) -> None:
    for patience in range(_PATIENCE, -1, -1):
        try:
            api.execute(api.RunPlan(config, folder, resume=(folder / "config.toml").exists()), view=view)
            return
        except record.Busy:  # the worker of a search that was killed is about to end
            if not patience:
                raise
            time.sleep(1)


class _Told:
    """A View that tells the parent, and asks it."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say

    def begin(self, round: int, clients: Any) -> None:
        return

    def on_notice(self, notice: Notice) -> None:
        return

    def end(self, line: Line) -> None:
        seconds = line["seconds"]
        val = line["aggregated"]["summary"]["val"] if "aggregated" in line else None
        self._say(number=line["round"], train=seconds["train"], evaluate=seconds.get("evaluate", 0.0), val=val)
        if sys.stdin.readline().strip() != "true":
            raise _Stopped


# ---- the runs of a search


def as_trial(config: C.Config, every: int) -> C.Config:
    """For one worker, and evaluated no more than a search needs: as aggregated, every so many rounds."""
    given = config.complete()
    engine = {**given["engine"], "name": "local", "workers": 1, "threads": 1, "trackers": []}
    evaluation = {
        **given["eval"],
        "every": every,
        "after_local": "none",
        "pooled": "never",
        "drift": False,
        "datasets": (),
        "limit": None,
    }
    return C.make({**given, "engine": engine, "eval": evaluation})


def check(config: C.Config) -> None:
    """Refuses what has no validation data, and data or methods that other processes do not find."""
    if config.consortium:
        raise UserError("consortium: a search needs the images of all sites here")
    if config.method.name.startswith("__main__:"):
        raise UserError(f'method.name = "{config.method.name}" must be in a module: other processes import it')
    federation = build.split(config)
    new = build.newcomers(config, federation)
    if not any(len(site.val) for i, site in enumerate(federation.sites) if i not in new):
        shares = config.partition.complete().get("split")
        raise UserError(
            f"partition.split = {shares}: no client has validation data, by which a search chooses "
            "(its second number, the share of validation data, must be above 0)"
        )


def objective(numbers: dict[str, Any]) -> float:
    """The mean over clients of the final models' validation accuracy, as aggregated."""
    found: float = numbers["metrics"]["aggregated"]["last"]["val"]
    return found


def trim(folder: Path) -> None:
    """Removes the heavy files of a run that will not go on."""
    for name in (record.LAST_STATE, record.PREVIOUS_STATE):
        (folder / name).unlink(missing_ok=True)
    rmtree(folder / "clients", ignore_errors=True)
