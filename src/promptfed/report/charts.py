"""The charts of a comparison, as the page shows them and as PNG files. Each function returns None where it has no data.

Two parameters are set by the page: `shown`, the labels that are switched on, and in the curves `measure`.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import altair as alt
import numpy as np

from ..runs.cells import in_percent, spread
from . import style
from .gather import FAMILIES, Group, ReportData, tasks
from .marks import NEAR, Row, by_label, data, rounds
from .numbers import MEASURES, over_seeds, series, thin
from .style import INK, Look

_POINTS = 1600  # in a chart of curves, all labels together
_CLIENTS = 2400  # dots in the chart of clients, all labels together
_LETTERS = 16, 32  # in a line of a label, on a phone and on a screen
_SHOWN = "indexof(shown, datum.label) >= 0"
_RANKED = {
    "own": "own models, ranked by the mean over clients (bar)",
    "one": "one model for all clients, ranked by all clients' test data (diamond)",
    "reference": "references, not ranked",
}


# ---- over rounds, and over what is exchanged


def curves(found: ReportData) -> tuple[style.Chart | None, list[str]]:
    """A measure over rounds; and the names of the measures that are known of some run."""
    names = list(MEASURES)
    tables = {
        group.label: [over_seeds(series(entry.run, measure) for entry in group.entries) for measure in names]
        for group in found.groups
    }
    known = [name for i, name in enumerate(names) if any(table[i] for table in tables.values())]
    most = max(12, _POINTS // max(1, len(tables)))
    rows: list[dict[str, Any]] = []
    for label, table in tables.items():
        scored = thin(sorted({at for one in table[:-1] for at in one}), most)
        trained = thin([at for at in table[-1] if at not in scored], max(0, most - len(scored)))
        for at in sorted({*scored, *trained}):
            values = [_number(one[at][0]) if at in one else None for one in table]
            rows.append({"label": label, "round": at, "v": values})
            if any(one[at][1] for one in table if at in one):
                rows[-1]["s"] = [_number(one[at][1]) if at in one else None for one in table]
    if not rows:
        return None, []
    rows += _levels(rows, {group.label for group in found.groups if group.family == "reference"})
    if "loss" in known and all(len(entry.run.scored) < 2 < len(entry.run.lines) for entry in found.entries):
        known = ["loss", *known[:-1]]  # nothing but the loss makes a line
    first = names.index(known[0])
    base = (
        data(rows)
        .transform_filter(_SHOWN)
        .transform_calculate(value="datum.v[measure]", spread="datum.s ? datum.s[measure] : 0")
        .transform_filter("isValid(datum.value)")
        .transform_calculate(
            low="datum.value - datum.spread",
            high="datum.value + datum.spread",
            text="format(datum.value, '.4~g') + (datum.spread ? ' ± ' + format(datum.spread, '.2~g') : '')",
        )
    )
    ends = {row["label"]: row["v"][first] for row in rows if row["v"][first] is not None}
    looks = _looks(found, ends)
    x = rounds(max(row["round"] for row in rows))
    single = len(rows) == len({row["label"] for row in rows})
    layers = _lines(base, x, looks, ["round:Q"], single, _size(len(rows) / len(tables)))
    shown = alt.param("shown", value=list(looks))
    return alt.layer(*layers).add_params(shown, alt.param("measure", value=first)), known


def _levels(rows: Sequence[Mapping[str, Any]], references: Set[str]) -> list[dict[str, Any]]:
    """A reference that is evaluated once is a level to measure the others by: its value again, after the last round."""
    last = max(row["round"] for row in rows)
    times = Counter(row["label"] for row in rows)
    return [
        {**row, "round": last}
        for row in rows
        if row["label"] in references and times[row["label"]] == 1 and row["round"] < last
    ]


def communication(found: ReportData) -> style.Chart | None:
    """Local accuracy over what a client has exchanged so far; a method that exchanges nothing is a dotted level."""
    rows, levels, totals, ends = [], [], [], {}
    most = max(12, _POINTS // 2 // max(1, len(found.groups)))
    for group in found.groups:
        table = over_seeds(series(entry.run, "local") for entry in group.entries)
        sent = [entry.run.sent() for entry in group.entries]
        if not table:
            continue
        cost = {at: float(np.mean([one[at] for one in sent if at in one])) for at in table}
        last = max(table)
        ends[group.label] = table[last][0]
        if cost[last] == 0:
            levels.append(_point(group.label, last, 0.0, table[last]))
        else:
            rows += [_point(group.label, at, cost[at], table[at]) for at in thin(list(table), most)]
            totals.append(cost[last])
    if not totals:
        return None
    looks = _looks(found, ends)
    wide = max(totals) > 30 * min(totals)
    scale = alt.Scale(type="log", nice=False, padding=12) if wide else alt.Scale(zero=True, nice=True)
    axis = alt.Axis(format="~g", tickCount=5) if wide else alt.Axis(tickCount=6)
    x = alt.X("mb:Q", title="MB per client so far, up and down", scale=scale, axis=axis)
    single = len(rows) == len(totals)
    tips = ["round:Q", alt.Tooltip("mb:Q", title="MB", format=".4~g")]
    layers = _lines(
        data(rows).transform_filter(_SHOWN), x, looks, tips, single, max(20, _size(len(rows) / len(totals)))
    )
    if levels:
        level = data(levels).transform_filter(_SHOWN).mark_rule(strokeDash=[2, 4], strokeWidth=2)
        tips = [alt.Tooltip("label:N", title="exchanges nothing"), alt.Tooltip("text:N", title="local")]
        layers.insert(0, level.encode(alt.Y("value:Q"), *by_label(looks, alt.Color), tooltip=tips))
    return alt.layer(*layers).add_params(alt.param("shown", value=list(looks)))


def _lines(
    base: alt.Chart, x: alt.X, looks: Mapping[str, Look], tips: Sequence[Any], single: bool, size: int
) -> list[alt.Chart]:
    """Deviation over seeds, line, and a mark on each point: the nearest one to the pointer grows and says what it is.

    `single`: of one point each, whose deviation has no area to fill. `size`: of the points; those of size 0 are seen
    when pointed at.
    """
    y = alt.Y("value:Q", title=None, scale=NEAR)
    near = alt.selection_point(name="near", nearest=True, on="pointerover", clear="pointerout", empty=False)
    deviation = base.mark_rule(strokeWidth=1.5) if single else base.mark_area(opacity=0.15)
    band = deviation.encode(x, alt.Y("low:Q", title=None, scale=NEAR), alt.Y2("high:Q"), *by_label(looks, alt.Color))
    line = base.mark_line(strokeWidth=2).encode(x, y, *by_label(looks, alt.Color, alt.StrokeDash))
    grown = alt.condition(near, alt.value(170), alt.value(size))
    tooltip = ["label:N", *tips, alt.Tooltip("text:N", title="value")]
    points = base.mark_point(filled=True, opacity=1).encode(x, y, *by_label(looks, alt.Color, alt.Shape), size=grown)
    return [band, line, points.encode(tooltip=tooltip).add_params(near)]


def _point(label: str, at: int, cost: float, value: tuple[float, float]) -> Row:
    mean, std = value
    numbers = {"mb": cost, "value": mean, "low": mean - std, "high": mean + std}
    return {"label": label, "round": at, "text": _text(mean, std), **{k: _number(v) for k, v in numbers.items()}}


# ---- by method


def accuracies(found: ReportData) -> style.Chart | None:
    """The last evaluated round, a row for each label, best first within a task and family: every client's accuracy, on
    a bar to their mean; its deviation over seeds; and the accuracy on all clients' test data."""
    dots: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    most = max(20, _CLIENTS // max(1, len(found.groups)))
    for group in found.groups:
        each = client_scores(group)
        if not each:
            continue
        last = [entry.numbers["metrics"]["aggregated"]["last"] for entry in group.entries if entry.numbers]
        mean, std = spread(in_percent(one["local"]["mean"]) for one in last)
        numbers = {"mean": mean, "low": mean - std, "high": mean + std}
        wide, _ = spread(in_percent(one["global"]) for one in last)
        bar = {"label": group.label, "text": _text(mean, std), **{k: _number(v) for k, v in numbers.items()}}
        bars.append(bar | ({"global": _number(wide)} if wide == wide else {}))
        run = group.first.run
        some = thin(sorted(each, key=lambda client: (each[client], client)), most)
        values = [_number(each[client]) for client in some]
        dots.append({"label": group.label, "client": [run.name(client) for client in some], "value": values})
    if not bars:
        return None
    blocks = _ranked(found, {bar["label"]: bar for bar in bars})
    order = [label for labels in blocks.values() for label in labels]
    headings = list(blocks) if len({group.family for group in found.groups}) > 1 else []  # one family needs no name
    places = [place for head, labels in blocks.items() for place in (*([head] if headings else []), *labels)]
    names, lines = _wrapped(order)
    unnamed = f"indexof({json.dumps(headings)}, datum.value) >= 0 ? '' : {names}"
    axis = alt.Axis(ticks=False, domain=False, labelExpr=unnamed)
    y = alt.Y("label:N", title=None, sort=places, axis=axis)
    x = alt.Scale(domain=[0, 100])
    (colour,) = by_label(style.looks(group.label for group in found.groups), alt.Color)
    colour.legend = None  # the rows have their names
    base = data(bars).transform_filter(_SHOWN)
    tips = ["label:N", alt.Tooltip("text:N", title="mean"), alt.Tooltip("global:Q", format=".1f")]
    bar_ = base.mark_bar(opacity=0.3, height=alt.RelativeBandSize(0.7)).encode(
        alt.X("mean:Q", title="test accuracy (%)", scale=x), y, colour, tooltip=tips
    )
    tick = bar_.mark_tick(thickness=3, height=20, opacity=1)
    deviation = base.transform_filter("datum.high > datum.low").mark_rule(strokeWidth=2, color=INK)
    text = base.mark_text(align="left", dx=8).encode(y, text="text:N", x=alt.datum(100), color=alt.value(style.GREY))
    over = alt.selection_point(name="over", fields=["client"], on="pointerover", clear="pointerout", empty=False)
    each_ = (
        data(dots)
        .transform_filter(_SHOWN)
        .transform_flatten(["client", "value"])
        .mark_circle()
        .encode(
            alt.X("value:Q", scale=x),
            y,
            colour,
            size=alt.condition(over, alt.value(170), alt.value(60)),
            opacity=alt.condition(over, alt.value(1), alt.value(0.6)),
            tooltip=["label:N", "client:N", alt.Tooltip("value:Q", title="accuracy (%)", format=".1f")],
        )
        .add_params(over)
    )
    layers = [bar_, tick, each_, deviation.encode(alt.X("low:Q", scale=x), alt.X2("high:Q"), y), text]
    if any("global" in bar for bar in bars):
        mark = base.transform_filter("isValid(datum.global)").mark_point(shape="diamond", filled=True, size=90)
        layers.append(
            mark.encode(alt.X("global:Q", scale=x), y, color=alt.value("white"), stroke=alt.value(INK), tooltip=tips)
        )
    if headings:
        text = data([{"label": heading} for heading in headings]).mark_text(align="left", dx=2, fontSize=12, color=INK)
        layers.append(text.encode(y, text="label:N", x=alt.datum(0)))
    chart = alt.layer(*layers).properties(height=max(64, max(32, 14 * lines + 6) * len(places)))
    return chart.add_params(alt.param("shown", value=order))


def _ranked(found: ReportData, bars: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Labels that can be ranked with each other, from the best, under what they are ranked by."""
    blocks: dict[str, list[str]] = {}
    parts = tasks(found)
    for task in parts:
        for family in FAMILIES:
            by = "global" if family == "one" else "mean"
            labels = [group.label for group in task.groups if group.family == family and group.label in bars]
            if family != "reference":
                labels.sort(key=lambda label: -bars[label].get(by, 0.0))
            if labels:
                blocks[_RANKED[family] if len(parts) == 1 else f"{task.words}: {_RANKED[family]}"] = labels
    return blocks


def client_scores(group: Group) -> dict[int, float]:
    """Client -> accuracy in per cent, mean over seeds that share a partition; the last evaluated round."""
    each: dict[int, list[float]] = {}
    for entry in group.entries:
        if entry.partition != group.first.partition:
            continue
        for row in entry.numbers.get("clients", {}).get("aggregated", []):
            if row["accuracy"] is not None:
                each.setdefault(row["client"], []).append(100 * row["accuracy"])
    return {client: float(np.mean(values)) for client, values in each.items()}


def _wrapped(labels: Sequence[str]) -> tuple[str, int]:
    """An expression that breaks labels into lines which a phone or a screen has room for, and how many lines one has at
    most: cut off, two of them might look alike."""
    narrow, wide = (f"'(.{{1,{width}}})( +|$)|(.{{{width}}})'" for width in _LETTERS)
    pattern = f"regexp(containerSize()[0] < 500 ? {narrow} : {wide}, 'g')"
    lines = f"split(replace(replace(datum.value, {pattern}, '$1$3\\n'), regexp('\\n$'), ''), '\\n')"
    return lines, max(len(textwrap.wrap(label, _LETTERS[0])) for label in labels)


# ---- what they share


def _looks(found: ReportData, ends: Mapping[str, float]) -> dict[str, Look]:
    """A label's look is that of its place among all; legends go by family, then by the lines' ends."""
    looks = style.looks(group.label for group in found.groups)
    families = {group.label: FAMILIES.index(group.family) for group in found.groups}
    return {
        label: looks[label] for label in sorted(looks, key=lambda label: (families[label], -ends.get(label, -np.inf)))
    }


def _size(points: float) -> int:
    """Of a mark, where a line has so many."""
    return 70 if points <= 12 else 30 if points <= 30 else 0


def _text(mean: float, std: float) -> str:
    return "–" if mean != mean else f"{mean:.1f} ± {std:.1f} %" if std else f"{mean:.1f} %"


def _number(value: float) -> float:
    return float(f"{value:.4g}")
