"""The results: one sortable row per method, for each choice of round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...runs.tables import count, percent, points, size
from .. import numbers, style
from ..gather import Group, ReportData
from ..numbers import KINDS, Cell, Column
from ..tasks import Task, tasks
from .view import Choice, Notes

_ALIKE = 1e-9  # rounding error of a mean over seeds


@dataclass(frozen=True)
class Heading:
    key: str
    title: str
    help: str = ""
    first: str = "descending"  # order of the first click
    text: bool = False
    sort: str = "none"  # order of the rows now


@dataclass(frozen=True)
class Shown:
    """A cell."""

    text: str
    value: str  # the column is sorted by it
    spread: str = ""
    kind: str = ""  # best, none
    why: str = ""  # it is missing, or incomplete
    mark: str = ""  # of the footnote that says so


@dataclass(frozen=True)
class Line:
    label: str
    cells: list[Shown]
    look: style.Look | None = None
    setting: str = ""


@dataclass(frozen=True)
class Grid:
    caption: str
    heads: list[Heading]
    lines: list[Line]
    notes: dict[str, str]  # text -> mark
    apart: list[Line] = field(default_factory=list)  # references, which are neither sorted nor ranked


@dataclass(frozen=True)
class Results:
    several_seeds: bool
    several_tasks: bool
    across: Grid | None  # local accuracy as a paper prints it: methods x the columns of the comparison
    choices: list[Choice]
    tables: dict[str, Grid]  # by choice


def results(data: ReportData) -> Results:
    # After a single evaluation the other kinds would repeat the last round.
    known = {
        kind
        for entry in data.entries if len(entry.run.scored) != 1
        for stage in entry.numbers.get("metrics", {}).values()
        for kind in stage
    }  # fmt: skip
    return Results(
        several_seeds=any(len(group.entries) > 1 for group in data.groups),
        several_tasks=len(tasks(data)) > 1,
        across=_across(data) if data.places else None,
        choices=[Choice(kind, title, kind == "last", kind not in known) for kind, title in KINDS.items()],
        tables={kind: _headline(data, kind) for kind in KINDS if kind == "last" or kind in known},
    )


def _across(data: ReportData) -> Grid:
    groups = {data.places[group.label]: group for group in data.groups if group.label in data.places}
    local, notes = numbers.COLUMNS[0], Notes()
    cells = {group.label: numbers.cell(group, local, "last") for group in data.groups}
    best = _best_of_tasks(data, local, cells)
    rows, columns = (list(dict.fromkeys(place[i] for place in groups)) for i in (0, 1))

    def shown(group: Group | None) -> Shown:
        return _shown(local, cells[group.label], best[group.label], notes) if group else Shown("–", "", kind="none")

    lines = [Line(row, [shown(groups.get((row, column))) for column in columns]) for row in rows]
    heads = [Heading(column, column) for column in columns]
    return Grid("Local accuracy in the last round", heads, lines, notes.marks)


def _headline(data: ReportData, kind: str) -> Grid:
    columns, notes = numbers.columns(data), Notes()
    each = tasks(data)
    several = len(each) > 1
    looks = style.looks(group.label for group in data.groups)
    cells = {c.key: {group.label: numbers.cell(group, c, kind) for group in data.groups} for c in columns}
    best = {c.key: _best_of_tasks(data, c, cells[c.key]) for c in columns}
    ceilings = {task.words: _ceiling(task, cells["local"]) for task in each}
    lines: dict[bool, list[Line]] = {False: [], True: []}  # by whether it is a reference
    for task in each:
        for group in sorted(task.groups, key=lambda group: -_or(cells["local"][group.label].mean, -1.0)):
            label, at = group.label, numbers.rounds(group, kind)
            last = "".join(c if c.isdigit() else " " for c in at).split()[-1:]
            seeds = str(len(group.entries))
            shown = [_shown(c, cells[c.key][label], best[c.key][label], notes) for c in columns]
            first = [Shown(seeds, seeds), Shown(at, "".join(last))]
            if any(ceilings.values()):
                shown.insert(1, _to_ceiling(cells["local"][label].mean, ceilings[task.words]))
            line = Line(label, [*first, *shown], looks[label], task.words if several else "")
            lines[bool(group.reference)].append(line)
    heads = [Heading("label", "Method", first="ascending", text=True)]
    if several:
        heads.append(Heading("setting", "Setting", "only rows of one setting can be compared", "ascending", True))
    heads += [Heading("seeds", "Seeds", "number of seeds"), Heading("round", "Round", "the round that is shown")]
    for c in columns:
        sort = "descending" if c.key == "local" and not several else "none"  # tasks come first in the order of rows
        heads.append(Heading(c.key, c.title, c.help, "descending" if c.higher_is_better else "ascending", sort=sort))
        if c.key == "local" and any(ceilings.values()):
            heads.append(Heading("ceiling", "To ceiling", "points of local accuracy to the centralised reference"))
    return Grid(f"Results of each method, {KINDS[kind]}", heads, lines[False], notes.marks, lines[True])


def _ceiling(task: Task, local: dict[str, Cell]) -> float | None:
    """The local accuracy of the best centralised row."""
    known = (local[group.label].mean for group in task.groups if group.reference and group.reference.centralised)
    return max((value for value in known if value is not None), default=None)


def _to_ceiling(local: float | None, ceiling: float | None) -> Shown:
    if local is None or ceiling is None:
        return Shown("–", "", kind="none")
    return Shown(points(local - ceiling), f"{local - ceiling:.8g}")


def _best_of_tasks(data: ReportData, column: Column, cells: dict[str, Cell]) -> dict[str, float | None]:
    """Label -> the best value of its task; references are not ranked."""
    found: dict[str, float | None] = {}
    for task in tasks(data):
        best = _best(column, (cells[group.label].mean for group in task.groups if not group.reference))
        found |= {group.label: None if group.reference else best for group in task.groups}
    return found


def _best(column: Column, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < 2 or not column.higher_is_better or max(known) - min(known) < _ALIKE:
        return None
    return max(known)


def _shown(column: Column, cell: Cell, best: float | None, notes: Notes) -> Shown:
    mark = notes.mark(cell.why)
    if cell.mean is None:
        return Shown("–", "", kind="none", why=cell.why, mark=mark)
    kind = "best" if best is not None and cell.mean >= best - _ALIKE else ""
    text, _, spread = _text(column, cell).partition(" ±")
    return Shown(text, f"{cell.mean:.8g}", spread and f"±{spread}", kind, cell.why, mark)


def _text(column: Column, cell: Cell) -> str:
    value = _or(cell.mean, 0.0)
    if column.kind == "percent":
        return percent({"mean": value, "std": cell.std})
    if column.kind == "bytes":
        return size(value) if value else "0"
    if column.kind == "count":
        return count(value)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
