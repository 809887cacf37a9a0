"""The headline table of the page: a row a method, sortable."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ...runs.tables import count, size
from .. import numbers, style
from ..gather import ReportData
from ..numbers import KINDS, Cell, Column
from ..tasks import Task, tasks
from .html import h2, swatch

_ALIKE = 1e-9  # what means over seeds of the same numbers may differ by


def results(found: ReportData) -> str:
    # Of runs that were evaluated once, the other kinds are the same.
    known = {
        kind
        for entry in found.entries if len(entry.run.scored) != 1
        for stage in entry.numbers.get("metrics", {}).values()
        for kind in stage
    }  # fmt: skip
    options = "".join(
        f'<label><input type="radio" name="rounds" value="{kind}"{" checked" if kind == "last" else ""}'
        f"{'' if kind in known else ' disabled'}>{escape(title)}</label>"
        for kind, title in KINDS.items()
    )
    switch = f'<fieldset class="switch"><legend>Which round is shown</legend>{options}</fieldset>'
    tables = "".join(_table(found, kind) for kind in KINDS if kind == "last" or kind in known)
    bold = "The best of a column is bold" + (", in each setting by itself" if len(tasks(found)) > 1 else "")
    return (
        f'{h2("Results")}<p class="soft">Accuracies in per cent{_over(found)}. {bold}. Sort by a click on its head.</p>'
        f"{_across(found)}{switch}{tables}"
    )


def _across(found: ReportData) -> str:
    """Local accuracy as a paper prints it, where the comparison has columns."""
    groups = {found.places[group.label]: group for group in found.groups if group.label in found.places}
    if not groups:
        return ""
    local = next(c for c in numbers.columns(found) if c.key == "local")
    rows, columns = (list(dict.fromkeys(place[i] for place in groups)) for i in (0, 1))
    cells = {place: numbers.cell(group, local, "last") for place, group in groups.items()}
    best = {
        found.places[group.label]: _best(local, [cells[found.places[g.label]].mean for g in task.groups])
        for task in tasks(found)
        for group in task.groups
        if group.label in found.places
    }
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    notes: dict[str, str] = {}
    lines = "".join(
        f'<tr><th scope="row">{escape(row)}</th>'
        + "".join(
            _cell(local, cells.get((row, column), Cell(None)), best.get((row, column)), notes) for column in columns
        )
        + "</tr>"
        for row in rows
    )
    caption = "Local accuracy of the last round, a method a row"
    legend = "".join(f"<li><sup>{mark}</sup> {escape(text)}</li>" for text, mark in notes.items())
    return (
        f'<h3>{caption}</h3><div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="across"><thead><tr><th scope="col" class="text">Method</th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
        + (f'<div class="notes"><ul>{legend}</ul></div>' if legend else "")
        + "<h3>Everything</h3>"
    )


def _over(found: ReportData) -> str:
    most = max(len(group.entries) for group in found.groups)
    return ", mean ± standard deviation over seeds" if most > 1 else "; one seed, so there is no spread"


def _table(found: ReportData, kind: str) -> str:
    shown = numbers.columns(found)
    each = tasks(found)
    several = len(each) > 1
    looks = style.looks(group.label for group in found.groups)
    grid = {group.label: {c.key: numbers.cell(group, c, kind) for c in shown} for group in found.groups}
    order = [
        (task, group)
        for task in each
        for group in sorted(task.groups, key=lambda group: -(_or(grid[group.label]["local"].mean, -1.0)))
    ]
    best = {
        (task.words, c.key): _best(c, [grid[group.label][c.key].mean for group in task.groups])
        for task in each
        for c in shown
    }
    notes: dict[str, str] = {}

    heads = [_header("label", "Method", "", "ascending", True)]
    if several:
        heads.append(_header("setting", "Setting", "what may be compared", "ascending", True))
    heads += [_header("seeds", "Seeds", "how many"), _header("round", "Round", "which round the numbers are of")]
    heads += [
        _header(c.key, c.title, c.help, "ascending" if c.better < 0 else "descending", now=not several) for c in shown
    ]
    rows = []
    for task, group in order:
        look = looks[group.label]
        label = escape(group.label)
        cells = [
            f'<th scope="row" data-value="{label}">{swatch(look)}{label}</th>',
            *([_setting(task)] if several else []),
            f'<td data-value="{len(group.entries)}">{len(group.entries)}</td>',
        ]
        at = numbers.rounds(group, kind)
        last = "".join(c if c.isdigit() else " " for c in at).split()
        cells.append(f'<td data-value="{last[-1] if last else ""}">{escape(at)}</td>')
        cells += [_cell(c, grid[group.label][c.key], best[task.words, c.key], notes) for c in shown]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"Results of each method, {KINDS[kind]}"
    legend = "".join(f"<li><sup>{mark}</sup> {escape(text)}</li>" for text, mark in notes.items())
    hidden = "" if kind == "last" else " hidden"
    table = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="headline" data-kind="{kind}" aria-label="{caption}"><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return f'<div data-rounds="{kind}"{hidden}>{table}' + (
        f'<div class="notes"><ul>{legend}</ul></div></div>' if legend else "</div>"
    )


def _setting(task: Task) -> str:
    return f'<td class="text setting" data-value="{escape(task.words)}">{escape(task.words)}</td>'


def _header(key: str, title: str, help: str, first: str = "descending", text: bool = False, now: bool = False) -> str:
    """`now`: rows are in the order of the local accuracy, not of tasks."""
    sort = "descending" if key == "local" and now else "none"
    told = f' title="{escape(help)}"' if help else ""
    return (
        f'<th scope="col" data-key="{key}" data-first="{first}" aria-sort="{sort}"{" class=text" if text else ""}>'
        f'<button type="button"{told}>{escape(title)}</button></th>'
    )


def _cell(column: Column, cell: Cell, best: float | None, notes: dict[str, str]) -> str:
    mark = ""
    if cell.why:
        sign = notes.setdefault(cell.why, _letter(len(notes)))
        mark = f"<sup>{sign}</sup>"
    told = f' title="{escape(cell.why)}"' if cell.why else ""
    if cell.mean is None:
        return f'<td class="none" data-value=""{told}>–{mark}</td>'
    top = ' class="best"' if best is not None and cell.mean >= best - _ALIKE else ""
    std = "" if cell.std is None or column.kind != "percent" else f' <span class="std">±{100 * cell.std:.1f}</span>'
    return f'<td{top} data-value="{cell.mean:.8g}"{told}>{_text(column, cell.mean)}{std}{mark}</td>'


def _text(column: Column, value: float) -> str:
    if column.kind == "percent":
        return f"{100 * value:.1f}"
    if column.kind == "bytes":
        return size(value) if value else "0"
    if column.kind == "count":
        return count(value)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _best(column: Column, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < 2 or column.better <= 0 or max(known) - min(known) < _ALIKE:
        return None
    return max(known)


def _letter(number: int) -> str:
    return chr(97 + number) if number < 26 else str(number)


def percent(cell: Cell) -> str:
    wide = "" if cell.std is None else f" ± {100 * cell.std:.1f}"
    return f"{100 * _or(cell.mean, 0.0):.1f}{wide}"


def _or(value: float | None, other: float) -> float:
    return other if value is None else value
