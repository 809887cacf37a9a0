"""The top of the page: what was run, and the result in one sentence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ...runs.cells import percent, points
from ...runs.statistics import Column, difference
from .. import numbers
from ..gather import Group, ReportData, Task, tasks
from ..numbers import Cell, listed

_EACH = 6  # up to this many tasks are summarised one by one
_Scores = list[tuple[Group, Cell]]  # best first
_RANKED = {column.key: column for column in numbers.COLUMNS if column.key in ("local", "global")}


def head(data: ReportData) -> dict[str, Any]:
    each = tasks(data)
    scored = [(task.words, kinds) for task in each if (kinds := _kinds(task))]
    one_by_one = len(scored) == 1 or not (data.places or len(scored) > _EACH)
    title = each[0].words if len(each) == 1 and each[0].words else f"{len(data.entries)} runs"
    single = " on ".join(filter(None, (data.groups[0].label, data.groups[0].first.run.setting)))
    alone = all(len(scores) == 1 for _, kinds in scored for scores in kinds.values())
    return {
        "title": title,
        "heading": single if len(data.entries) == 1 else title,
        "compared": "columns" if data.places else "tasks",
        "count": len(scored),  # tasks that have been evaluated
        # Task -> the best row of each kind.
        "findings": [(words, [_finding(*one) for one in kinds.items()]) for words, kinds in scored]
        if one_by_one
        else [],
        # Accuracy -> method -> in how many tasks it is the best of its kind.
        "wins": {} if alone else {column: _wins(data, column, scored) for column in _RANKED},
        "rounds_differ": any(len(_rounds(scores)) > 1 for _, kinds in scored for scores in kinds.values()),
        "facts": _facts(data),
    }


def _wins(data: ReportData, column: str, scored: list[tuple[str, dict[Column, _Scores]]]) -> list[tuple[str, int]]:
    ranked = [scores for _, kinds in scored for key, scores in kinds.items() if key == column]
    firsts = (group for scores in ranked for group, cell in scores if cell.mean == scores[0][1].mean)
    return Counter(map(data.row, firsts)).most_common()


def _facts(data: ReportData) -> dict[str, str]:
    groups = data.groups
    seeds = sorted({entry.seed for entry in data.entries})
    shares = dict.fromkeys(group.first.run.settings.get("fraction") for group in groups)
    runs = [group.first.run for group in groups]
    partitions = ("the sites' own" if run.consortium else run.partition or "–" for run in runs)
    return {
        "methods": str(len({data.row(group) for group in groups})) if len(groups) > 1 else groups[0].label,
        "seeds": f"{len(seeds)} ({listed(seeds)})",
        "rounds": listed(sorted({entry.planned for entry in data.entries})),
        "clients": listed(sorted({group.first.run.clients for group in groups})),
        "dataset": listed(dict.fromkeys(run.dataset or "–" for run in runs)),
        "partition": listed(dict.fromkeys(partitions)),
        "backbone": listed(dict.fromkeys(_name(group, "backbone") for group in groups)),
        "clients per round": listed(f"{100 * share:g} %" for share in shares if share is not None) or "–",
    }


def _name(group: Group, section: str) -> str:
    return Path(str(group.option(section, "name") or "–")).name


def _kinds(task: Task) -> dict[Column, _Scores]:
    """The rows of a task by the accuracy that they are ranked by; references only where there is nothing else."""
    found: dict[Column, _Scores] = {}
    for group in [group for group in task.groups if not group.reference] or task.groups:
        cell = numbers.cell(group, _RANKED[group.main_column], "last")
        if cell.mean is not None:
            found.setdefault(group.main_column, []).append((group, cell))
    return {column: sorted(scores, key=lambda one: -(one[1].mean or 0.0)) for column, scores in found.items()}


def _finding(column: Column, scores: _Scores) -> dict[str, Any]:
    """The best row of its kind in a task, and whether it can be told apart from the second."""
    (group, best), *rest = scores
    notes, gap, second = [], "", ""
    if rest:
        second, cell = rest[0][0].label, rest[0][1]
        lead = (best.mean or 0.0) - (cell.mean or 0.0)
        gap = f"{100 * lead:.1f} points above" if lead >= 0.0005 else "level with"
        notes.append(_certainty(group, rest[0][0]))
        if len(at := _rounds(scores)) > 1:
            notes.append(f"Rounds differ: the last ones are {listed(at)}.")
        if any("clients" in cell.why for _, cell in scores):
            notes.append("Not every mean is over all clients: see the notes below the table.")
    score = percent({"mean": best.mean, "std": best.std})
    found = {"label": group.label, "score": score, "few": best.why, "gap": gap, "second": second, "notes": notes}
    return {**found, "column": column}


def _certainty(first: Group, second: Group) -> str:
    """What the paired difference of two rows allows to say."""
    found = difference(first.results, second.results)
    if found is None:
        return "There is no interval for this difference: no seed is of both, or there is one client."
    over = "clients, with one seed" if found.seeds == 1 else f"{found.seeds} seeds and the clients"
    interval = f"95 % interval of the difference over {over}: [{points(found.low)}, {points(found.high)}]"
    return f"{interval}; the two cannot be told apart." if found.word.startswith("cannot") else f"{interval}."


def _rounds(scores: _Scores) -> list[str]:
    return list(dict.fromkeys(numbers.rounds(group, "last") for group, _ in scores))
