"""The pictures of a run and of a comparison, as PNG files in their folders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data import Federation
from ..errors import UserError
from ..runs.opened import Run
from . import gather, images, prompts, run_charts, style
from .charts import accuracies, communication, curves
from .gather import Group, ReportData
from .numbers import MEASURES, listed

_PARTITIONS = 6  # pictures of a comparison

if TYPE_CHECKING:
    from ..runs.api import Result


def draw_run(folder: Path) -> list[Path]:
    """curves.png, partition.png and prompts.png, as far as the run has come; returns those drawn.

    Where the dataset is gone, the pictures that need it are left out with a warning.
    """
    run = Run(folder)
    curves = run_charts.curves(run)
    drawn = [style.save(curves, folder / "curves.png")] if curves else []
    federation = _federation(run)
    if federation is None:
        return drawn
    drawn.append(style.save(run_charts.partition(federation), folder / "partition.png"))
    return [*drawn, *_prompts(run, folder)]


def draw_comparison(
    out: Path, results: Mapping[str, Sequence[Result]], places: Mapping[str, tuple[str, str]] | None = None
) -> list[Path]:
    """comparison.png, curves.png, communication.png; partition.png, partition-2.png, ... of each different partition;
    prompts.png of the first run that has them.

    `places`: row and column of each label, in a table with columns, which has too many lines for pictures of curves and
    communication.
    """
    groups = [
        Group(label, [gather.read(one.folder, label, out, []) for one in each])
        for label, each in results.items()
        if each
    ]
    if not groups:
        return []
    out.mkdir(parents=True, exist_ok=True)
    found = ReportData(groups, [], places=dict(places or {}))
    drawn = [style.save(chart, out / name) for name, chart in _charts(found).items()]
    drawn += _partitions(found, out)
    for name in ("curves.png", "communication.png", *(path.name for path in out.glob("partition-*.png"))):
        if out / name not in drawn:
            (out / name).unlink(missing_ok=True)  # of what the comparison was before
    prompted = (_prompts(entry.run, out) for entry in found.entries)
    return drawn + next(filter(None, prompted), [])


def draw_partition(federation: Federation, path: Path) -> Path:
    """A heat map of who holds which classes, as .png, .svg, .pdf or .jpg."""
    style.check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return style.save(run_charts.partition(federation), path)


def _charts(found: ReportData) -> dict[str, style.Chart]:
    """By file name, with their titles. What was evaluated once has no curves."""
    settings = {entry.run.setting for entry in found.entries}
    setting = settings.pop() if len(settings) == 1 else ""
    seeds = "; ± std over seeds" if found.several_seeds else ""
    last = max(entry.run.last for entry in found.entries)
    after = f"{setting}; after {last} round{'s' if last > 1 else ''}".removeprefix("; ")
    local = MEASURES["local"].title + seeds
    legend = f"dots: clients; bar: their mean; diamond: all clients' test data{seeds}"
    made = {"comparison.png": (accuracies(found), after, legend)}
    if not found.places:
        if any(len(entry.run.scored) > 1 for entry in found.entries):
            made["curves.png"] = (curves(found)[0], setting, local)
        made["communication.png"] = (communication(found), setting, f"{local}; dotted: exchanges nothing")
    return {name: style.titled(chart, title, below) for name, (chart, title, below) in made.items() if chart}


def _partitions(found: ReportData, out: Path) -> list[Path]:
    """A picture of each different partition of the first seed; whose it is stands in its title."""
    each: dict[bytes, list[Group]] = {}
    for group in found.groups:
        file = group.first.run.folder / "partition.json"
        if file.exists():
            each.setdefault(file.read_bytes(), []).append(group)
    drawn = []
    for number, groups in enumerate(list(each.values())[:_PARTITIONS], 1):
        federation = _federation(groups[0].first.run)
        if federation is None:
            continue
        whose = _whose([group.label for group in groups], found.places) if len(each) > 1 else ""
        path = out / ("partition.png" if number == 1 else f"partition-{number}.png")
        drawn.append(style.save(run_charts.partition(federation, whose), path))
    return drawn


def _whose(labels: Sequence[str], places: Mapping[str, tuple[str, str]]) -> str:
    """CIFAR-100, s=10"""
    names = list(dict.fromkeys(places[label][1] if label in places else label for label in labels))
    return listed(names, 2)


def _federation(run: Run) -> Federation | None:
    file = run.folder / "partition.json"
    if not file.exists():
        return None
    try:
        return run.federation
    except UserError as error:
        warnings.warn(f"no picture of the partition and the prompts: {error}", stacklevel=3)
        return None


def _prompts(run: Run, folder: Path) -> list[Path]:
    try:
        found = prompts.read(run)
    except UserError as error:  # LMDB cannot be opened twice by one process: the run may be going on in this one
        warnings.warn(f"no picture of the prompts: {error}", stacklevel=3)
        return []
    return [images.save(prompts.draw(run, found), folder / "prompts.png")] if found else []
