"""The pictures of a run and of a comparison, as PNG files in their folders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from .. import config as C
from ..data import Federation, heatmap, load
from ..errors import UserError
from . import column_figures, comparison_figures, prompts, run_figures, style
from .runs import Run

if TYPE_CHECKING:
    from ..api import Result


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
    return drawn + _partition(federation, folder) + _prompts(run, federation, folder)


def draw_comparison(
    out: Path, results: Mapping[str, Sequence[Result]], places: column_figures.Places | None = None
) -> list[Path]:
    """comparison.png, curves.png, communication.png; partition.png and prompts.png of the first run that has them.

    `places`: of labels in a table with columns, which costs too many lines for one picture of communication.
    """
    results = {label: found for label, found in results.items() if found}
    if not results:
        return []
    out.mkdir(parents=True, exist_ok=True)
    runs = {label: [Run.read(one.folder) for one in found] for label, found in results.items()}
    first = next(iter(runs.values()))[0]
    figures = _of_columns(runs, places) if places else _of_labels(runs, results)
    drawn = [style.save(figure, out / name) for name, figure in figures.items() if figure]
    federation = _federation(first)
    drawn += _partition(federation, out)
    for run in (run for found in runs.values() for run in found):
        prompted = _prompts(run, federation, out)
        if prompted:
            return drawn + prompted
    return drawn


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
        return Federation.load(file, load(C.make(run.settings).dataset))
    except UserError as error:
        warnings.warn(f"no picture of the partition and the prompts: {error}", stacklevel=3)
        return None


def _partition(federation: Federation | None, folder: Path) -> list[Path]:
    if federation is None:
        return []
    heatmap.draw(federation, folder / "partition.png")
    return [folder / "partition.png"]


def _prompts(run: Run, federation: Federation | None, folder: Path) -> list[Path]:
    if federation is None or not run.settings:
        return []
    try:
        tuning = prompts.pixel_prompt(run)
        found = prompts.read(run, tuning, federation.dataset) if tuning else None
    except UserError as error:  # LMDB cannot be opened twice by one process: the run may be going on in this one
        warnings.warn(f"no picture of the prompts: {error}", stacklevel=3)
        return []
    return [style.save(prompts.draw(run, found), folder / "prompts.png")] if found else []
