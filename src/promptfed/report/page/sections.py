"""The sections that charts illustrate: clients, curves, communication, partition; and clients left out of rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import page_charts
from ..gather import ReportData, SeedRun
from ..page_charts import Chart
from ..tasks import Task, tasks
from .images import Figure
from .view import Choice, Table, listed

_LEFT_OUT = 60  # rows of the table of clients that were left out
_PARTITIONS = 6  # charts of partitions
_MEASURES = {"local": "local", "worst": "worst client", "global": "global", "after": "after local", "loss": "loss"}


@dataclass(frozen=True)
class Clients:
    chart: Chart | None
    several_seeds: bool
    absent: list[tuple[str, str]]  # label, clients that the last evaluation did not reach


@dataclass(frozen=True)
class Curves:
    chart: Chart | None
    measures: dict[str, str]  # name -> title of its axis
    choices: list[Choice]
    notes: list[str]


@dataclass(frozen=True)
class Communication:
    chart: Chart | None
    evaluated: bool


@dataclass(frozen=True)
class LeftOut:
    updates: int
    rows: int
    table: Table


@dataclass(frozen=True)
class Partition:
    charts: list[tuple[str, Chart]]  # a heading where there are several
    partitions: int
    sites: bool  # the sites of a consortium hold their own images: nobody has partitioned them
    figures: list[Figure]


def clients(data: ReportData) -> Clients:
    absent = []
    for group in data.groups:
        run = group.first.run
        if names := listed(map(run.name, run.away(run.scored[-1]) if run.scored else ())):
            absent.append((group.label, names))
    return Clients(page_charts.clients(data), _several_seeds(data), absent)


def curves(data: ReportData) -> Curves:
    chart, measures = page_charts.curves(data)
    choices = [Choice(name, _MEASURES[name], name == next(iter(measures))) for name in measures]
    notes = []
    if all(len(entry.run.scored) < 2 for entry in data.entries):
        notes.append("Evaluated once, so accuracies are points, not lines (eval.every sets how often).")
    if _several_seeds(data):
        notes.append("Bands: ± standard deviation over seeds.")
    if any(seen < of for entry in data.entries for seen, of in map(entry.run.covered, entry.run.scored)):
        notes.append("Some rounds are means over fewer clients: not all could be evaluated.")
    if absent := [text for name, text in _MEASURES.items() if name not in measures]:
        notes.append(f"Not recorded: {', '.join(absent)}.")
    return Curves(chart, measures, choices, notes)


def communication(data: ReportData) -> Communication:
    return Communication(page_charts.communication(data), any(entry.numbers for entry in data.entries))


def _several_seeds(data: ReportData) -> bool:
    return any(len(group.entries) > 1 for group in data.groups)


# ---- clients left out of rounds


def left_out(data: ReportData) -> LeftOut:
    several = _several_seeds(data)
    rows: list[tuple[str, ...]] = []
    updates = 0
    for group in data.groups:
        for entry in group.entries:
            rounds: dict[tuple[int, str], list[int]] = {}
            for who in _lost(entry):
                rounds.setdefault((who["client"], str(who["why"])), []).append(who["round"])
                updates += 1
            seed = (str(entry.seed),) if several else ()
            rows += [
                (group.label, *seed, entry.run.name(client), ranges(at), why)
                for (client, why), at in sorted(rounds.items())
            ]
    heads = ("method", *(("seed",) if several else ()), "client", "rounds", "reason")
    return LeftOut(updates, len(rows), Table("Clients left out", heads, rows[:_LEFT_OUT]))


def _lost(entry: SeedRun) -> Iterator[Mapping[str, Any]]:
    if not entry.run.lines:
        yield from entry.numbers.get("left_out", [])
    for line in entry.run.lines:
        yield from ({"round": line["round"], **who} for who in line["left_out"])


def ranges(numbers: Sequence[int]) -> str:
    """3, 5–7"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return listed((f"{a}–{b}" if a != b else str(a) for a, b in runs), 12)


# ---- partitions


def partition(data: ReportData, figures: list[Figure]) -> Partition:
    different: dict[str, Task] = {}
    for task in tasks(data):
        different.setdefault(task.first.first.partition, task)
    charts = [(task, page_charts.samples(task.first, i)) for i, task in enumerate(different.values())][:_PARTITIONS]
    shown = [(task.words if len(different) > 1 else "", chart) for task, chart in charts if chart]
    return Partition(shown, len(different), all(entry.run.consortium for entry in data.entries), figures)
