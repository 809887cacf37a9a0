"""One HTML file that says what happened: it loads nothing, and is read offline, on a phone, in light and dark."""

from __future__ import annotations

import datetime
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ... import files
from ...errors import UserError
from ...runs import record
from .. import gather, numbers, page_charts, style
from ..gather import ReportData, SeedRun
from ..page_charts import Chart
from ..tasks import Task, tasks
from . import images, privacy
from .head import title, top
from .html import anchor, h2, listed, plain, swatch
from .images import Drawn
from .repeat import repeat
from .table import results

LIMIT = 1_500_000  # bytes of a page
_LEFT_OUT = 60  # rows of the table of clients that were left out
_PARTITIONS = 6  # charts of who holds what
_ROOM = 60_000  # bytes kept free of pictures


def write(folders: Sequence[Path], out: Path) -> Path:
    """The report of these folders of runs and comparisons. What cannot be shown is a warning, and in the report."""
    found = gather.gather(folders)
    text, problems = build(found, out)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write(out, text.encode())
    except OSError as error:
        raise UserError(f'--out = "{out}" cannot be written: {error.strerror}') from None
    return out


def build(found: ReportData, out: Path = Path("report.html")) -> tuple[str, list[str]]:
    """The page, and what is not as it should be."""
    curves, measures = page_charts.curves(found)
    partitions = _partitions(found)
    samples = [page_charts.samples(task.first, i) for i, task in enumerate(partitions[:_PARTITIONS])]
    found_charts = [page_charts.clients(found), curves, page_charts.communication(found), *samples]
    charts = {chart.name: chart for chart in found_charts if chart}
    names = list(numbers.MEASURES)
    data = {
        "labels": [group.label for group in found.groups],
        "dark": page_charts.DARK,
        "measures": [{"name": name, "index": names.index(name), "title": title} for name, title in measures.items()],
        "charts": [{"name": one.name, "alt": one.alt, "spec": one.spec} for one in charts.values()],
    }
    fixed = {
        "title": escape(title(found)),
        "css": _file("templates/page.css"),
        "js": _file("templates/page.js"),
        "bundle": _bundle(),
        "data": _json(data),
    }
    parts = {
        "Results": results(found),
        "Clients": _clients(charts.get("clients"), found),
        "Curves": _curves(curves, measures, found),
        "Communication": _communication(charts.get("communication"), found),
        "Left out": _left_out(found),
        "Privacy": privacy.section(found),
        "Repeat": repeat(found, out),
    }
    spent = sum(len(one.encode()) for one in (*fixed.values(), *parts.values()))
    drawn, unseen = images.embed(images.find(found), LIMIT - spent - _ROOM)
    problems = [*found.problems, *unseen]
    shown = {
        **{key: parts[key] for key in ("Results", "Clients", "Curves", "Communication", "Left out", "Privacy")},
        _who(found): _partition(found, partitions, charts, [one for one in drawn if one.picture.kind == "partition"]),
        "Analyses": _analyses([one for one in drawn if one.picture.kind == "analysis"]),
        "Pictures": _pictures([one for one in drawn if one.picture.kind == "picture"]),
        "Repeat": parts["Repeat"],
    }
    shown = {name: text for name, text in shown.items() if text}
    links = "".join(f'<a href="#{anchor(name)}">{name}</a>' for name in shown)
    head = f'{top(found)}<nav aria-label="Sections">{links}</nav>'
    body = _problems(problems) + "".join(
        f'<section id="{anchor(name)}" aria-labelledby="h-{anchor(name)}">{text}</section>\n'
        for name, text in shown.items()
    )
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    foot = f"<p>Made {made} with promptfed {escape(record.versions()['promptfed'])}. This file loads nothing.</p>"
    return Template(_file("templates/page.html")).substitute(fixed, head=head, body=body, foot=foot), problems


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in problems)
    return f'<section class="problems" role="note"><h2>Not everything is there</h2><ul>{items}</ul></section>'


# ---- charts


def _chart(chart: Chart) -> str:
    return f'<div class="chart" id="chart-{chart.name}" role="group" aria-label="{escape(chart.alt)}"></div>'


def _legend(found: ReportData) -> str:
    if len(found.groups) < 2:
        return ""
    looks = style.looks(group.label for group in found.groups)
    items = "".join(
        f'<li><button type="button" aria-pressed="true" data-label="{escape(label)}">{swatch(look)}{escape(label)}'
        "</button></li>"
        for label, look in looks.items()
    )
    every = '<li><button type="button" data-all>all / none</button></li>'
    return f'<ul class="legend" aria-label="Methods shown in the charts">{items}{every}</ul>'


