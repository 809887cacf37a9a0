"""The charts of one run and of its partition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt
import numpy as np

from ..data import Federation
from ..runs.opened import Run, Share
from ..runs.tables import in_percent
from . import style
from .marks import NAMED, NEAR, by_colour, by_label, client_names, data, heat_map, places, rounds, tall
from .numbers import thin
from .style import BLUE, GREEN, GREY, INK, VERMILION, Look

_BARS = 400  # clients that have a bar; of more, some are shown
_ROWS, _CELLS = 250, 12_000  # of a heat map: clients beyond this are averaged in groups
_BANDS = {"worst to best client": "#dcebf5", "middle half of the clients": "#b0d2e8"}
_PARTS: dict[Literal["train", "val", "test"], str] = {"train": "train", "val": "validation", "test": "test"}


# ---- over rounds


def curves(run: Run) -> style.Chart | None:
    """Accuracy of the evaluated rounds and the training loss of all of them; None before the first round is over."""
    if not run.lines:
        return None
    loss = _loss(run)
    if not any(run.accuracies(line) for line in run.scored):
        return style.titled(loss, f"{run.title}; no test accuracy {'known' if run.scored else 'yet'}")
    chart = alt.vconcat(_accuracy(run), loss).resolve_scale(x="shared", color="independent", shape="independent")
    return style.titled(chart, run.title)


def _accuracy(run: Run) -> style.Chart:
    looks = {"local: mean over clients, own test data": Look(BLUE, "circle", "-")}
    rows = _rows(run, next(iter(looks)), "local", "mean")
    wide = _rows(run, "global: all clients' test data", "global")
    everyone = all(len(line["clients"]) == run.clients for line in run.scored)
    who = "all clients" if everyone else "participants of the round"
    after = _rows(run, f"after local training: {who}", "local", "mean", stage="after_local")
    final = _rows(run, "after local training: all clients", "local", "mean", stage="after_local_all")
    for found, look in (
        (wide, Look(GREEN, "square", "-")),
        (after, Look(VERMILION, "triangle-up", "--")),
        (final, Look("#882255", "diamond", "-")),
    ):
        rows += found
        looks |= {row["label"]: look for row in found}
    bands = []
    for line in run.scored:
        if each := list(run.accuracies(line).values()):
            edges = np.percentile(each, [0, 100, 25, 75])
            for label, low, high in zip(_BANDS, edges[::2], edges[1::2], strict=True):
                bands.append({"label": label, "round": line["round"], "low": low, "high": high})
    every = {**looks, **{label: Look(colour, "square", "-") for label, colour in _BANDS.items()}}
    colour, shape, dash = by_label(every, alt.Color, alt.Shape, alt.StrokeDash)
    colour.legend = shape.legend = alt.Legend(orient="top", columns=2, symbolStrokeWidth=0)
    dash.legend = None
    x = rounds(run.last).title(None)
    y = alt.Y("value:Q", title="test accuracy (%)", scale=NEAR)
    single = len(run.scored) == 1
    layers = []
    for label, size in zip(_BANDS, (6, 14), strict=True):
        part = data(bands).transform_filter(alt.datum.label == label)
        area = part.mark_bar(size=size) if single else part.mark_area()
        layers.append(area.encode(x, alt.Y("low:Q", scale=NEAR), alt.Y2("high:Q"), colour))
    base = data(rows).encode(x, y, colour)
    layers.append(base.mark_line(strokeWidth=2).encode(dash))
    layers.append(base.mark_point(filled=True, opacity=1, size=45 if len(run.scored) <= 30 else 14).encode(shape))
    return alt.layer(*layers).properties(width=style.WIDTH + 60, height=220)


def _rows(run: Run, label: str, *path: str, stage: Any = "aggregated") -> list[dict[str, Any]]:
    """A summary's number by round, where it is known."""
    at, values = run.series(*path, stage=stage)
    return [
        {"label": label, "round": int(r), "value": float(v)}
        for r, v in zip(at, values, strict=True)
        if math.isfinite(v)
    ]


