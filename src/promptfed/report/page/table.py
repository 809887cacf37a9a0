"""The results: one sortable row per method, for each choice of round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runs.tables import count, percent, points, size
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
    reference: bool = False  # it is neither sorted nor ranked
    ceiling: Shown | None = None  # how far it is from the best centralised row; None if there is none anywhere


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
        "notes": data.notes,
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
    some = any(group.reference and group.reference.centralised for group in data.groups)
    for task in tasks(data):
        cells = {group.label: [numbers.cell(group, column, kind) for column in columns] for group in task.groups}
        ranked = [cells[group.label] for group in task.groups if not group.reference]
        best = [_best(column, [row[i] for row in ranked]) for i, column in enumerate(columns)]
        pooled = [group for group in task.groups if group.reference and group.reference.centralised]
        ceiling = max((cells[group.label][0].mean or 0.0 for group in pooled), default=None)
        for group in sorted(task.groups, key=lambda group: -(cells[group.label][0].mean or 0.0)):
            own = [None] * len(best) if group.reference else best
            shown = [_shown(*one) for one in zip(columns, cells[group.label], own, strict=True)]
            rounds = numbers.rounds(group, kind)
            to = _to_ceiling(cells[group.label][0].mean, ceiling) if some else None
            lines.append(Line(group.label, task.words, len(group.entries), rounds, shown, bool(group.reference), to))
    return lines


def _to_ceiling(local: float | None, ceiling: float | None) -> Shown:
    if local is None or ceiling is None:
        return Shown("–", "", kind="none")
    return Shown(points(local - ceiling), f"{local - ceiling:.8g}")


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
