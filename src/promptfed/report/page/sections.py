"""What the templates of the sections show, apart from the table of results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from ...privacy import sentence
from .. import charts, run_charts, style
from ..gather import Group, ReportData, SeedRun, tasks
from ..numbers import MEASURES, listed
from .images import Figure

View = dict[str, Any]

_ROWS = 60  # of the tables of clients that were left out, and of their epsilon
_PARTITIONS = 6  # charts of partitions


# ---- charts


def clients(data: ReportData) -> View:
    absent = {}
    for group in data.groups:
        run = group.first.run
        if names := listed(map(run.name, run.away(run.scored[-1]) if run.scored else ())):
            absent[group.label] = names
    chart = _embedded("clients", "Dot plot: accuracy of each client, by method.", charts.accuracies(data))
    return {"chart": chart, "several_seeds": data.several_seeds, "absent": absent}


def curves(data: ReportData) -> View:
    chart, names = charts.curves(data)
    measures = {name: MEASURES[name] for name in names}
    notes = []
    if all(len(entry.run.scored) < 2 for entry in data.entries):
        notes.append("Evaluated once, so accuracies are points, not lines (eval.every sets how often).")
    if data.several_seeds:
        notes.append("Bands: ± standard deviation over seeds.")
    if any(seen < of for entry in data.entries for seen, of in map(entry.run.covered, entry.run.scored)):
        notes.append("Some rounds are means over fewer clients: not all could be evaluated.")
    if absent := [measure.word for name, measure in MEASURES.items() if name not in measures]:
        notes.append(f"Not recorded: {', '.join(absent)}.")
    about = f"Line chart: {'; '.join(one.title for one in measures.values())}, over communication rounds."
    shown, choices = _embedded("curves", about, chart, 340), {name: one.word for name, one in measures.items()}
    return {"chart": shown, "measures": measures, "choices": choices, "notes": notes}


def communication(data: ReportData) -> View:
    about = "Line chart: local accuracy in per cent over the megabytes that a client has exchanged with the server."
    chart = _embedded("communication", about, charts.communication(data), 340)
    return {"chart": chart, "evaluated": any(entry.numbers for entry in data.entries)}


def partition(data: ReportData, figures: Sequence[Figure]) -> View:
    """A chart of each different partition. The sites of a consortium hold their own images: nobody has partitioned
    them."""
    different = {task.first.partition: task for task in reversed(tasks(data))}
    each = list(reversed(different.values()))[:_PARTITIONS]
    about = "Stacked bars: training, validation and test samples of each client."
    shown = [
        (task.words if len(different) > 1 else "", chart)
        for i, task in enumerate(each)
        if (chart := _embedded(f"samples-{i}", about, run_charts.samples(task.first.run.shares), 220))
    ]
    sites = all(entry.run.consortium for entry in data.entries)
    return {"charts": shown, "partitions": len(different), "sites": sites, "figures": figures}


def _embedded(name: str, about: str, chart: style.Chart | None, height: int | None = None) -> View | None:
    """A chart as wide as the page and with its legend; `about`: for readers who cannot see it."""
    if chart is None:
        return None
    size = {"height": height} if height else {}
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    spec = chart.properties(width="container", autosize=fit, **size).to_dict()
    legend = {**style.THEME["legend"], "disable": True}  # of labels: the page has one for all charts
    padding = {"left": 0, "right": 4, "top": 4, "bottom": 6}
    spec["config"] = {**style.THEME, "background": None, "padding": padding, "legend": legend}
    return {"name": name, "alt": about, "spec": spec}


# ---- clients left out of rounds


def left_out(data: ReportData) -> View:
    rounds: dict[tuple[str, int, str, str], list[int]] = {}
    for group in data.groups:
        for entry in group.entries:
            for who in _lost(entry):
                key = (group.label, entry.seed, entry.run.name(who["client"]), str(who["why"]))
                rounds.setdefault(key, []).append(who["round"])
    rows = [(label, seed, client, ranges(at), why) for (label, seed, client, why), at in rounds.items()]
    return {"updates": sum(map(len, rounds.values())), "rows": rows, "most": _ROWS}


def _lost(entry: SeedRun) -> list[Mapping[str, Any]]:
    if entry.numbers:
        return list(entry.numbers.get("left_out", []))
    return [{"round": line["round"], **who} for line in entry.run.lines for who in line["left_out"]]


def ranges(numbers: Sequence[int]) -> str:
    """3, 5–7"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return listed((f"{a}–{b}" if a != b else str(a) for a, b in runs), 12)