def _clients(chart: Chart | None, found: ReportData) -> str:
    title = h2("Clients")
    if not chart:
        return f'{title}<p class="soft">No client has been scored on test data of its own yet.</p>'
    many = any(len(group.entries) > 1 for group in found.groups)
    seeds = ", mean over the seeds that share its partition" if many else ""
    text = (
        f"A dot is a client, in the last evaluated round{seeds}; the bar ends at the mean over clients. Pointing at a "
        f"client marks it in every row.{_absent(found)}"
    )
    return f'{title}<p class="soft">{text}</p>{_chart(chart)}'


def _absent(found: ReportData) -> str:
    """Who was not there to be scored."""
    told = []
    for group in found.groups:
        run = group.first.run
        away = run.away(run.scored[-1]) if run.scored else []
        if away:
            names = escape(listed(map(run.name, away)))
            told.append(f" Not evaluated in the last round of <b>{escape(group.label)}</b>: {names}.")
    return "".join(told)


def _curves(chart: Chart | None, measures: Mapping[str, str], found: ReportData) -> str:
    title = h2("Curves", "Learning curves")
    if not chart:
        return f'{title}<p class="soft">No round is on record.</p>'
    short = {"local": "local", "worst": "worst client", "global": "global", "after": "after local", "loss": "loss"}
    first = next(iter(measures))
    options = "".join(
        f'<label><input type="radio" name="measure" value="{name}"{" checked" if name == first else ""}>{short[name]}'
        "</label>"
        for name in measures
    )
    once = all(len(entry.run.scored) < 2 for entry in found.entries)
    absent = [short[name] for name in numbers.MEASURES if name not in measures]
    words = ["Evaluated once, so accuracies are points, not lines (eval.every sets how often)."] if once else []
    if any(len(group.entries) > 1 for group in found.groups):
        words.append("Bands: ± standard deviation over seeds.")
    if any(seen < of for entry in found.entries for seen, of in map(entry.run.covered, entry.run.scored)):
        words.append("Some rounds are means over fewer clients: not all could be evaluated.")
    if absent:
        words.append(f"Not on record: {', '.join(absent)}.")
    text = f'<p class="soft">{" ".join(words)}</p>' if words else ""
    switch = f'<fieldset class="switch"><legend>What is shown</legend>{options}</fieldset>'
    axis = f'<p class="axis" id="measure-title" aria-live="polite">{escape(measures[first])}</p>'
    return f"{title}{text}{switch}{_legend(found)}{axis}{_chart(chart)}"


def _communication(chart: Chart | None, found: ReportData) -> str:
    title = h2("Communication", "Communication against accuracy")
    if not chart:
        known = any(entry.numbers for entry in found.entries)
        why = "No method exchanges anything with a server." if known else "No round has been evaluated yet."
        return f'{title}<p class="soft">{why}</p>'
    text = (
        "Local accuracy over what a client has exchanged with the server, mean over all clients. Who exchanges nothing "
        "is a dotted level. Evaluation traffic is not counted."
    )
    axis = '<p class="axis">Local accuracy, mean over clients (%)</p>'
    return f'{title}<p class="soft">{text}</p>{_legend(found)}{axis}{_chart(chart)}'


# ---- what went wrong


def _left_out(found: ReportData) -> str:
    title = h2("Left out", "Clients left out of a round")
    many = max(len(group.entries) for group in found.groups) > 1
    rows: list[tuple[str, ...]] = []
    turns = 0
    for group in found.groups:
        for entry in group.entries:
            told: dict[tuple[int, str], list[int]] = {}
            for who in _lost(entry):
                told.setdefault((who["client"], str(who["why"])), []).append(who["round"])
            turns += sum(map(len, told.values()))
            for (client, why), at in sorted(told.items()):
                name = entry.run.name(client)
                rows.append((group.label, *([str(entry.seed)] if many else []), name, _ranges(at), why))
    if not rows:
        return f'{title}<p class="soft">Every client that was asked answered with an update that could be used.</p>'
    heads = ("method", *(("seed",) if many else ()), "client", "rounds", "why")
    more = f" The first {_LEFT_OUT} of {len(rows)} rows are shown." if len(rows) > _LEFT_OUT else ""
    text = f"{turns} update{'s' if turns > 1 else ''} could not be used; the round went on without.{more}"
    return f'{title}<p class="soft">{text}</p>{plain(heads, rows[:_LEFT_OUT], "Clients left out")}'


