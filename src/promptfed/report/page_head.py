"""The top of the page: what was run, and what came out in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from . import page_data
from .page_data import Cell, Found, Group
from .page_html import listed
from .page_table import percent


def title(found: Found) -> str:
    settings = found.settings
    return settings[0] if len(settings) == 1 and settings[0] else f"{len(found.entries)} runs"


def top(found: Found) -> str:
    groups, first = found.groups, found.groups[0]
    named = title(found)
    if len(groups) == 1 and len(groups[0].entries) == 1:
        named = f"{first.label} on {named}" if found.settings[0] else first.label
    seeds = sorted({entry.seed for entry in found.entries})
    facts: dict[str, str] = {
        "methods": str(len({_method(found, group) for group in groups})) if len(groups) > 1 else first.label,
        "seeds": f"{len(seeds)} ({listed(seeds)})",
        "rounds": listed(sorted({entry.planned for entry in found.entries})),
        "clients": listed(sorted({group.first.run.clients for group in groups})),
    }
    for name, section, key in (
        ("dataset", "dataset", "name"),
        ("partition", "partition", "name"),
        ("backbone", "backbone", "name"),
    ):
        facts[name] = listed(dict.fromkeys(Path(str(group.option(section, key) or "–")).name for group in groups))
    shares = dict.fromkeys(group.first.run.settings.get("fraction") for group in groups)
    facts["clients a round"] = listed(f"{100 * share:g} %" for share in shares if share is not None) or "–"
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<h1>{escape(named)}</h1><p class="lead">{_finding(found)}</p><dl class="facts">{cells}</dl>'


def _method(found: Found, group: Group) -> str:
    """Its name, without that of its column."""
    return found.places[group.label][0] if group.label in found.places else group.label


def _finding(found: Found) -> str:
    """The best row by local accuracy, and whether seeds could have decided it."""
    scores = [(group, page_data.cell(group, page_data.COLUMNS[0], "last")) for group in found.groups]
    known = sorted(((g, c) for g, c in scores if c.mean is not None), key=lambda one: -(one[1].mean or 0.0))
    if not known:
        return "No round has been evaluated yet."
    if found.places or len(found.settings) > 1:
        return _apart(found, known)
    (group, best), rest = known[0], known[1:]
    told = f"{percent(best)} %"
    if not rest:
        return f"Local accuracy {told}, mean over clients, last round."
    text = f"Highest local accuracy in the last round: <b>{escape(group.label)}</b>, {told}"
    second, score = rest[0]
    gap = 100 * ((best.mean or 0.0) - (score.mean or 0.0))
    text += f", {gap:.1f} points above" if gap >= 0.05 else ", level with"
    text += f" {escape(second.label)}."
    if best.std is None or score.std is None:
        return text + " With one seed, small differences may be chance."
    if gap <= 100 * max(best.std, score.std):
        return text + " That is within one standard deviation over seeds."
    return text


def _apart(found: Found, known: Sequence[tuple[Group, Cell]]) -> str:
    """Who is best how often, where accuracies are not of the same task. `known`: the best first."""
    tasks: dict[str, list[tuple[Group, Cell]]] = {}
    for group, cell in known:
        tasks.setdefault(found.places.get(group.label, ("", group.setting))[1], []).append((group, cell))
    what = "columns" if found.places else "settings"
    if all(len(each) == 1 for each in tasks.values()):
        return f"{len(tasks)} {what} with one method each: their accuracies are of different tasks."
    firsts = Counter(
        _method(found, group) for each in tasks.values() for group, cell in each if cell.mean == each[0][1].mean
    )
    told = ", ".join(f"<b>{escape(name)}</b> in {n}" for name, n in firsts.most_common())
    return f"Highest local accuracy in the last round, in each of {len(tasks)} {what}: {told}. Who is level counts."
