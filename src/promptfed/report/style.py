"""What all pictures share: size, colours and the look of axes. No pyplot, so nothing is global and threads may draw."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from .. import files

WIDTH = 8.0  # inches
DPI = 150

# Okabe and Ito's colours without yellow, then three of Tol's: told apart with any kind of colour vision.
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#4D4D4D",
    "#882255",
    "#999933",
    "#332288",
)
BLUE, VERMILION, GREEN = PALETTE[:3]
GREY = "#666666"
PARTS = {"train": "#2171b5", "val": "#9ecae1", "test": "#fdae6b"}  # as in the picture of a partition
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "p", "<", ">", "h")  # one more than colours: the pairs differ longest


@dataclass(frozen=True)
class Look:
    """How a label is drawn, in every picture of a comparison."""

    colour: str
    marker: str
    line: Literal["-", "--"]


def looks(labels: Iterable[str]) -> dict[str, Look]:
    return {
        label: Look(PALETTE[i % len(PALETTE)], _MARKERS[i % len(_MARKERS)], "-" if i < len(PALETTE) else "--")
        for i, label in enumerate(labels)
    }


def blank(height: float, gap: float = 0.02) -> Figure:
    """`gap`: between subplots, as a share of their size."""
    layout = ConstrainedLayoutEngine(hspace=gap, wspace=gap)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, *, x: str = "", y: str = "", grid: Literal["x", "y", "both"] = "y") -> None:
    """Axis labels, and no more ink than it takes to read off a value."""
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.tick_params(labelsize=9, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def rounds_axis(axes: Axes, last: int) -> None:
    room = max(0.5, 0.03 * last)
    axes.set_xlim(max(0.0, 1 - room), last + room)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def percent_axis(axes: Axes, values: Iterable[float]) -> None:
    """From a little below the least to a little above the greatest value, but not beyond what an accuracy can be."""
    known = [value for value in values if value == value]
    low, high = min(known, default=0.0), max(known, default=100.0)
    room = max(1.5, 0.07 * (high - low))
    axes.set_ylim(max(-1.5, low - room), min(101.5, high + room))


def title(figure: Figure, text: str, size: float = 11) -> None:
    figure.suptitle(plain(text, int(960 / size)), x=0.01, ha="left", fontsize=size)


def plain(text: str, width: int = 0) -> str:
    """A text as it stands: matplotlib takes $ for mathematics, and leaves out of a legend what begins with _."""
    text = "\n".join(textwrap.fill(line, width) for line in text.split("\n")) if width else text
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def short(names: Sequence[str], most: int) -> list[str]:
    """Names of so many letters at most; of those that would then look alike, the end is kept, or all of it."""
    cut = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
    tails = [f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}" for name in names]
    return [
        one if cut.count(one) == 1 else tail if tails.count(tail) == 1 else name
        for name, one, tail in zip(names, cut, tails, strict=True)
    ]


def save(figure: Figure, path: Path) -> Path:
    """Replaces the picture in one step: somebody may be looking at the old one."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    files.write(path, content.getvalue())
    return path


def marks(look: Look, points: int, size: float = 5.5) -> dict[str, Any]:
    """Arguments of plot(): a marker on each point, smaller where points are many."""
    return {
        "color": look.colour,
        "linestyle": look.line if points > 1 else "none",
        "linewidth": 1.8,
        "marker": look.marker,
        "markersize": size if points <= 30 else 2.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6 if points <= 30 else 0.0,
    }
