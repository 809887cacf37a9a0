"""The pictures of a run and of a comparison, as PNG files in their folders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ..data import Federation, heatmap
from ..errors import UserError
from ..runs import build
from ..runs import config as C
from . import column_figures, comparison_figures, prompts, run_figures, style
from .runs import Run

_PARTITIONS = 6  # pictures of a comparison

if TYPE_CHECKING:
    from ..runs.api import Result


def draw_run(folder: Path, federation: Federation | None = None) -> list[Path]:
    """curves.png, clients.png, partition.png and prompts.png, as far as the run has come; -> those that were drawn.

    `federation` is at hand where the run has just been made; otherwise it is loaded again. Where the dataset is gone,
    the pictures that need it are left out with a warning.
    """
    run = Run.read(folder)
    drawn = []
    for name, figure in (("curves.png", run_figures.curves(run)), ("clients.png", run_figures.clients(run))):
        if figure:
            drawn.append(style.save(figure, folder / name))
    federation = federation or _federation(run)
    if federation is None:
        return drawn
    heatmap.draw(federation, folder / "partition.png")
    return [*drawn, folder / "partition.png", *_prompts(run, federation, folder)]


def draw_comparison(
    out: Path, results: Mapping[str, Sequence[Result]], places: column_figures.Places | None = None
) -> list[Path]:
    """comparison.png, curves.png, communication.png; partition.png, partition-2.png, ... of each different partition;
    prompts.png of the first run that has them.

    `places`: of labels in a table with columns, which costs too many lines for one picture of communication.
    """
    results = {label: found for label, found in results.items() if found}
    if not results:
        return []
    out.mkdir(parents=True, exist_ok=True)
    runs = {label: [Run.read(one.folder) for one in found] for label, found in results.items()}
    figures = _of_columns(runs, places) if places else _of_labels(runs, results)
    drawn = [style.save(figure, out / name) for name, figure in figures.items() if figure]
    drawn += _partitions(runs, places or {}, out)
    for name in ("curves.png", *(path.name for path in out.glob("partition-*.png"))):
        if out / name not in drawn:
            (out / name).unlink(missing_ok=True)  # of what the comparison was before
    for run in comparison_figures.runs_of(runs):
        if prompted := _prompts(run, None, out):
            return drawn + prompted
    return drawn


def _partitions(runs: comparison_figures.Runs, places: column_figures.Places, out: Path) -> list[Path]:
    """A picture of each different partition of the first seed; whose it is stands in its title."""
    each: dict[bytes, list[str]] = {}
    for label, found in runs.items():
        file = found[0].folder / "partition.json"
        if file.exists():
            each.setdefault(file.read_bytes(), []).append(label)
    drawn = []
    for number, labels in enumerate(list(each.values())[:_PARTITIONS], 1):
        federation = _federation(runs[labels[0]][0])
        if federation is None:
            continue
        if len(each) > 1:
            federation = replace(federation, about={**federation.about, "kind": _whose(federation, labels, places)})
        path = out / ("partition.png" if number == 1 else f"partition-{number}.png")
        heatmap.draw(federation, path)
        drawn.append(path)
    return drawn


def _whose(federation: Federation, labels: Sequence[str], places: column_figures.Places) -> str:
    """disjoint (CIFAR-100, s=10)"""
    names = list(dict.fromkeys(places[label][1] if label in places else label for label in labels))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return style.plain(f"{federation.about.get('kind', 'custom')} ({'; '.join(names[:2])}{more})", 60)


def _of_columns(runs: comparison_figures.Runs, places: column_figures.Places) -> dict[str, Figure | None]:
    here = {label: place for label, place in places.items() if label in runs}
    return {
        "comparison.png": column_figures.matrix(runs, here),
        "curves.png": column_figures.panels(runs, here),
    }


def _of_labels(runs: comparison_figures.Runs, results: Mapping[str, Sequence[Result]]) -> dict[str, Figure | None]:
    settings = {run.setting for run in comparison_figures.runs_of(runs)}
    setting = settings.pop() if len(settings) == 1 else ""
    return {
        "comparison.png": comparison_figures.bars({k: [one.numbers for one in v] for k, v in results.items()}, setting),
        "curves.png": comparison_figures.curves(runs, setting),
        "communication.png": comparison_figures.communication(runs, setting),
    }


def _federation(run: Run) -> Federation | None:
    file = run.folder / "partition.json"
    if not file.exists():
        return None
    try:
        return build.split(C.make(run.settings), file)
    except UserError as error:
        warnings.warn(f"no picture of the partition and the prompts: {error}", stacklevel=3)
        return None


def _prompts(run: Run, federation: Federation | None, folder: Path) -> list[Path]:
    """`federation`: loaded where it is not at hand and there is something to draw."""
    try:
        tuning = prompts.pixel_prompt(run) if run.settings else None
        federation = federation or (_federation(run) if tuning else None)
        found = prompts.read(run, tuning, federation.dataset) if tuning and federation else None
    except UserError as error:  # LMDB cannot be opened twice by one process: the run may be going on in this one
        warnings.warn(f"no picture of the prompts: {error}", stacklevel=3)
        return []
    return [style.save(prompts.draw(run, found), folder / "prompts.png")] if found else []
