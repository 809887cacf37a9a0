"""How far a run is: of this process by what it is told, or of another process by the files in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from threading import RLock
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .. import steps
from ..clients.base import Notice
from ..errors import UserError
from ..server import Line
from ..steps import Step
from . import config as C
from . import record
from .display import BAR, Shown, Steps, duration, write

RECENT = 10  # rounds whose times are expected of those to come
SLOW = 3.0  # times the median of seconds per sample
DELAY = 2.0  # seconds behind the median client, from which on it matters
SHOWN = 3  # clients that are named
GRACE = 2.0  # seconds that the next run of a comparison may take to begin
POLL = 0.5
_DOING = {
    "train": "training",
    "evaluate": "evaluating",
    "second": "exchanging",
    "enroll": "enrolling",
    "keys": "making keys",
    "shares": "sharing keys",
    "unmask": "unmasking",
}


def slow(took: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Clients that took more than three times the median of seconds per sample, and seconds longer than half of the
    others, the slowest first. One with few samples has a high rate too, but delays none."""
    known = [one for one in took if one["samples"]]
    if len(known) < 3:
        return {}
    usual = median(one["seconds"] / one["samples"] for one in known)
    half = median(one["seconds"] for one in known)
    rates = [(one["seconds"] / one["samples"] / usual, one) for one in known if one["seconds"] > half + DELAY]
    found = sorted((-times, one["client"], one["seconds"]) for times, one in rates if times > SLOW)
    return {client: f"{seconds:.1f} s, {-times:.1f} x the median per sample" for times, client, seconds in found}


