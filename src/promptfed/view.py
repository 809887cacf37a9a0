"""What a person sees in the terminal while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .comparison import HEADERS, cells, size
from .server import Line


class Live:
    """A bar with the latest numbers on a terminal; a line a round elsewhere."""

    def __init__(self, console: Console, label: str, rounds: int) -> None:
        self._console, self._label, self._rounds = console, label, rounds
        self._bar: Progress | None = None
        self._accuracy = ""
        self._begun = time.perf_counter()

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._label, total=self._rounds, numbers="")
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, round: int, clients: Sequence[int]) -> None:
        if self._bar and round > 1 and not self._bar.tasks[0].completed:  # resumed
            self._bar.update(self._task, completed=round - 1)

    def end(self, line: Line) -> None:
        if "aggregated" in line:
            summary = line["aggregated"]["summary"]
            if summary["local"]["mean"] is not None:
                self._accuracy = f"local {summary['local']['mean']:.1%} worst {summary['local']['worst']:.1%}"
        loss = "" if line["train_loss"] is None else f"loss {line['train_loss']:.3f} "
        lost = f" left out {len(line['left_out'])}" if line["left_out"] else ""
        numbers = f"{loss}{self._accuracy}{lost}"
        if self._bar:
            self._bar.update(self._task, completed=line["round"], numbers=numbers)
        else:
            spent = time.perf_counter() - self._begun
            self._console.print(f"{self._label}  round {line['round']}/{self._rounds}  {numbers}  {spent:.0f} s")


def comparison(rows: Sequence[dict[str, Any]]) -> Table:
    """Columns that say the same of every method are left out, so that the table fits a narrow terminal."""
    lines = [cells(row) for row in rows]
    alike = {"seeds": {"1"}, "adapt": {"0"}, "common": {"-"}, "newcomers": {"-"}}
    told = [i for i, header in enumerate(HEADERS) if {line[i] for line in lines} - alike.get(header, set())]
    title = "accuracy in %, of the last round; local: mean over clients"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column(HEADERS[0], min_width=min(14, max(len(line[0]) for line in lines)), overflow="fold")
    for i in told[1:]:
        table.add_column(HEADERS[i], justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[i] for i in told))
    return table


def outcome(numbers: dict[str, Any]) -> Table:
    """The numbers of one run."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    table = Table(
        title=f"{numbers['method']}, seed {numbers['seed']}, {numbers['rounds']} rounds", title_justify="left"
    )
    for header in ("", "round", "local", "std", "worst", "global", "macro F1"):
        table.add_column(header, justify="left" if not header else "right")
    for stage, found in numbers["metrics"].items():
        for name, m in found.items():
            rounds = str(m["round"]) if "round" in m else f"{m['rounds'][0]}-{m['rounds'][-1]}"
            scores = (m["local"]["mean"], m["local"]["std"], m["local"]["worst"], m["global"], m["macro_f1"])
            table.add_row(f"{stage}, {name}".replace("_", " "), rounds, *(percent(value) for value in scores))
    each = numbers["communication"]["per_client_and_round"]
    table.caption = (
        f"a client and round: {size(each['up'])} up, {size(each['down'])} down; "
        f"{numbers['passes']['train']:,} sample passes; "
        f"{numbers['seconds']['train'] + numbers['seconds']['evaluate']:.0f} s"
    )
    return table
