"""How far a run is: what was heard of it so far, and how that reads in a terminal and on one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from threading import RLock
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..clients.base import Notice
from ..server import Line

RECENT = 10  # rounds whose times are expected of those to come
SLOW = 2.0  # times the median of seconds per sample
SHOWN = 3  # clients that are named
_WAIT = 2.0  # seconds after which a client under way is named
_DOING = {"train": "training", "evaluate": "evaluating", "second": "exchanging", "enroll": "enrolling"}


class Slow(NamedTuple):
    client: int
    seconds: float
    times: float  # the median


class Failed(NamedTuple):
    round: int  # the last time
    times: int
    why: str


def slow(took: Sequence[Mapping[str, Any]]) -> list[Slow]:
    """Clients that took more than twice the median of seconds per sample, the slowest first. One with few samples has a
    high rate too, but a client that finishes before half of the others delays none."""
    known = [one for one in took if one["samples"]]
    if len(known) < 3:
        return []
    usual = median(one["seconds"] / one["samples"] for one in known)
    half = median(one["seconds"] for one in known)
    found = [
        Slow(one["client"], one["seconds"], one["seconds"] / one["samples"] / usual)
        for one in known
        if one["seconds"] > half and one["seconds"] / one["samples"] > SLOW * usual
    ]
    return sorted(found, key=lambda one: -one.times)


class Status:
    """A View that knows what to tell of a run. Rounds to come take what the last ones took; evaluations are timed
    apart, as not every round has one, and are only counted until one was timed."""

    def __init__(self, label: str, rounds: int, every: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.label, self.rounds, self.every, self._clock = label, rounds, every, clock
        self.done = 0
        self.ended = False
        self.failed: dict[int, Failed] = {}  # by client, the latest last
        self.slow: list[Slow] = []  # of the last round that had any
        self._slow_round = 0
        self._train: list[float] = []
        self._evaluate: list[float] = []
        self._spent = 0.0
        self._loss: float | None = None
        self._scores = ""
        self._begun: float | None = None  # the round under way
        self._ask, self._asked, self._answered = "", 0, 0
        self._waiting: dict[int, float] = {}  # since when
        self._lock = RLock()  # clients are heard of in threads, and the terminal is drawn in another

    # ---- what is heard

    def begin(self, round: int, clients: Sequence[int], at: float | None = None) -> None:
        with self._lock:
            self.done = round - 1
            self._begun = self._clock() if at is None else at
            self._ask, self._asked, self._answered = "train", len(clients), 0
            self._waiting.clear()

    def on_notice(self, notice: Notice) -> None:
        with self._lock:
            if notice.ask != self._ask or self._answered >= self._asked:
                self._ask, self._asked, self._answered = notice.ask, notice.asked, 0
            if notice.seconds is None:
                self._waiting[notice.client] = self._clock()
                return
            self._waiting.pop(notice.client, None)
            self._answered += 1
            if notice.error:
                self._fails(notice.client, self.done + 1, notice.error)

    def end(self, line: Line) -> None:
        with self._lock:
            self.done, self._begun, self._ask = line["round"], None, ""
            self._waiting.clear()
            seconds = line["seconds"]
            self._spent += seconds["train"] + seconds.get("evaluate", 0.0)
            self._train.append(seconds["train"])
            if "evaluate" in seconds:
                self._evaluate.append(seconds["evaluate"])
            for one in line["left_out"]:
                self._fails(one["client"], self.done, one["why"])
            found = slow(seconds.get("clients", ()))
            if found and len(self._train) > 1:  # the first round includes every client's warm-up
                self.slow, self._slow_round = found, self.done
            self._loss = line["train_loss"]
            local = line["aggregated"]["summary"]["local"] if "aggregated" in line else {"mean": None}
            if local["mean"] is not None:
                self._scores = f"local {local['mean']:.1%}, worst {local['worst']:.1%}"
                self._scores += f" (round {self.done})" if self.every > 1 else ""

    def _fails(self, client: int, round: int, why: str) -> None:
        before = self.failed.pop(client, Failed(0, 0, ""))
        self.failed[client] = Failed(round, before.times + (before.round != round), why)

    # ---- what is told

    def spent(self) -> float:
        return self._spent + (0.0 if self._begun is None else max(0.0, self._clock() - self._begun))

    def left(self) -> str:
        """The time until the end of the run."""
        if self.done >= self.rounds:
            return ""
        if not self._train:
            return "time left: known after a round"
        evaluations = evaluations_between(self.done, self.rounds, self.every)
        train, evaluate = _usual(self._train), _usual(self._evaluate)
        total = (self.rounds - self.done) * train + evaluations * evaluate
        if self._begun is not None:
            due = evaluations_between(self.done, self.done + 1, self.every, self.rounds)
            total -= min(self._clock() - self._begun, train + due * evaluate)
        if self._evaluate or not evaluations:
            return f"{duration(total)} left"
        return f"{duration(total)} + {evaluations} evaluation{'s' * (evaluations > 1)} left"

    def line(self) -> str:
        """All that is to be told at the end of a round, for a log."""
        parts = [f"{self.label}  round {self.done}/{self.rounds}", *self._numbers()]
        parts.append(", ".join(text for text in (f"{duration(self.spent())} spent", self.left()) if text))
        failed = [f"{client} ({one.why})" for client, one in self.failed.items() if one.round == self.done]
        if failed:
            parts.append("failed: " + _some(failed))
        if self.slow and self._slow_round == self.done:
            parts.append("slow: " + _some([f"{s.client} ({s.seconds:.1f} s, {s.times:.1f} x)" for s in self.slow]))
        return "  ".join(parts)

    def __rich__(self) -> RenderableType:
        with self._lock:
            head = Table.grid(padding=(0, 2, 0, 0))
            time_ = ", ".join(text for text in (duration(self.spent()), "" if self.ended else self.left()) if text)
            bar = ProgressBar(self.rounds, self.done, width=24)
            head.add_row(Text(self.label, "bold"), bar, f"{self.done}/{self.rounds} rounds", Text(time_, "cyan"))
            lines = [Text("  " + "  ".join(self._numbers()))] if self._numbers() else []
            if not self.ended:
                lines = [*self._progress(), *lines]
                lines += [Text("  slow    " + text, "yellow") for text in self._slowest()]
            lines += [Text("  failed  " + text, "red") for text in self._failures()]
            for text in lines:
                text.no_wrap, text.overflow = True, "ellipsis"
            return Group(head, *lines)

    def _numbers(self) -> list[str]:
        return [*([] if self._loss is None else [f"loss {self._loss:.3f}"]), *([self._scores] if self._scores else [])]

    def _progress(self) -> list[Text]:
        """The round under way: how many of its clients have answered, and who is waited for the longest."""
        if self._begun is None and not self._ask:
            return []
        if not self._asked:
            return [Text(f"  round {self.done + 1} under way")]
        doing = f"  {_DOING.get(self._ask, self._ask)}: {self._answered} of {self._asked} clients"
        if self._waiting:
            client, since = min(self._waiting.items(), key=lambda item: item[1])
            if self._clock() - since >= _WAIT:
                doing += f", waiting for client {client} for {duration(self._clock() - since)}"
        return [Text(doing)]

    def _slowest(self) -> list[str]:
        named = [
            f"client {s.client} in round {self._slow_round}: {s.seconds:.1f} s, {s.times:.1f} x the median per sample"
            for s in self.slow[:SHOWN]
        ]
        return [*named, *([f"and {len(self.slow) - SHOWN} more"] if len(self.slow) > SHOWN else [])]

    def _failures(self) -> list[str]:
        named = []
        for client, one in list(reversed(self.failed.items()))[:SHOWN]:
            often = f" and {one.times - 1} before" if one.times > 1 else ""
            named.append(f"client {client} in round {one.round}{often}: {one.why}")
        return [*named, *([f"and {len(self.failed) - SHOWN} more"] if len(self.failed) > SHOWN else [])]


def evaluations_between(done: int, until: int, every: int, rounds: int | None = None) -> int:
    """Evaluations after round `done` and up to `until`: in every so many rounds, and in the last of all."""
    last = until if rounds is None else rounds
    extra = done < last <= until and last % every != 0
    return until // every - done // every + extra


def _usual(seconds: Sequence[float]) -> float:
    """What the last ones took. The first one, which also computes what is frozen, only where there is no other."""
    recent = (seconds[1:] or seconds)[-RECENT:]
    return fmean(recent) if recent else 0.0


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:SHOWN], *([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else [])])


def duration(seconds: float) -> str:
    """75 -> 1:15"""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
