"""Pictures that show images, drawn with matplotlib. No pyplot, so nothing is global and threads may draw."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .. import files

WIDTH = 8.0  # inches


def blank(height: float, gap: float) -> Figure:
    """`gap`: between subplots, as a share of their size."""
    figure = Figure(figsize=(WIDTH, height), dpi=150, layout=ConstrainedLayoutEngine(hspace=gap, wspace=gap))
    FigureCanvasAgg(figure)
    return figure


def title(figure: Figure, text: str) -> None:
    lines = "\n".join(textwrap.fill(line, 96) for line in text.split("\n"))
    figure.suptitle(plain(lines), x=0.01, ha="left", fontsize=10)


def plain(text: str) -> str:
    """A text as it stands: matplotlib takes $ for mathematics."""
    return text.replace("$", r"\$")


def save(figure: Figure, path: Path) -> Path:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    files.write(path, content.getvalue())
    return path