def _lost(entry: SeedRun) -> list[dict[str, Any]]:
    if entry.run.lines:
        return [{"round": line["round"], **who} for line in entry.run.lines for who in line["left_out"]]
    found: list[dict[str, Any]] = entry.numbers.get("left_out", [])
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """3, 5–7"""
    told: list[list[int]] = []
    for number in sorted(numbers):
        if told and number == told[-1][1] + 1:
            told[-1][1] = number
        else:
            told.append([number, number])
    words = [f"{a}–{b}" if a != b else str(a) for a, b in told]
    return ", ".join(words[:12]) + (f" and {len(words) - 12} more" if len(words) > 12 else "")


# ---- pictures


def _partitions(found: ReportData) -> list[Task]:
    """A task of each different partition."""
    return list({task.first.first.partition: task for task in reversed(tasks(found))}.values())[::-1]


def _who(found: ReportData) -> str:
    """Nobody has partitioned what the sites of a consortium hold."""
    return "Sites" if all(entry.run.consortium for entry in found.entries) else "Partition"


def _partition(found: ReportData, held: Sequence[Task], charts: Mapping[str, Chart], drawn: Sequence[Drawn]) -> str:
    sites = _who(found) == "Sites"
    title = h2("Sites", "Sites: how much each one has") if sites else h2("Partition", "Partition: who holds what")
    text = ""
    for i, task in enumerate(held):
        chart = charts.get(f"samples-{i}")
        if chart:
            head = f"<h3>{escape(task.words)}</h3>" if len(held) > 1 else ""
            text += f"{head}{_chart(chart)}"
    if len(held) > _PARTITIONS:
        text += f'<p class="soft">The first {_PARTITIONS} of {len(held)} partitions are drawn.</p>'
    if sites:
        told = "" if text else "How many images a site has is known when the run is done. "
        return f'{title}{text}<p class="soft">{told}Which ones they are is known to the site alone.</p>'
    text = text or '<p class="soft">No partition.json in the folder.</p>'
    if drawn:
        text += "".join(_figure(one) for one in drawn)
    else:
        text += (
            '<p class="soft">There is no heat map of classes: partition.png is drawn at the end of a run or a '
            "comparison, and is not in the folder.</p>"
        )
    return title + text


def _analyses(drawn: Sequence[Drawn]) -> str:
    return h2("Analyses") + "".join(_figure(one) for one in drawn) if drawn else ""


def _pictures(drawn: Sequence[Drawn]) -> str:
    if not drawn:
        return ""
    own = "".join(_figure(one) for one in drawn if not one.picture.of)
    text = f"<details><summary>Pictures of the whole</summary>{own}</details>" if own else ""
    for of in dict.fromkeys(one.picture.of for one in drawn if one.picture.of):
        each = "".join(_figure(one) for one in drawn if one.picture.of == of)
        text += f"<details><summary>{escape(of)}</summary>{each}</details>"
    return f'{h2("Pictures")}<p class="soft">As they are in the folders, made smaller.</p>{text}'


def _figure(one: Drawn) -> str:
    picture = one.picture
    of = f" ({escape(picture.of)})" if picture.of else ""
    note = f" {escape(picture.note)}" if picture.note else ""
    file = f" <code>{escape(picture.path.name)}</code>"
    image = f'<img src="{one.uri}" width="{one.width}" height="{one.height}" alt="{escape(picture.caption)}{of}">'
    table = ""
    if picture.csv:
        rows, number = images.table(picture.csv)
        if rows:
            some = f", the first {len(rows) - 1} of {number} rows" if number > len(rows) - 1 else ""
            body = plain(rows[0], rows[1:], picture.csv.name)
            table = f"<details><summary>{escape(picture.csv.name)}{some}</summary>{body}</details>"
    text = f"<b>{escape(picture.caption)}</b>{of}.{note}{file}"
    return f'<figure><div class="picture" tabindex="0">{image}</div><figcaption>{text}</figcaption>{table}</figure>'


# ---- small things


def _json(value: Any) -> str:
    """JSON that cannot end a script element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@functools.cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed, in the version the charts are written for."""
    import vl_convert

    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return text.replace("</script", "<\\/script")
