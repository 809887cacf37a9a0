"""The top of the page: what was run, and the result in one sentence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ...runs.tables import percent
from .. import numbers
from ..gather import Group, ReportData, Task, tasks
from ..numbers import Cell, listed

_EACH = 6  # up to this many tasks are summarised one by one
_Scores = list[tuple[Group, Cell]]  # best first


def head(data: ReportData) -> dict[str, Any]:
    each = tasks(data)
    scored = [(task.words, scores) for task in each if (scores := _scores(task))]
    one_by_one = len(scored) == 1 or not (data.places or len(scored) > _EACH)
    firsts = Counter(
        _method(data, group) for _, scores in scored for group, cell in scores if cell.mean == scores[0][1].mean
    )
    title = each[0].words if len(each) == 1 and each[0].words else f"{len(data.entries)} runs"
    single = " on ".join(filter(None, (data.groups[0].label, data.groups[0].first.run.setting)))
    return {
        "title": title,
        "heading": single if len(data.entries) == 1 else title,
        "compared": "columns" if data.places else "tasks",
        "count": len(scored),  # tasks that have been evaluated
        "findings": [(words, _finding(scores)) for words, scores in scored] if one_by_one else [],
        # Method -> how many tasks it is best in.
        "wins": firsts.most_common() if any(len(scores) > 1 for _, scores in scored) else [],
        "rounds_differ": any(len(_rounds(scores)) > 1 for _, scores in scored),
        "facts": _facts(data),
    }


def _facts(data: ReportData) -> dict[str, str]:
    groups = data.groups
    seeds = sorted({entry.seed for entry in data.entries})
    shares = dict.fromkeys(group.first.run.settings.get("fraction") for group in groups)
    runs = [group.first.run for group in groups]
    partitions = ("the sites' own" if run.consortium else run.partition or "–" for run in runs)
    return {
        "methods": str(len({_method(data, group) for group in groups})) if len(groups) > 1 else groups[0].label,
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


def _method(data: ReportData, group: Group) -> str:
    """Its name, without that of its column."""
    return data.places[group.label][0] if group.label in data.places else group.label


def _scores(task: Task) -> _Scores:
    cells = [(group, numbers.cell(group, numbers.COLUMNS[0], "last")) for group in task.groups]
    return sorted(((g, c) for g, c in cells if c.mean is not None), key=lambda one: -(one[1].mean or 0.0))


def _finding(scores: _Scores) -> dict[str, Any]:
    """The best row of a task by local accuracy, with a note where seeds or rounds could have decided it."""
    (group, best), *rest = scores
    notes, gap, second = [], "", ""
    if rest:
        second, cell = rest[0][0].label, rest[0][1]
        points = 100 * ((best.mean or 0.0) - (cell.mean or 0.0))
        gap = f"{points:.1f} points above" if points >= 0.05 else "level with"
        if best.std is None or cell.std is None:
            notes.append("With one seed, small differences may be chance.")
        elif points <= 100 * max(best.std, cell.std):
            notes.append("That is within one standard deviation over seeds.")
        if len(at := _rounds(scores)) > 1:
            notes.append(f"Rounds differ: the last ones are {listed(at)}.")
        if any("clients" in cell.why for _, cell in scores):
            notes.append("Not every mean is over all clients: see the notes below the table.")
    score = percent({"mean": best.mean, "std": best.std})
    return {"label": group.label, "score": score, "few": best.why, "gap": gap, "second": second, "notes": notes}


def _rounds(scores: _Scores) -> list[str]:
    return list(dict.fromkeys(numbers.rounds(group, "last") for group, _ in scores))
