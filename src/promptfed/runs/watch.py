"""Following runs by their files, from another terminal: rounds.jsonl tells all, the lock if somebody is at work."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live as Screen

from ..errors import UserError
from ..server import Line
from . import config as C
from . import record
from .progress import Status

GRACE = 2.0  # seconds that the next run of a comparison may take to begin
POLL = 0.5


class Followed:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running = True
        self._inode, self._offset = 0, 0
        self._told = 0  # the last round that was told
        self.status = self._fresh()

    def look(self) -> list[str]:
        """Reads on; -> a line for each round that was not told before."""
        self.running = record.at_work(self.folder)  # first, so that nothing is missed of one that ends now
        said = []
        for line in self._lines():
            self.status.end(line)
            if line["round"] > self._told:
                self._told = line["round"]
                said.append(self.status.line())
        file = self.folder / "rounds.jsonl"
        self.status.ended = not self.running
        if self.running and file.exists() and self.status.done < self.status.rounds:
            self.status.begin(self.status.done + 1, (), at=file.stat().st_mtime)
        return said

    def _fresh(self) -> Status:
        config = C.make(C.read(self.folder / "config.toml"))
        return Status(self.folder.name, config.rounds, config.eval.every, clock=time.time)

    def _lines(self) -> list[Line]:
        """The complete ones that were not read before; all, if the file was replaced, as a resumed run does."""
        file = self.folder / "rounds.jsonl"
        if not file.exists():
            return []
        with file.open("rb") as stream:
            inode = file.stat().st_ino
            if inode != self._inode:
                self._inode, self._offset, self.status = inode, 0, self._fresh()
            stream.seek(self._offset)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def watch(folder: Path, console: Console) -> None:
    """Follows a run, or all runs of a comparison, until nobody is at work there any more."""
    if not _folders(folder):
        raise UserError(f'"{folder}" holds neither a run nor a comparison to watch (there is no config.toml)')
    runs: dict[Path, Followed] = {}
    seen = time.monotonic()  # somebody at work
    grace = 0.0 if _folders(folder) == [folder] else GRACE
    terminal = Screen(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext()
    with terminal as screen:
        while True:
            busy = [path for path in _folders(folder) if record.at_work(path)]
            seen = time.monotonic() if busy else seen
            for path in _folders(folder):
                if path not in runs and (path / "config.toml").exists():
                    runs[path] = Followed(path)
                if path in runs:
                    _tell(runs[path], console)
            if screen:
                screen.update(Group(*(run.status for run in runs.values() if run.running)), refresh=True)
            if time.monotonic() - seen >= grace and not busy:
                break
            time.sleep(POLL)
    console.print(_outcome(folder, list(runs.values())), soft_wrap=True, highlight=False, markup=False)


def _tell(run: Followed, console: Console) -> None:
    """On a terminal a run stays to be seen when it ends; elsewhere there is one line per round."""
    before = run.running
    said = run.look()
    if not console.is_terminal:
        for line in said:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    elif before and not run.running:
        console.print(run.status)


def _outcome(folder: Path, runs: Sequence[Followed]) -> str:
    stopped = [run for run in runs if not (run.folder / "result.json").exists()]
    if not stopped:
        return f"done: {folder}"
    where = ", ".join(f"{run.folder.name} after round {run.status.done} of {run.status.rounds}" for run in stopped)
    again = "".join(f"\n  promptfed run --resume --out {run.folder}" for run in stopped)
    if stopped[0].folder == folder:
        return f"stopped: {where}; go on with:{again}"
    return f"stopped: {where}; a comparison goes on with the command that made it, single runs with:{again}"


def _folders(folder: Path) -> list[Path]:
    """The runs of a folder, which is one itself or a comparison's; also such as are only being prepared."""
    marks = ("config.toml", ".lock")
    if any((folder / mark).exists() for mark in marks):
        return [folder]
    return sorted({file.parent for mark in marks for file in folder.glob(f"*/{mark}")}, key=_begun)


def _begun(run: Path) -> tuple[float, Path]:
    file = run / "config.toml"
    return (file.stat().st_mtime if file.exists() else float("inf"), run)
