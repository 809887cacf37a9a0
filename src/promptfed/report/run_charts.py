"""The charts of one run and of its partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import altair as alt
import numpy as np

from ..data import Federation
from ..runs.opened import Run, Share
from . import style
from .marks import NAMED, NEAR, Row, by_colour, by_label, client_names, data, heat_map, places, rounds, tall
from .numbers import MEASURES, series, thin

_BARS = 400  # clients that have a bar; of more, some are shown
_ROWS, _CELLS = 250, 12_000  # of a heat map: clients beyond this are averaged in groups
_PARTS: dict[Literal["train", "val", "test"], str] = {"train": "train", "val": "validation", "test": "test"}


def curves(run: Run) -> style.Chart | None:
    """Accuracies of the evaluated rounds above the training loss of all of them; None where nothing is known."""
    *accuracies, loss = MEASURES
    panels = [_lines(run, accuracies, "test accuracy (%)", 220), _lines(run, [loss], "training loss", 90)]
    known = [panel for panel in panels if panel]
    chart = alt.vconcat(*known).resolve_scale(x="shared", color="independent", shape="independent")
    return style.titled(chart, run.title) if known else None


def _lines(run: Run, measures: Sequence[str], y: str, height: int) -> style.Chart | None:
    found = {MEASURES[name].word: table for name in measures if (table := series(run, name))}
    rows = [
        {"label": word, "round": at, "value": value} for word, table in found.items() for at, value in table.items()
    ]
    colour, shape = by_label(style.looks(found), alt.Color, alt.Shape)
    colour.legend = shape.legend = alt.Legend(orient="top") if len(found) > 1 else None
    base = data(rows).encode(rounds(run.last), alt.Y("value:Q", title=y, scale=NEAR), colour)
    points = base.mark_point(filled=True, opacity=1, size=45 if run.last <= 30 else 14).encode(shape)
    return alt.layer(base.mark_line(), points).properties(width=style.WIDTH + 60, height=height) if rows else None


def samples(shares: Sequence[Share]) -> style.Chart | None:
    """How many samples each client has, by what they are used for; of many clients, some."""
    some = thin(range(len(shares)), _BARS)
    rows = [
        {"at": at, "client": shares[i].name, "part": word, "n": getattr(shares[i], part), "turn": turn}
        for at, i in enumerate(some)
        for turn, (part, word) in enumerate(_PARTS.items())
    ]
    names = client_names([shares[i].name for i in some], some)
    x = alt.X(title="client", **places("at:O", names, style.WIDTH))
    bars = _stacked(rows).encode(x, alt.Y("n:Q", title="samples"))
    return bars.encode(tooltip=["client:N", "part:N", alt.Tooltip("n:Q", title="samples")]) if rows else None


def _stacked(rows: Sequence[Row]) -> alt.Chart:
    """Bars of training, validation and test samples on one another."""
    colour = by_colour({word: style.PARTS[part] for part, word in _PARTS.items()}, "part:N", "top")
    bars: alt.Chart = data(rows).mark_bar().encode(colour, order=alt.Order("turn:Q"))
    return bars


def partition(federation: Federation, whose: str = "") -> style.Chart:
    """A heat map of the training samples, clients down and classes across, and bars of each client's total.

    `whose`: what a title says where there are several partitions.
    """
    parts = {split: federation.label_counts(split) for split in _PARTS}
    clients, classes = parts["train"].shape
    group = -(-clients // max(1, min(_ROWS, _CELLS // max(1, classes))))  # clients averaged in a row
    edges = np.arange(0, clients, group)
    sizes = np.minimum(group, clients - edges)
    counts = np.add.reduceat(parts["train"], edges) / sizes[:, None]  # (rows, classes)
    names = [federation.sites[edge].name for edge in edges]
    heat = heat_map(
        counts,
        names,
        style.short(federation.dataset.classes, 18),
        x="class",
        y="client",
        legend="training samples" if group == 1 else f"training samples, mean of {group} clients",
        texts=parts["train"] if group == 1 else None,
        root=True,
        most=max(1.0, float(counts.max())),
        width=float(np.clip(28 * classes, 240, 560)),
        unit=group,
    )
    totals = {split: np.add.reduceat(part.sum(1), edges) / sizes for split, part in parts.items()}
    bars = _totals(totals, names).properties(width=110, height=tall(len(edges)))
    kind = f"{federation.about.get('kind', 'custom')}{f' ({whose})' if whose else ''}"
    title = f"{federation.dataset.name}, {kind}, {clients} client{'s' if clients > 1 else ''}"
    return style.titled(alt.hconcat(heat, bars).resolve_scale(color="independent"), title)


def _totals(totals: Mapping[Literal["train", "val", "test"], np.ndarray], names: Sequence[str]) -> style.Chart:
    rows = [
        {"at": at, "part": _PARTS[split], "n": float(n), "turn": turn}
        for turn, (split, values) in enumerate(totals.items())
        for at, n in enumerate(values)
    ]
    y = alt.Y(title=None, **{**places("at:O", names), "axis": None})
    bars = _stacked(rows).encode(alt.X("n:Q", title="samples in all"), y)
    if len(names) > NAMED:
        return alt.layer(bars)
    sums = data([{"at": at, "n": float(n)} for at, n in enumerate(np.sum(list(totals.values()), 0))])
    return alt.layer(bars, sums.mark_text(align="left", dx=4, fontSize=10).encode(alt.X("n:Q"), y, text="n:Q"))
