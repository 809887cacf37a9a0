"""The charts of a report, as Vega-Lite specifications with little data. Each function returns None where it has none.

Two parameters are set by the page: `shown`, the labels that are switched on, and in the curves `measure`.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from . import style
from .gather import Group, ReportData
from .numbers import MEASURES, over_seeds, series, thin
from .tasks import tasks

Spec = dict[str, Any]

_POINTS = 1600  # in a chart of curves, all labels together
_CLIENTS = 2400  # dots in the chart of clients, all labels together
_SHARES = "train", "test"  # what is told of a client
_LETTERS = 16, 32  # in a line of a label, on a phone and on a screen
_SITES = 400  # bars in a chart of a partition
_SHAPES = {  # of a matplotlib marker: a name or an SVG path
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle-up",
    "v": "triangle-down",
    "P": "cross",
    "X": "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z",
    "p": "M0,-1L0.95,-0.31L0.59,0.81L-0.59,0.81L-0.95,-0.31Z",
    "<": "triangle-left",
    ">": "triangle-right",
    "h": "M0,-1L0.87,-0.5L0.87,0.5L0,1L-0.87,0.5L-0.87,-0.5Z",
}

# What a colour of the palette becomes on a dark ground, where the darkest could not be seen.
DARK = {
    "#0072B2": "#4CA6DD",
    "#D55E00": "#F0803C",
    "#009E73": "#2DBE93",
    "#CC79A7": "#DD97BE",
    "#E69F00": "#EDB03A",
    "#56B4E9": "#9AD4F5",
    "#4D4D4D": "#B8B8B8",
    "#882255": "#D0608F",
    "#999933": "#BDBD57",
    "#332288": "#9488E8",
}


@dataclass(frozen=True)
class Chart:
    name: str
    alt: str  # what it shows, for who cannot see it
    spec: Spec


def curves(found: ReportData) -> tuple[Chart | None, dict[str, str]]:
    """A measure over rounds; and the measures that are known of some run, by name."""
    names = list(MEASURES)
    tables = {
        group.label: [over_seeds(series(entry, measure) for entry in group.entries) for measure in names]
        for group in found.groups
    }
    known = {name: MEASURES[name][0] for i, name in enumerate(names) if any(table[i] for table in tables.values())}
    most = max(12, _POINTS // max(1, len(tables)))
    rows = []
    for label, table in tables.items():
        scored = thin(sorted({at for one in table[:-1] for at in one}), most)
        trained = thin([at for at in table[-1] if at not in scored], max(0, most - len(scored)))
        for at in sorted({*scored, *trained}):
            values = [_number(one[at][0]) if at in one else None for one in table]
            row: Spec = {"label": label, "round": at, "v": values}
            if any(one[at][1] for one in table if at in one):
                row["s"] = [_number(one[at][1]) if at in one else None for one in table]
            rows.append(row)
    if not rows:
        return None, {}
    if "loss" in known and all(len(entry.run.scored) < 2 < len(entry.run.lines) for entry in found.entries):
        known = {"loss": known.pop("loss"), **known}  # nothing but the loss makes a line
    first = names.index(next(iter(known)))
    base = (
        _data(rows)
        .transform_filter(_SHOWN)
        .transform_calculate(value="datum.v[measure]", spread="datum.s ? datum.s[measure] : 0")
        .transform_filter("isValid(datum.value)")
        .transform_calculate(
            low="datum.value - datum.spread",
            high="datum.value + datum.spread",
            text="format(datum.value, '.4~g') + (datum.spread ? ' ± ' + format(datum.spread, '.2~g') : '')",
        )
    )
    last = max(row["round"] for row in rows)
    ticks = alt.Axis(format="d", values=list(range(1, last + 1))) if last <= 12 else alt.Axis(format="d")
    x = alt.X("round:Q", title="communication round", axis=ticks, scale=alt.Scale(zero=False, nice=False, padding=8))
    y = alt.Y("value:Q", title=None, scale=_NEAR)
    band = base.mark_area(opacity=0.15).encode(
        x, alt.Y("low:Q", title=None, scale=_NEAR), y2="high:Q", color=_colour(found)
    )
    line = base.mark_line(strokeWidth=2, clip=False).encode(x, y, color=_colour(found), strokeDash=_dash(found))
    points = _points(base, x, y, found, ["round:Q"], len(rows) > 30 * len(tables))
    layers = [band] if any("s" in row for row in rows) else []
    spec = _spec(alt.layer(*layers, line, points), found, 340)
    spec["params"].append({"name": "measure", "value": first})
    return Chart("curves", "Line chart: " + "; ".join(known.values()) + ", over communication rounds.", spec), known


def communication(found: ReportData) -> Chart | None:
    """Local accuracy over what a client has exchanged so far; who exchanges nothing is a level."""
    rows, levels, totals = [], [], []
    most = max(12, _POINTS // 2 // max(1, len(found.groups)))
    for group in found.groups:
        table = over_seeds(series(entry, "local") for entry in group.entries)
        sent = [entry.run.sent() for entry in group.entries]
        if not table:
            continue
        cost = {at: float(np.mean([one[at] for one in sent if at in one])) for at in table}
        last = max(table)
        if cost[last] == 0:
            levels.append(_point(group.label, last, 0.0, table[last]))
        else:
            rows += [_point(group.label, at, cost[at], table[at]) for at in thin(list(table), most)]
            totals.append(cost[last])
    if not totals:
        return None
    base = _data(rows).transform_filter(_SHOWN)
    wide = max(totals) > 30 * min(totals)
    scale = alt.Scale(type="log", nice=False, padding=12) if wide else alt.Scale(zero=True, nice=True)
    axis = alt.Axis(format="~g", tickCount=5) if wide else alt.Axis(tickCount=6)
    x = alt.X("mb:Q", title="MB per client so far, up and down", scale=scale, axis=axis)
    y = alt.Y("value:Q", title=None, scale=_NEAR)
    line = base.mark_line(strokeWidth=2).encode(x, y, color=_colour(found), strokeDash=_dash(found))
    points = _points(base, x, y, found, ["round:Q", alt.Tooltip("mb:Q", title="MB", format=".4~g")], False)
    layers: list[alt.Chart] = [line, points]
    if levels:
        level = (
            _data(levels)
            .transform_filter(_SHOWN)
            .mark_rule(strokeDash=[2, 4], strokeWidth=2)
            .encode(
                y,
                color=_colour(found),
                tooltip=[alt.Tooltip("label:N", title="exchanges nothing"), alt.Tooltip("text:N", title="local")],
            )
        )
        layers.insert(0, level)
    about = "Line chart: local accuracy in per cent over the megabytes that a client has exchanged with the server."
    return Chart("communication", about, _spec(alt.layer(*layers), found, 340))


def clients(found: ReportData) -> Chart | None:
    """Every client's accuracy in the last evaluated round, a row a label, best mean first, on a bar to the mean."""
    rows, bars, means = [], [], {}
    most = max(20, _CLIENTS // max(1, len(found.groups)))
    for group in found.groups:
        each = client_scores(group)
        if not each:
            continue
        mean = float(np.mean(list(each.values())))
        means[group.label] = mean
        bars.append({"label": group.label, "mean": _number(mean)})
        order = sorted(each, key=lambda client: (each[client], client))
        shares = group.first.run.shares
        some = thin(order, most)
        row: Spec = {"label": group.label, "client": [group.first.run.name(client) for client in some]}
        row["value"] = [_number(each[client]) for client in some]
        if max(some) < len(shares):
            row |= {part: [getattr(shares[client], part) for client in some] for part in _SHARES}
        rows.append(row)
    if not rows:
        return None
    order_ = [
        label
        for task in tasks(found)
        for label in sorted((g.label for g in task.groups if g.label in means), key=lambda label: -means[label])
    ]
    names, lines = _wrapped(order_)
    y = alt.Y("label:N", title=None, sort=order_, axis=alt.Axis(ticks=False, domain=False, labelExpr=names))
    bar = (
        _data(bars)
        .transform_filter(_SHOWN)
        .mark_bar(opacity=0.22, height=alt.RelativeBandSize(0.7))
        .encode(alt.X("mean:Q"), y, color=_colour(found), tooltip=["label:N", alt.Tooltip("mean:Q", format=".1f")])
    )
    tick = bar.mark_tick(thickness=3, height=20).encode(opacity=alt.value(1))
    tips = ["label:N", "client:N", alt.Tooltip("value:Q", title="accuracy (%)", format=".1f")]
    held = [part for part in _SHARES if all(part in row for row in rows)]
    tips += [f"{part}:Q" for part in held]
    over = alt.selection_point(name="over", fields=["client"], on="pointerover", clear="pointerout", empty=False)
    dot = (
        _data(rows)
        .transform_filter(_SHOWN)
        .transform_flatten(["client", "value", *held])
        .mark_circle()
        .encode(
            alt.X("value:Q", title="local accuracy (%)", scale=alt.Scale(domain=[0, 100])),
            y,
            color=_colour(found),
            size=alt.condition(over, alt.value(170), alt.value(60)),
            opacity=alt.condition(over, alt.value(1), alt.value(0.6)),
            tooltip=tips,
        )
        .add_params(over)
    )
    best, worst = (choose(means, key=lambda label: means[label]) for choose in (max, min))
    about = f"Dot plot: accuracy of each client, by method; highest mean “{best}”, lowest “{worst}”."
    return Chart("clients", about, _spec(alt.layer(bar, tick, dot), found, max(32, 14 * lines + 6) * len(bars)))


def _wrapped(labels: Sequence[str]) -> tuple[str, int]:
    """An expression that breaks labels into lines which a phone or a screen has room for, and how many lines one has at
    most: cut off, two of them might look alike."""
    narrow, wide = (f"'(.{{1,{width}}})( +|$)|(.{{{width}}})'" for width in _LETTERS)
    pattern = f"regexp(containerSize()[0] < 500 ? {narrow} : {wide}, 'g')"
    lines = f"split(replace(replace(datum.value, {pattern}, '$1$3\\n'), regexp('\\n$'), ''), '\\n')"
    return lines, max(len(textwrap.wrap(label, _LETTERS[0])) for label in labels)


def client_scores(group: Group) -> dict[int, float]:
    """Client -> accuracy in per cent, mean over seeds that share a partition; the last evaluated round."""
    each: dict[int, list[float]] = {}
    for entry in group.entries:
        if entry.partition != group.first.partition:
            continue
        if entry.run.scored:
            scores = entry.run.accuracies(entry.run.scored[-1])
        else:
            stored = entry.numbers.get("clients", {}).get("aggregated", [])
            scores = {row["client"]: 100 * row["accuracy"] for row in stored if row["accuracy"] is not None}
        for client, value in scores.items():
            each.setdefault(client, []).append(value)
    return {client: float(np.mean(values)) for client, values in each.items()}


def samples(group: Group, number: int) -> Chart | None:
    """How many samples each client has, by what they are used for."""
    shares = group.first.run.shares
    if not shares:
        return None
    some = thin(range(len(shares)), _SITES)
    rows = [
        {"at": at, "client": shares[i].name, "part": part, "n": getattr(shares[i], part), "turn": turn}
        for at, i in enumerate(some)
        for turn, part in enumerate(style.PARTS)
    ]
    few = len(some) <= 40
    names = [shares[i].name for i in some]
    if all(name == f"client-{i}" for i, name in zip(some, names, strict=True)):
        names = [str(i) for i in some]
    axis = alt.Axis(labels=False, ticks=False)
    if few:
        angle = 0 if max(map(len, names)) < 3 else -60
        axis = alt.Axis(labelAngle=angle, ticks=False, labelExpr=f"{json.dumps(names)}[datum.value]", labelLimit=170)
    order = alt.X("at:O", title="client", axis=axis)
    parts = list(style.PARTS)
    chart = (
        _data(rows)
        .mark_bar()
        .encode(
            order,
            alt.Y("n:Q", title="samples"),
            color=alt.Color(
                "part:N",
                title=None,
                sort=parts,
                scale=alt.Scale(domain=parts, range=list(style.PARTS.values())),
                legend=alt.Legend(orient="top"),
            ),
            order=alt.Order("turn:Q"),
            tooltip=["client:N", "part:N", alt.Tooltip("n:Q", title="samples")],
        )
    )
    about = f"Stacked bars: training, validation and test samples of {len(some)} clients."
    return Chart(f"samples-{number}", about, _spec(chart, None, 220))


# ---- what they share

_SHOWN = "indexof(shown, datum.label) >= 0"
_NEAR = alt.Scale(zero=False, nice=True)


def _points(base: alt.Chart, x: alt.X, y: alt.Y, found: ReportData, tips: Sequence[Any], many: bool) -> alt.Chart:
    """A mark on each point; the nearest one to the pointer grows and says what it is."""
    near = alt.selection_point(name="near", nearest=True, on="pointerover", clear="pointerout", empty=False)
    marks: alt.Chart = (
        base.mark_point(filled=True, opacity=1)
        .encode(
            x,
            y,
            color=_colour(found),
            shape=alt.Shape("label:N", legend=None, scale=_scale(found, [_SHAPES[k.marker] for k in _looks(found)])),
            size=alt.condition(near, alt.value(170), alt.value(0 if many else 80)),
            tooltip=["label:N", *tips, alt.Tooltip("text:N", title="value")],
        )
        .add_params(near)
    )
    return marks


def _data(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _looks(found: ReportData) -> list[style.Look]:
    return list(style.looks(group.label for group in found.groups).values())


def _scale(found: ReportData, values: Sequence[Any]) -> alt.Scale:
    return alt.Scale(domain=[group.label for group in found.groups], range=list(values))


def _colour(found: ReportData) -> alt.Color:
    return alt.Color("label:N", legend=None, scale=_scale(found, [look.colour for look in _looks(found)]))


def _dash(found: ReportData) -> alt.StrokeDash:
    dashes = [[1, 0] if look.line == "-" else [6, 4] for look in _looks(found)]
    return alt.StrokeDash("label:N", legend=None, scale=_scale(found, dashes))


def _spec(chart: alt.Chart | alt.LayerChart | alt.FacetChart, found: ReportData | None, height: int) -> Spec:
    sized = chart.properties(
        width="container", height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    )
    spec: Spec = sized.to_dict()
    spec.pop("$schema", None)
    spec.pop("config", None)
    spec.setdefault("params", [])
    if found:
        spec["params"].append({"name": "shown", "value": [group.label for group in found.groups]})
    return spec


def _point(label: str, at: int, cost: float, value: tuple[float, float]) -> Mapping[str, Any]:
    mean, std = value
    text = f"{mean:.1f} ± {std:.1f} %" if std else f"{mean:.1f} %"
    return {"label": label, "round": at, "mb": _number(cost), "value": _number(mean), "text": text}


def _number(value: float) -> float:
    return float(f"{value:.4g}")
