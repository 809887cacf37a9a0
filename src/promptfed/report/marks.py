"""Pieces that several charts are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt
import numpy as np

from . import style
from .style import Chart, Look

NAMED = 40  # clients, classes or groups up to which each one has its name on an axis
_WRITTEN = 400  # cells up to which each one shows its value
_ENCODINGS: dict[type, str] = {alt.Color: "colour", alt.Shape: "shape", alt.StrokeDash: "dash"}

NEAR = alt.Scale(zero=False, nice=True)  # from a little below the smallest value to a little above the largest
Row = Mapping[str, Any]
Besides = tuple[str, Literal["tick", "point"], Sequence[float | None]]  # kind, mark, values


def data(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def by_label(looks: Mapping[str, Look], *channels: type, title: str | None = None) -> list[Any]:
    """Encodings of a label by its look. Legends follow the order of `looks`, and are one where domains are equal."""
    return [
        channel(
            "label:N",
            title=title,
            scale=alt.Scale(domain=list(looks), range=[getattr(look, _ENCODINGS[channel]) for look in looks.values()]),
        )
        for channel in channels
    ]


def by_colour(colours: Mapping[str, str], field: str = "kind:N", orient: Any = "bottom", columns: int = 4) -> alt.Color:
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    legend = alt.Legend(orient=orient, title=None, columns=columns, symbolType="square")
    return alt.Color(field, title=None, scale=scale, legend=legend)


def client_names(names: Sequence[str], ids: Sequence[int]) -> list[str]:
    """The clients' numbers, or their names where they have names of their own."""
    if all(name == f"client-{client}" for name, client in zip(names, ids, strict=True)):
        return [str(client) for client in ids]
    return style.short(names, 18)


def places(
    field: str, names: Sequence[str], room: float | None = None, gap: float = 0.2, unit: int = 1, **axis: Any
) -> dict[str, Any]:
    """Arguments of X or Y of places 0, 1, ...: with their names, or with some numbers where they are too many.

    `room`: of a horizontal axis, whose labels are tilted where they are too long for it. `unit`: clients per place.
    """
    if len(names) > NAMED:
        step = next(s for s in (10, 20, 50, 100, 200, 500, 10**9) if len(names) / s <= 12)
        gap = 0.0
        values = list(range(0, len(names), step))
        axis |= {"values": values, "labelExpr": f"datum.value * {unit}", "labelAngle": 0}
    else:
        tilted = room is not None and 6.2 * max(map(len, names), default=0) * len(names) > room
        axis |= {"labelExpr": f"{json.dumps(list(names))}[datum.value]", "labelAngle": -45 if tilted else 0}
    return {
        "shorthand": field,
        "scale": alt.Scale(domain=list(range(len(names))), paddingInner=gap, paddingOuter=gap / 2),
        "axis": alt.Axis(**{"ticks": False, "domain": False, "labelOverlap": False, **axis}),
    }


def rounds(last: int, field: str = "round:Q") -> alt.X:
    ticks = alt.Axis(format="d", values=list(range(1, last + 1))) if last <= 12 else alt.Axis(format="d", tickMinStep=1)
    return alt.X(field, title="communication round", axis=ticks, scale=alt.Scale(zero=False, nice=False, padding=8))


def bars(
    names: Sequence[str],
    kinds: Mapping[str, tuple[str, np.ndarray]],
    x: str,
    besides: Besides | None = None,
) -> Chart:
    """Horizontal bars of values from 0 to 1, those of a name together; a dashed line for the mean of each kind.

    `kinds`: colour and values; `besides`: one more kind, as marks on the bars.
    """
    colours = {kind: colour for kind, (colour, _) in kinds.items()}
    rows = [
        {"at": at, "kind": kind, "value": float(value)}
        for kind, (_, values) in kinds.items()
        for at, value in enumerate(values)
    ]
    y = alt.Y(title="client", **places("at:O", names))
    at_value = alt.X("value:Q", title=x, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(grid=True))
    if besides:
        colours[besides[0]] = style.INK
    colour = by_colour(colours, columns=2)
    base = data(rows).encode(colour)
    layers = [
        base.mark_bar().encode(at_value, y, yOffset=alt.YOffset("kind:N", sort=list(kinds))),
        base.mark_rule(strokeDash=[5, 3], strokeWidth=1.5).encode(alt.X("mean(value):Q")),
    ]
    if besides:
        kind, mark, values = besides
        more = data([{"at": at, "kind": kind, "value": v} for at, v in enumerate(values) if v is not None])
        marked = more.mark_tick(thickness=2) if mark == "tick" else more.mark_circle(size=45, opacity=1)
        layers.append(marked.encode(at_value, y, colour))
    return alt.layer(*layers).properties(height=tall(len(names)))


def each_and_mean(rows: Sequence[Row], y: str | list[str], mean: str, colour: str = style.BLUE) -> Chart:
    """Values over rounds: a thin line for each client, and their mean. `rows`: client, round, value."""
    colours = {"one client": style.LIGHT, mean: colour}
    base = data(rows).encode(rounds(max(row["round"] for row in rows)))
    up = alt.Y("value:Q", title=y, scale=alt.Scale(zero=True))
    thin = base.mark_line(strokeWidth=0.8, point=alt.OverlayMarkDef(size=9)).encode(up, detail="client:N")
    thick = base.mark_line(strokeWidth=2.2, point=alt.OverlayMarkDef(size=50)).encode(alt.Y("mean(value):Q", title=y))
    legend = by_colour(colours, orient="top")
    return alt.layer(
        thin.transform_calculate(kind="'one client'").encode(legend),
        thick.transform_calculate(kind=json.dumps(mean)).encode(legend),
    )


def tall(rows: int) -> float:
    """Height of so many rows."""
    return float(np.clip(22 * rows + 24, 90, 520))


def heat_map(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x: str,
    y: str,
    legend: str,
    texts: np.ndarray | None = None,
    scheme: Literal["blues", "greens"] = "blues",
    root: bool = False,
    most: float = 1.0,
    width: float = style.WIDTH,
    unit: int = 1,
) -> Chart:
    """(rows, columns): a cell for each value above zero, with its text. `most`: the darkest value; `root`: shades grow
    with the square root, which keeps small values visible."""
    cells = [
        {"row": i, "column": j, "value": float(value), "text": "" if texts is None else str(texts[i, j])}
        for (i, j), value in np.ndenumerate(values)
        if value > 0
    ]
    scale = alt.Scale(
        scheme=alt.SchemeParams(scheme, extent=[0.05, 1]), domain=[0, most], type="sqrt" if root else "linear"
    )
    top = alt.Legend(title=legend, gradientLength=max(60, min(160, 14 * len(rows))), gradientThickness=12)
    base = data(cells).encode(
        alt.X(title=x, **places("column:O", columns, width, gap=0)),
        alt.Y(title=y, **places("row:O", rows, gap=0, unit=unit)),
    )
    layers = [base.mark_rect().encode(alt.Color("value:Q", scale=scale, legend=top))]
    if texts is not None and values.size <= _WRITTEN:
        dark = alt.datum.value > (0.36 if root else 0.6) * most
        ink = alt.condition(dark, alt.value("white"), alt.value(style.INK))
        layers.append(base.mark_text(fontSize=10).encode(text="text:N", color=ink))
    return alt.layer(*layers).properties(width=width, height=tall(len(rows)))
