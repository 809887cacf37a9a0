"""The top of the page: what was run, and what came out in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .. import numbers
from ..gather import Group, ReportData
from ..numbers import Cell
from ..tasks import Task, tasks
from . import privacy
from .html import listed
from .table import percent

_TOLD = 6  # tasks up to which each one has a sentence
_Scores = list[tuple[Group, Cell]]  # the best first


def title(found: ReportData) -> str:
    words = [task.words for task in tasks(found)]
    return words[0] if len(words) == 1 and words[0] else f"{len(found.entries)} runs"


def top(found: ReportData) -> str:
    groups, first = found.groups, found.groups[0]
    named = title(found)
    if len(groups) == 1 and len(first.entries) == 1:
        named = f"{first.label} on {first.first.run.setting}" if first.first.run.setting else first.label
    seeds = sorted({entry.seed for entry in found.entries})
    facts: dict[str, str] = {
        "methods": str(len({_method(found, group) for group in groups})) if len(groups) > 1 else first.label,
        "seeds": f"{len(seeds)} ({listed(seeds)})",
        "rounds": listed(sorted({entry.planned for entry in found.entries})),
        "clients": listed(sorted({group.first.run.clients for group in groups})),
        "dataset": listed(dict.fromkeys(_file(group, "dataset") for group in groups)),
        "partition": listed(
            dict.fromkeys("the sites' own" if g.first.run.consortium else _file(g, "partition") for g in groups)
        ),
        "backbone": listed(dict.fromkeys(_file(group, "backbone") for group in groups)),
    }
    shares = dict.fromkeys(group.first.run.settings.get("fraction") for group in groups)
    facts["clients a round"] = listed(f"{100 * share:g} %" for share in shares if share is not None) or "–"
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<h1>{escape(named)}</h1>{_finding(found)}{privacy.lead(found)}<dl class="facts">{cells}</dl>'


def _file(group: Group, section: str) -> str:
    return Path(str(group.option(section, "name") or "–")).name


def _method(found: ReportData, group: Group) -> str:
    """Its name, without that of its column."""
    return found.places[group.label][0] if group.label in found.places else group.label


def _finding(found: ReportData) -> str:
    """What came out: of each task where they are few, since accuracies of different tasks say nothing together."""
    each = [(task, known) for task in tasks(found) if (known := _scores(task))]
    if not each:
        return '<p class="lead">No round has been evaluated yet.</p>'
    if len(each) == 1:
        return f'<p class="lead">{_best(each[0][1])}</p>'
    if found.places or len(each) > _TOLD:
        return f'<p class="lead">{_counted(found, [known for _, known in each])}</p>'
    items = "".join(f"<li>{escape(task.words)}: {_best(known)}</li>" for task, known in each)
    return (
        f'<p class="lead">{len(each)} tasks, whose accuracies are not to be compared:</p><ul class="lead">{items}</ul>'
    )


def _scores(task: Task) -> _Scores:
    cells = [(group, numbers.cell(group, numbers.COLUMNS[0], "last")) for group in task.groups]
    return sorted(((g, c) for g, c in cells if c.mean is not None), key=lambda one: -(one[1].mean or 0.0))


def _best(known: _Scores) -> str:
    """The best row by local accuracy, and whether seeds or rounds could have decided it."""
    (group, best), rest = known[0], known[1:]
    if not rest:
        few = f" ({escape(best.why)})" if best.why else ""
        return f"Local accuracy of <b>{escape(group.label)}</b>: {percent(best)} %, mean over clients{few}, last round."
    text = f"Highest local accuracy in the last round: <b>{escape(group.label)}</b>, {percent(best)} %"
    second, score = rest[0]
    gap = 100 * ((best.mean or 0.0) - (score.mean or 0.0))
    text += f", {gap:.1f} points above" if gap >= 0.05 else ", level with"
    text += f" <b>{escape(second.label)}</b>."
    if best.std is None or score.std is None:
        text += " With one seed, small differences may be chance."
    elif gap <= 100 * max(best.std, score.std):
        text += " That is within one standard deviation over seeds."
    return text + _caveats(known)


def _caveats(known: _Scores) -> str:
    """What is not alike in rows of one task."""
    text = ""
    rounds = {group.label: numbers.rounds(group, "last") for group, _ in known}
    if len(set(rounds.values())) > 1:
        told = listed(dict.fromkeys(rounds.values()))
        text += f" Rounds differ: the last ones are {escape(told)}."
    if any("clients" in cell.why for _, cell in known):
        text += " Not every mean is over all clients: see the notes below the table."
    return text


def _counted(found: ReportData, each: Sequence[_Scores]) -> str:
    """Who is best how often."""
    what = "columns" if found.places else "tasks"
    if all(len(known) == 1 for known in each):
        return f"{len(each)} {what} with one method each: their accuracies are of different tasks."
    firsts = Counter(_method(found, group) for known in each for group, cell in known if cell.mean == known[0][1].mean)
    told = ", ".join(f"<b>{escape(name)}</b> in {n}" for name, n in firsts.most_common())
    differ = " In some, rounds differ." if any("Rounds differ" in _caveats(known) for known in each) else ""
    return (
        f"Highest local accuracy in the last round, in each of {len(each)} {what}: {told}. Who is level counts.{differ}"
    )