class Status:
    """A View that knows what to tell of a run. Rounds to come take what the last ones took; evaluations are timed
    separately, as not every round has one."""

    def __init__(self, label: str, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.label, self.rounds, self._clock = label, rounds, clock
        self.done = 0
        self.ended = False
        self.steps = Steps()
        self._remarks: dict[str, tuple[int, dict[int, str]]] = {}  # slow, failed: last round with any, why by client
        self._train: list[float] = []
        self._evaluate: list[float] = []
        self._scored: int | None = 0  # the last evaluated round
        self._every = 0  # rounds from one evaluation to the next; 0: unknown
        self._loss, self._scores = "", ""
        self._begun: float | None = None  # the round under way
        self._ask, self._asked, self._answered = "", 0, 0
        self._lock = RLock()  # clients are heard of in threads, and the terminal is drawn in another

    def begin(self, round: int, clients: Sequence[int]) -> None:
        with self._lock:
            self.done, self._begun = round - 1, self._clock()
            if not self._train and self.done:  # a run goes on, and which round was evaluated last is not known
                self._scored = None
            self._ask, self._asked, self._answered = "train", len(clients), 0

    def on_notice(self, notice: Notice) -> None:
        with self._lock:
            if notice.ask != self._ask or self._answered >= self._asked:
                self._ask, self._asked, self._answered = notice.ask, notice.asked, 0
            self._answered += notice.seconds is not None
            if notice.error:
                self._remark("failed", self.done + 1, {notice.client: notice.error})

    def end(self, line: Line) -> None:
        with self._lock:
            self.done, self._begun, self._ask = line["round"], None, ""
            seconds = line["seconds"]
            self._train.append(seconds["train"])
            if "evaluate" in seconds:
                self._evaluate.append(seconds["evaluate"])
                self._every = 0 if self._scored is None else self.done - self._scored
                self._scored = self.done
            self._remark("failed", self.done, {one["client"]: one["why"] for one in line["left_out"]})
            if len(self._train) > 1:  # the first round includes every client's warm-up
                self._remark("slow", self.done, slow(seconds.get("clients", ())))
            trained = line["train_loss"] is not None and line.get("passes", 1)  # zero-shot: no sample was passed
            self._loss = f"loss {line['train_loss']:.3f}" if trained else ""
            local = line["aggregated"]["summary"]["local"] if "aggregated" in line else {"mean": None}
            if local["mean"] is not None:
                self._scores = f"local {local['mean']:.1%}, worst {local['worst']:.1%}"

    def _remark(self, kind: str, round: int, found: Mapping[int, str]) -> None:
        if found:
            before = self._remarks.get(kind, (0, {}))
            self._remarks[kind] = round, {**(before[1] if before[0] == round else {}), **found}

    def spent(self) -> float:
        now = 0.0 if self._begun is None else self._clock() - self._begun
        return sum(self._train) + sum(self._evaluate) + now

    def left(self) -> str:
        """The time until the end of the run."""
        if self.done >= self.rounds:
            return ""
        if len(self._train) < 2:  # the first one also starts processes and computes what is frozen
            return "time left: known after two rounds"
        train, every = _usual(self._train), self._every or self.rounds
        evaluations = -(-self.rounds // every) - self.done // every
        total = (self.rounds - self.done) * train + evaluations * _usual(self._evaluate)
        if self._begun is not None:
            total -= min(self._clock() - self._begun, train)
        return f"{'' if self._every else 'at least '}{duration(total)} left"

    def _accuracy(self) -> str:
        """Of the last evaluation, with its round if that is not the last one."""
        old = self._scores and self._scored != self.done
        return f"{self._scores} (round {self._scored})" if old else self._scores

    def line(self) -> str:
        """What is to be told at the end of a round, for a log."""
        left = self.left() if len(self._train) > 1 else ""
        spent = ", ".join(filter(None, (f"{duration(self.spent())} spent", left)))
        remarks = [f"{kind}: {_some(found)}" for kind, (round, found) in self._remarks.items() if round == self.done]
        parts = (f"{self.label}  round {self.done}/{self.rounds}", self._loss, self._accuracy(), spent, *remarks)
        return "  ".join(filter(None, parts))

    def now(self) -> str:
        """What is under way, for a log."""
        with self._lock:
            at = "" if self._begun is None else f"round {self.done + 1}/{self.rounds}"
            spent = f"{duration(self.spent())} spent" if self.spent() >= 1 else ""
            return "  ".join(filter(None, (self.label, at, self.steps.line(), self._progress(), spent)))

    def __rich__(self) -> RenderableType:
        with self._lock:
            head = Table.grid(padding=(0, 2, 0, 0))
            time_ = ", ".join(filter(None, (duration(self.spent()), "" if self.ended else self.left())))
            bar = ProgressBar(self.rounds, self.done, width=BAR)
            head.add_row(Text(self.label, "bold"), bar, f"{self.done}/{self.rounds} rounds", Text(time_, "cyan"))
            numbers = "  ".join(filter(None, (self._loss, self._accuracy())))
            lines = [Text(text) for text in ("" if self.ended else self._progress(), numbers) if text]
            for kind, (round, found) in self._remarks.items():
                lines.append(Text(f"{kind} in round {round}: {_some(found)}", "red" if kind == "failed" else "yellow"))
            for text in lines:
                text.pad_left(2)
                text.no_wrap, text.overflow = True, "ellipsis"
            return Group(head, *([] if self.ended else [self.steps]), *lines)

    def _progress(self) -> str:
        """How many clients have answered what is under way."""
        if self._begun is None and not self._train and not self._ask:
            return "" if self.steps.active else "preparing data and model"
        return f"{_DOING[self._ask]}: {self._answered} of {self._asked} clients" if self._ask else ""


def _usual(seconds: Sequence[float]) -> float:
    """What the last ones took, without the first where there are others."""
    recent = (seconds[1:] or seconds)[-RECENT:]
    return fmean(recent) if recent else 0.0


def _some(found: Mapping[int, str]) -> str:
    named = [f"{client} ({why})" for client, why in found.items()]
    return ", ".join([*named[:SHOWN], *([f"{len(named) - SHOWN} more"] if len(named) > SHOWN else [])])


class Live(Status):
    """A run of this process, in its terminal or notebook. Elsewhere a line when steps and the first round begin, after
    each round, and from time to time."""

    def __init__(self, console: Console, label: str, rounds: int) -> None:
        super().__init__(label, rounds)
        self._shown = Shown(console, self, self.now)
        self._open = ExitStack()

    def __enter__(self) -> Live:
        self._open.enter_context(steps.listening(self.on_step))
        self._shown.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended = True
        self._open.close()
        self._shown.stop(wipe=not self.done)  # nothing is left to see of a run that was done before

    def on_step(self, step: Step) -> None:
        self.steps.add(step)
        if step.active:
            self._shown.say(self.now())

    def begin(self, round: int, clients: Sequence[int]) -> None:
        first = not self._train
        super().begin(round, clients)
        if first:
            self._shown.say(self.now())

    def end(self, line: Line) -> None:
        super().end(line)
        self._shown.say(self.line())


def watch(folder: Path, console: Console) -> None:
    """Follows a run of another process, or all runs of a comparison, by their files: one line per round, until no
    process is at work there any more."""
    if not _folders(folder):
        raise UserError(f'"{folder}" holds neither a run nor a comparison to watch (there is no config.toml)')
    runs: dict[Path, Followed] = {}
    seen = time.monotonic()  # a process at work
    grace = 0.0 if _folders(folder) == [folder] else GRACE
    while True:
        busy = any(record.at_work(path) for path in _folders(folder))
        seen = time.monotonic() if busy else seen
        for path in _folders(folder):
            if (path / "config.toml").exists():
                for line in runs.setdefault(path, Followed(path)).look():
                    write(console, line)
        if time.monotonic() - seen >= grace and not busy:
            break
        time.sleep(POLL)
    stopped = [run for run in runs.values() if not (run.folder / "result.json").exists()]
    where = ", ".join(f"{run.folder.name} after round {run.status.done} of {run.status.rounds}" for run in stopped)
    again = "".join(f"\n  promptfed run --resume --out {run.folder}" for run in stopped)
    write(console, f"stopped: {where}; go on with:{again}" if stopped else f"done: {folder}")


class Followed:
    """The folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.status = folder, Status("", 0)
        self._read = (0, 0)  # time and size of rounds.jsonl when it was read
        self._told = 0  # the last round that was told

    def look(self) -> list[str]:
        """A line for each round that was not told before."""
        file, said = self.folder / "rounds.jsonl", []
        stat = file.stat() if file.exists() else None
        now = (stat.st_mtime_ns, stat.st_size) if stat else (1, 0)
        if now != self._read:
            config = C.make(C.read(self.folder / "config.toml"))
            self._read, self.status = now, Status(self.folder.name, config.rounds)
            for line in record.read_lines(self.folder):
                self.status.end(line)
                if line["round"] > self._told:
                    self._told = line["round"]
                    said.append(self.status.line())
        return said


def _folders(folder: Path) -> list[Path]:
    """The runs of a folder, which is one itself or a comparison's; also such as are only being prepared."""
    marks = ("config.toml", ".lock")
    return sorted({file.parent for mark in marks for place in (mark, f"*/{mark}") for file in folder.glob(place)})
