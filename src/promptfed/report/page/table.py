"""The results: one sortable row per method, for each choice of round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runs.tables import count, percent, size
from .. import numbers
from ..gather import ReportData, tasks
from ..numbers import KINDS, Cell, Column

_ALIKE = 1e-9  # rounding error of a mean over seeds


@dataclass(frozen=True)
class Shown:
    """A cell as text."""

    text: str
    value: str  # the column is sorted by it
    spread: str = ""
    kind: str = ""  # best, none
    why: str = ""  # it is missing, or incomplete


@dataclass(frozen=True)
class Line:
    label: str
    setting: str
    seeds: int
    rounds: str
    cells: list[Shown]


def results(data: ReportData) -> dict[str, Any]:
    # After a single evaluation the other kinds would repeat the last round.
    known = {
        kind
        for entry in data.entries if len(entry.run.scored) != 1
        for stage in entry.numbers.get("metrics", {}).values()
        for kind in stage
    }  # fmt: skip
    tables = {kind: _lines(data, kind) for kind in KINDS if kind == "last" or kind in known}
    return {
        "columns": numbers.columns(data),
        "several_seeds": data.several_seeds,
        "several_tasks": len(tasks(data)) > 1,
        "kinds": KINDS,
        "tables": tables,
        # Local accuracy as a paper prints it: row and column of the comparison's table -> cell.
        "local": {data.places[line.label]: line.cells[0] for line in tables["last"] if line.label in data.places},
        "places": [data.places[group.label] for group in data.groups if group.label in data.places],
    }


def _lines(data: ReportData, kind: str) -> list[Line]:
    columns, lines = numbers.columns(data), []
    for task in tasks(data):
        cells = {group.label: [numbers.cell(group, column, kind) for column in columns] for group in task.groups}
        best = [_best(column, [row[i] for row in cells.values()]) for i, column in enumerate(columns)]
        for group in sorted(task.groups, key=lambda group: -(cells[group.label][0].mean or 0.0)):
            shown = [_shown(*one) for one in zip(columns, cells[group.label], best, strict=True)]
            rounds = numbers.rounds(group, kind)
            lines.append(Line(group.label, task.words, len(group.entries), rounds, shown))
    return lines


def _best(column: Column, cells: Sequence[Cell]) -> float | None:
    """None where no value stands out."""
    known = [cell.mean for cell in cells if cell.mean is not None]
    if len(known) < 2 or not column.higher_is_better or max(known) - min(known) < _ALIKE:
        return None
    return max(known)


def _shown(column: Column, cell: Cell, best: float | None) -> Shown:
    if cell.mean is None:
        return Shown("–", "", kind="none", why=cell.why)
    kind = "best" if best is not None and cell.mean >= best - _ALIKE else ""
    text, _, spread = _text(column, cell.mean, cell.std).partition(" ±")
    return Shown(text, f"{cell.mean:.8g}", spread and f"±{spread}", kind, cell.why)


def _text(column: Column, value: float, std: float | None) -> str:
    if column.kind == "percent":
        return percent({"mean": value, "std": std})
    if column.kind == "bytes":
        return size(value)
    if column.kind == "count":
        return count(value)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
