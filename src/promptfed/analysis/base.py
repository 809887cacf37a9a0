"""An analysis: a function of a run, or of a comparison, that makes a picture, a table and a caption."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..report.style import Chart

Row = Mapping[str, Any]  # of a CSV: every row of a table has the same keys


@dataclass(frozen=True)
class Options:
    """What an analysis may be asked for. Each uses those that concern it."""

    clients: tuple[int, ...] = ()  # whose models; empty: a sample of all
    images: int | None = None  # how many; None: the analysis's default
    other: Path | None = None  # a second run, to compare with


@dataclass(frozen=True)
class Found:
    """What an analysis has found."""

    picture: Chart | Figure  # a figure where images are shown
    rows: Sequence[Row]
    title: str
    text: str
    more: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # further tables, by the suffix of their names

    def save(self, out: Path, name: str) -> list[Path]:
        """NAME.png, NAME.csv, NAME.json with title and text; further tables as NAME-KEY.csv."""
        from matplotlib.figure import Figure

        from .. import files
        from ..report import images, style

        out.mkdir(parents=True, exist_ok=True)
        picture = out / f"{name}.png"
        if isinstance(self.picture, Figure):
            images.save(self.picture, picture)
        else:
            style.save(self.picture, picture)
        written = [picture]
        for key, rows in {name: self.rows, **{f"{name}-{end}": rows for end, rows in self.more.items()}}.items():
            files.write(out / f"{key}.csv", table(rows).encode())
            written.append(out / f"{key}.csv")
        caption = {"title": self.title, "text": self.text}
        files.write(out / f"{name}.json", (json.dumps(caption, indent=1, ensure_ascii=False) + "\n").encode())
        return [*written, out / f"{name}.json"]


@dataclass(frozen=True)
class Analysis:
    about: str
    of: Literal["run", "comparison"]
    where: str  # "module.function" in this package: imported when it is called, as what draws is slow to import

    @property
    def function(self) -> Callable[[Any, Options], Found]:
        """Of an Opened run, or of a Comparison."""
        module, name = self.where.split(".")
        found: Callable[[Any, Options], Found] = getattr(import_module(f"{__package__}.{module}"), name)
        return found


def table(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
