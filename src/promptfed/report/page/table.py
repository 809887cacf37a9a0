"""The results: one sortable row per method, for each choice of round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...runs.cells import count, percent, points, size
from ...runs.protocols import UNSEEN
from ...runs.statistics import Difference, difference, on_unseen
from ...runs.tables import ONE_SEED, ONE_SEED_UNSEEN, WORDS
from .. import numbers
from ..gather import Group, ReportData, Task, tasks
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
    against: str = ""  # the difference to another row, in a column on data that nobody has trained on


@dataclass(frozen=True)
class Line:
    label: str
    setting: str
    seeds: int
    rounds: str
    cells: list[Shown]
    reference: bool = False  # it is neither sorted nor ranked
    models: str = "own"  # one for all clients, or their own
    ceiling: Shown | None = None  # how far it is from the best centralised row; None if there is none anywhere
    difference: Shown | None = None  # to the row that others are compared with; None if there is none


def results(data: ReportData) -> dict[str, Any]:
    # After a single evaluation the other kinds would repeat the last round.
    known = {
        kind
        for entry in data.entries if len(entry.run.scored) != 1
        for stage in entry.numbers.get("metrics", {}).values()
        for kind in stage
    }  # fmt: skip
    tables = {kind: _lines(data, kind) for kind in KINDS if kind == "last" or kind in known}
    ranks = {group.main_column for group in data.groups if not group.reference}
    paired = [one for task in tasks(data) for found in _differences(data, task).values() for one in found.items()]
    one_seed = bool(paired) and all(found.seeds == 1 for _, found in paired)
    unseen = any(head for head, _ in paired)
    at = next((i for i, column in enumerate(numbers.columns(data)) if column.protocol == UNSEEN), 0)
    return {
        "columns": numbers.columns(data),
        "notes": data.notes,
        "several_seeds": data.several_seeds,
        "several_tasks": len(tasks(data)) > 1,
        "several_kinds": len(ranks) > 1,
        "sorted": ranks.pop() if len(ranks) == 1 and len(tasks(data)) == 1 else "",
        "against": data.against,
        "words": [WORDS, *([ONE_SEED_UNSEEN if unseen else ONE_SEED] if one_seed else [])] if paired else [],
        "kinds": KINDS,
        "tables": tables,
        # An accuracy as a paper prints it: row and column of the comparison's table -> cell.
        "across": {
            data.places[line.label]: replace(line.cells[at], against="")
            for line in tables["last"]
            if line.label in data.places
        },
        "across_title": "Accuracy on the domain left out of training" if at else "Local accuracy in the last round",
        "places": [data.places[group.label] for group in data.groups if group.label in data.places],
    }


def _lines(data: ReportData, kind: str) -> list[Line]:
    columns, lines = numbers.columns(data), []
    some = any(group.reference and group.reference.centralised for group in data.groups)
    for task in tasks(data):
        cells = {group.label: [numbers.cell(group, column, kind) for column in columns] for group in task.groups}
        pooled = [group for group in task.groups if group.reference and group.reference.centralised]
        ceiling = max((cells[group.label][0].mean or 0.0 for group in pooled), default=None)
        paired = _differences(data, task) if kind == "last" else {}
        best = {main: _best_of(task, columns, cells, main) for main in ("local", "global")}

        def rank(group: Group, cells: dict[str, list[Cell]] = cells) -> tuple[str, float]:
            main = group.main_column
            at = next(i for i, column in enumerate(columns) if column.key == main)
            return main, cells[group.label][at].mean or 0.0

        for group in sorted(task.groups, key=rank, reverse=True):  # personal models first
            own = [None] * len(columns) if group.reference else best[group.main_column]
            found = paired.get(group.label, {})
            shown = [
                _shown(column, cell, best_, found.get(column.protocol) if column.protocol else None)
                for column, cell, best_ in zip(columns, cells[group.label], own, strict=True)
            ]
            lines.append(
                Line(
                    group.label,
                    task.words,
                    len(group.entries),
                    numbers.rounds(group, kind),
                    shown,
                    bool(group.reference),
                    "one" if group.main_column == "global" else "own",
                    _to_ceiling(cells[group.label][0].mean, ceiling) if some else None,
                    _difference(found.get("")) if data.against and kind == "last" else None,
                )
            )
    return lines


def _best_of(task: Task, columns: Sequence[Column], cells: dict[str, list[Cell]], main: str) -> list[float | None]:
    """The best value of each column, of the rows that are ranked by this one."""
    rows = [cells[group.label] for group in task.groups if not group.reference and group.main_column == main]
    return [_best(column, [row[i] for row in rows]) for i, column in enumerate(columns)]


def _differences(data: ReportData, task: Task) -> dict[str, dict[str, Difference]]:
    """Label -> its differences to the row that the others are compared with: in the main column, named "", and in those
    on data that nobody has trained on."""
    base = next((group for group in task.groups if data.row(group) == data.against), None)
    heads = [column.protocol for column in numbers.columns(data) if column.protocol]
    each: dict[str, dict[str, Difference]] = {}
    for group in task.groups:
        if base and group is not base:
            found = {"": difference(group.results, base.results)}
            found |= {head: on_unseen(group.results, base.results, head) for head in heads}
            each[group.label] = {key: one for key, one in found.items() if one}
    return each


def _difference(found: Difference | None) -> Shown:
    if found is None:
        return Shown("–", "", kind="none")
    return Shown(points(found.mean), f"{found.mean:.8g}", f"{_interval(found)} ({found.column})")


def _interval(found: Difference) -> str:
    return f"[{points(found.low)}, {points(found.high)}] {found.word}"


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


def _shown(column: Column, cell: Cell, best: float | None, found: Difference | None) -> Shown:
    if cell.mean is None:
        return Shown("–", "", kind="none", why=cell.why)
    kind = "best" if best is not None and cell.mean >= best - _ALIKE else ""
    text, _, spread = _text(column, cell.mean, cell.std).partition(" ±")
    against = f"{points(found.mean)} {_interval(found)}" if found else ""
    return Shown(text, f"{cell.mean:.8g}", spread and f"±{spread}", kind, cell.why, against)


def _text(column: Column, value: float, std: float | None) -> str:
    if column.kind == "percent":
        return percent({"mean": value, "std": std})
    if column.kind == "bytes":
        return size(value)
    if column.kind == "count":
        return count(value)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
