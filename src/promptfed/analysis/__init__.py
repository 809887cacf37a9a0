"""Analyses of finished runs and comparisons: each makes a picture, a CSV and a caption."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import files
from ..errors import UserError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..report.style import Chart

Row = Mapping[str, Any]  # of a CSV: every row of a table has the same keys


@dataclass(frozen=True)
class Options:
    """What an analysis may be asked for. Each uses those that concern it."""

    clients: tuple[int, ...] = ()  # whose models; empty: a sample of all
    images: int | None = None  # how many; None: the analysis's default
    everyone: bool = False  # if no clients are named: all of them, in place of a sample
    label: str = ""  # only images of this class


@dataclass(frozen=True)
class Found:
    """What an analysis has found."""

    picture: Chart | Figure  # a figure where images are shown
    rows: Sequence[Row]
    title: str
    text: str
    more: Mapping[str, Sequence[Row]] = field(default_factory=dict)  # further tables, by the suffix of their names
    nothing: str = ""  # why there is nothing to see, if so: then it is left out unless it was named

    def save(self, out: Path, name: str) -> list[Path]:
        """NAME.png, NAME.csv, further tables as NAME-KEY.csv, NAME.json with title and text."""
        from matplotlib.figure import Figure

        from ..report import images, style

        out.mkdir(parents=True, exist_ok=True)
        save: Callable[..., Path] = images.save if isinstance(self.picture, Figure) else style.save
        written = [save(self.picture, out / f"{name}.png")]
        texts = {f"{name}.csv": table(self.rows)}
        texts |= {f"{name}-{key}.csv": table(rows) for key, rows in self.more.items()}
        texts[f"{name}.json"] = (
            json.dumps({"title": self.title, "text": self.text}, indent=1, ensure_ascii=False) + "\n"
        )
        for file, text in texts.items():
            files.write(out / file, text.encode())
            written.append(out / file)
        return written


def table(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@dataclass(frozen=True)
class Analysis:
    about: str
    of: Literal["run", "comparison"]
    where: str  # "module.function" in this package: imported when it is called, as what draws is slow to import

    @property
    def function(self) -> Callable[[Any, Options], Found]:
        """Of an Opened run, or of the runs of a comparison."""
        module, name = self.where.split(".")
        found: Callable[[Any, Options], Found] = getattr(import_module(f"{__name__}.{module}"), name)
        return found


ANALYSES: dict[str, Analysis] = {
    "attention": Analysis("what the last layer attends to, with and without a prompt", "run", "attention.attention"),
    "colours-tsne": Analysis("features of pure colours under each client's prompt", "run", "labels.colours_tsne"),
    "colours-labels": Analysis("classes predicted on pure colours against a client's own", "run", "labels.colours"),
    "drift": Analysis("how far parameters move in each round", "run", "drift.drift"),
    "leakage": Analysis("label distributions that uploads reveal", "run", "labels.leakage"),
    "variation": Analysis("how far a client's classes lie apart in its features", "run", "variation.variation"),
    "layers": Analysis("where in a transformer classes come apart", "run", "layers.layers"),
    "groups": Analysis("what SGPT's groups hold, and how stable they are", "run", "groups.groups"),
    "selection": Analysis("how steadily clients select SGPT's groups over rounds", "run", "groups.selection"),
    "helps": Analysis("DP2FL's weights of others in each client's data prompt", "run", "helps.helps"),
    "scatter": Analysis("global against worst-client accuracy of all runs", "comparison", "compared.scatter"),
    "sweep": Analysis("accuracy over the prompt's size or last layer", "comparison", "compared.sweep"),
    "clients": Analysis("accuracy and F1 of each client, over datasets", "comparison", "compared.clients"),
}


@dataclass(frozen=True)
class Made:
    files: dict[str, list[Path]]  # by analysis: picture, tables, caption
    left_out: dict[str, str]  # by analysis: why it does not apply


def make(
    folder: str | Path, names: Sequence[str] = (), out: str | Path | None = None, options: Options | None = None
) -> Made:
    """Makes analyses of a run or of a comparison, into its folder analysis/ unless `out` is given.

    Without names all that apply; a named one that does not apply is an error.
    """
    from . import compared  # slow to import
    from .opened import Opened

    folder = Path(folder)
    finished = not (folder / "config.toml").exists() and any(folder.glob("*/result.json"))
    kind = "comparison" if finished else "run"
    for name in names:
        if name not in ANALYSES:
            raise unknown("analyse", name, ANALYSES)
        if ANALYSES[name].of != kind:
            raise UserError(f'{name} is an analysis of a {ANALYSES[name].of}, and "{folder}" holds a {kind}')
    out = Path(out) if out else folder / "analysis"
    if out.exists() and not out.is_dir():
        raise UserError(f'--out = "{out}" is not a folder')
    made = Made({}, {})
    with ExitStack() as held:
        of = compared.read(folder) if kind == "comparison" else held.enter_context(closing(Opened(folder)))
        for name in names or [name for name, analysis in ANALYSES.items() if analysis.of == kind]:
            try:
                found = ANALYSES[name].function(of, options or Options())
            except UserError as error:
                if names:
                    raise
                made.left_out[name] = str(error)
            else:
                if found.nothing and not names:
                    made.left_out[name] = found.nothing
                else:
                    made.files[name] = found.save(out, name)
    return made
