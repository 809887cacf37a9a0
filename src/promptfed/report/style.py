"""What all charts share: colours, the look of a label, the theme, and how a chart becomes a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import altair as alt
import vl_convert

from .. import files
from ..errors import UserError

Chart = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart | alt.FacetChart

WIDTH = 470  # of a chart's plot, without axes and legends
SCALE = 2  # pixels of a picture for each of these

# Okabe and Ito's colours without yellow, then three of Tol's: distinguishable with any kind of colour vision. Each with
# what it becomes on a dark background.
PALETTE = {
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
BLUE, VERMILION, GREEN, *_ = _COLOURS = tuple(PALETTE)
INK, GREY, LIGHT, _GRID = "#222222", "#666666", "#bbbbbb", "#e6e6e6"
DARK = {**PALETTE, GREY: "#A3ABB5", INK: "#E8EAED", _GRID: "#31373E"}  # colours on a dark background
PARTS = {"train": "#2171b5", "val": "#9ecae1", "test": "#fdae6b"}
_SHAPES = (  # one more than colours: the pairs repeat as late as possible
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z",  # x
    "M0,-1L0.95,-0.31L0.59,0.81L-0.59,0.81L-0.95,-0.31Z",  # pentagon
    "triangle-left",
    "triangle-right",
    "M0,-1L0.87,-0.5L0.87,0.5L0,1L-0.87,0.5L-0.87,-0.5Z",  # hexagon
)
THEME: dict[str, Any] = {
    "background": "white",
    "padding": 10,
    "view": {"stroke": None, "continuousWidth": WIDTH, "continuousHeight": 260},
    "title": {"anchor": "start", "frame": "group", "fontSize": 14, "fontWeight": "normal", "color": INK, "offset": 12}
    | {"subtitleFontSize": 12, "subtitleColor": GREY, "subtitlePadding": 5},
    "axis": {"labelColor": GREY, "titleColor": INK, "gridColor": _GRID, "domainColor": GREY}
    | {"tickColor": GREY, "tickSize": 4, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
    | {"labelLimit": 240},
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
    "legend": {"title": None, "labelFontSize": 11, "labelLimit": 220, "symbolSize": 70, "titleFontWeight": "normal"}
    | {"symbolOpacity": 1, "labelColor": INK, "titleColor": INK},
    "header": {"labelFontSize": 12, "labelAnchor": "start", "title": None},
}


@dataclass(frozen=True)
class Look:
    """How a label is drawn, in every chart of a comparison."""

    colour: str
    shape: str
    line: Literal["-", "--"]

    @property
    def dark(self) -> str:
        return PALETTE[self.colour]

    @property
    def dash(self) -> list[int]:
        return [1, 0] if self.line == "-" else [6, 4]


def looks(labels: Iterable[str]) -> dict[str, Look]:
    return {
        label: Look(_COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)], "-" if i < len(PALETTE) else "--")
        for i, label in enumerate(labels)
    }


def titled(chart: Chart, title: str, subtitle: str = "") -> Chart:
    lines = [line for text in title.split("\n") for line in textwrap.wrap(text, 92)] or [""]
    return chart.properties(title=alt.TitleParams(lines, subtitle=textwrap.wrap(subtitle, 108)))


def short(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many letters; of those that would then look alike, the end is kept, or all of it."""
    cut = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
    tails = [f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}" for name in names]
    return [
        one if cut.count(one) == 1 else tail if tails.count(tail) == 1 else name
        for name, one, tail in zip(names, cut, tails, strict=True)
    ]


def save(chart: Chart, path: Path) -> Path:
    """Replaces the picture in one step: somebody may be looking at the old one."""
    spec = {**chart.to_dict(), "config": THEME}
    suffix = check(path)
    files.write(path, _FORMATS[suffix](spec) + (_SVG_MARK if suffix == ".svg" else _MARK))
    return path


def check(path: Path) -> str:
    """A picture's format; UserError where none can be written under this name."""
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise UserError(f'--out = "{path}" must end in {", ".join(_FORMATS)}')
    if path.is_dir():
        raise UserError(f'--out = "{path}" is a folder; name a file')
    return suffix


MARK = b"made by promptfed"  # behind the end of a picture, where no viewer looks
_MARK, _SVG_MARK = b"\n%" + MARK + b"\n", b"\n<!-- " + MARK + b" -->\n"


_FORMATS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    ".png": lambda spec: vl_convert.vegalite_to_png(spec, scale=SCALE),
    ".svg": lambda spec: vl_convert.vegalite_to_svg(spec).encode(),
    ".pdf": vl_convert.vegalite_to_pdf,
    ".jpg": lambda spec: vl_convert.vegalite_to_jpeg(spec, scale=SCALE),
}