def _loss(run: Run) -> style.Chart:
    rows = [{"round": line["round"], "value": _finite(line["train_loss"])} for line in run.lines]
    base = data(rows).encode(rounds(run.last), alt.Y("value:Q", title="training loss", scale=NEAR))
    point = alt.OverlayMarkDef(color=GREY, size=30 if len(rows) <= 30 else 10)
    layers = [base.mark_line(color=GREY, strokeWidth=2, point=point)]
    lost = [{"round": line["round"]} for line in run.lines for _ in line["left_out"]]
    if lost:
        text = f"clients left out of a round ({len(lost)} time{'s' if len(lost) > 1 else ''})"
        cross = data(lost).mark_text(text="×", fontSize=15, color=VERMILION)
        layers.append(cross.encode(rounds(run.last), y=alt.value(84)))
        note = data([{}]).mark_text(text=f"× {text}", align="right", color=VERMILION)
        layers.append(note.encode(x=alt.value(style.WIDTH + 60), y=alt.value(4)))
    return alt.layer(*layers).properties(width=style.WIDTH + 60, height=90)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- by client


def clients(run: Run) -> style.Chart | None:
    """Each client's accuracy in the last evaluated round, best first, above the samples it has."""
    accuracy = run.accuracies(run.scored[-1]) if run.scored else {}
    if not accuracy:
        return None
    line = run.scored[-1]
    ids = sorted(accuracy, key=lambda client: (-accuracy[client], client))
    tests = {row["client"]: row["n_test"] for row in line["aggregated"]["clients"]}
    without, away = [client for client in tests if client not in accuracy], run.away(line)
    named = len(ids) + len(without) + len(away) <= NAMED
    ids = ids + without + away if named else thin(ids, _BARS)
    shares = [run.shares[client] if run.shares else Share("", 0, 0, tests.get(client, 0)) for client in ids]
    text = "client, best accuracy first"
    if without and not named:
        text += f" ({len(without)} without test data left out)"
    names = client_names([run.name(client) for client in ids], ids)
    few = f", {len(away)} of {run.clients} not evaluated" if away else ""
    why = {client: "not evaluated" if client in away else "no test data" for client in without + away}
    top = _bars([accuracy.get(client) for client in ids], [why.get(client, "") for client in ids], names)
    mean = in_percent(line["aggregated"]["summary"]["local"]["mean"])
    level = data([{"mean": mean, "text": f"mean {mean:.1f} %"}]).encode(alt.Y("mean:Q"))
    rule = level.mark_rule(color=INK, strokeDash=[5, 3])
    beside = level.mark_text(align="left", dx=5).encode(text="text:N", x=alt.value(style.WIDTH))
    chart = alt.vconcat(
        alt.layer(top, rule, beside), samples(names, shares, text).properties(width=style.WIDTH, height=90)
    )
    return style.titled(chart.resolve_scale(color="independent"), f"{run.title}; round {line['round']}{few}")


def _bars(values: Sequence[float | None], why: Sequence[str], names: Sequence[str]) -> style.Chart:
    rows = [{"at": at, "value": value, "why": why[at]} for at, value in enumerate(values)]
    x = alt.X(title=None, **{**places("at:O", names, style.WIDTH), "axis": None})
    y = alt.Y("value:Q", title="test accuracy (%)", scale=alt.Scale(domain=[0, 100]))
    base = data(rows)
    missing = base.mark_text(angle=270, align="left", color=GREY).encode(x, y=alt.datum(2), text="why:N")
    return alt.layer(base.mark_bar(color=BLUE).encode(x, y), missing).properties(width=style.WIDTH, height=200)


def samples(names: Sequence[str], shares: Sequence[Share], x: str = "client") -> style.Chart:
    """How many samples each client has, by what they are used for."""
    rows = [
        {"at": at, "client": share.name, "part": word, "n": getattr(share, part), "turn": turn}
        for at, share in enumerate(shares)
        for turn, (part, word) in enumerate(_PARTS.items())
    ]
    across = alt.X(title=x, **places("at:O", names, style.WIDTH))
    colour = by_colour({word: style.PARTS[part] for part, word in _PARTS.items()}, "part:N", "top")
    bars = data(rows).mark_bar().encode(across, alt.Y("n:Q", title="samples"), colour, order=alt.Order("turn:Q"))
    return alt.layer(bars.encode(tooltip=["client:N", "part:N", alt.Tooltip("n:Q", title="samples")]))


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
    colour = by_colour({word: style.PARTS[part] for part, word in _PARTS.items()}, "part:N", "top")
    bars = data(rows).mark_bar().encode(alt.X("n:Q", title="samples in all"), y, colour, order=alt.Order("turn:Q"))
    if len(names) > NAMED:
        return alt.layer(bars)
    sums = data([{"at": at, "n": float(n)} for at, n in enumerate(np.sum(list(totals.values()), 0))])
    return alt.layer(bars, sums.mark_text(align="left", dx=4, fontSize=10).encode(alt.X("n:Q"), y, text="n:Q"))