# ---- privacy


def privacy(data: ReportData) -> View | None:
    """None where no run has privacy."""
    methods = {group.label: _privacy(group) for group in data.groups}
    if not any(methods.values()):
        return None
    methods = {label: words or "no privacy: privacy.clip is 0" for label, words in methods.items()}
    differ = len(set(methods.values())) > 1
    stated = [one for group in data.groups for one in _stated(group)]
    facts = {
        name: "; ".join(dict.fromkeys(str(one[key]) for one in stated))
        for name, key in (("Protected", "unit"), ("Covered", "covers"), ("Noise", "randomness"))
    }
    return {
        "lead": "differs between methods" if differ else next(iter(methods.values())),
        "methods": methods if differ else {},
        "clients": {group.label: rows for group in data.groups if (rows := _epsilons(group))},
        "most": _ROWS,
        "facts": facts if stated else {},
        "gaps": list(dict.fromkeys(str(gap) for one in stated for gap in one["not_covered"])),
    }


def _stated(group: Group) -> list[Mapping[str, Any]]:
    """By each seed, the one that reveals most first; without noise, epsilon is None and means infinite."""
    stated = [entry.numbers["privacy"] for entry in group.entries if entry.numbers.get("privacy")]
    return sorted(stated, key=lambda one: -float("inf") if one["epsilon"] is None else -one["epsilon"])


def _privacy(group: Group) -> str:
    for stated in _stated(group):
        return sentence(stated).removeprefix("privacy: ")
    return "epsilon is stated when the run is finished" if group.option("privacy", "clip") else ""


def _epsilons(group: Group) -> list[tuple[str, int, str]]:
    """Client, updates, epsilon; empty where all clients have sent the same number of updates."""
    each: Mapping[str, Any] = next((stated["per_client"] for stated in _stated(group)), {})
    if len({one["answers"] for one in each.values()}) < 2:
        return []
    return [
        (group.first.run.name(int(client)), one["answers"], "∞" if one["epsilon"] is None else f"{one['epsilon']:.3g}")
        for client, one in each.items()
    ]


# ---- how to reproduce the runs


def reproduce(data: ReportData, out: Path) -> View:
    deployed = [bool(entry.run.consortium) for entry in data.entries]
    command = shlex.join(["promptfed", "report", *map(str, data.folders), "--out", str(out)])
    recipes = [_recipe(group) for group in data.groups]
    return {"command": command, "simulated": not all(deployed), "deployed": any(deployed), "recipes": recipes}


def _recipe(group: Group) -> View:
    file = group.first.run.folder / "config.toml"
    return {
        "label": group.label,
        "commands": [shlex.join(_command(group, entry)) for entry in group.entries],
        "facts": _facts(group),
        "file": f"{file.parent.name}.toml",
        "config": file.read_text() if file.exists() else "config.toml is not in the folder",
    }


def _command(group: Group, entry: SeedRun) -> list[str]:
    folder = entry.run.folder
    if entry.run.consortium:  # a new name: the old one would resume its run
        return ["promptfed", "flower", "submit", str(folder.parent.parent), "--name", f"{folder.name}-again"]
    seed = [] if entry is group.first else [f"seed={entry.seed}"]
    return ["promptfed", "run", f"{group.first.run.folder.name}.toml", *seed, "--out", folder.name]


def _facts(group: Group) -> dict[str, str]:
    first = group.first
    data = first.numbers.get("dataset") or first.about.get("dataset") or {}
    images = sum(one.train + one.val + one.test for one in first.run.shares) if first.run.consortium else 0
    missing = "none: each site has its own images" if first.run.consortium else "not recorded"
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in entry.numbers.get("versions", {}).items())
        for entry in group.entries
    )
    return {
        "folder": ", ".join(str(entry.run.folder) for entry in group.entries),
        "seed": listed(entry.seed for entry in group.entries),
        "rounds": f"{first.done} of {first.planned}",
        "dataset": f"{data.get('name', '–')}, {images or data.get('images') or data.get('n', '–')} images",
        "dataset fingerprint": str(data.get("fingerprint") or missing),
        "partition (sha256)": str(first.about.get("hash") or missing),
        "versions": "; ".join(one or "not recorded: they are written when a run is finished" for one in versions),
    }
