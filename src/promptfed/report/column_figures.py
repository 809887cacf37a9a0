"""Pictures of a comparison that has columns: methods on several datasets, splits or backbones, as a paper's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import style
from .comparison_figures import Runs, climbs, lines, runs_of
from .runs import Run, spread

Places = Mapping[str, tuple[str, str]]  # label -> row and column
_SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#6baed6"])
_BESIDE = 3  # panels in a line


def names(places: Places) -> tuple[list[str], list[str]]:
    """-> rows, columns"""
    rows, columns = (list(dict.fromkeys(place[i] for place in places.values())) for i in (0, 1))
    return rows, columns


def matrix(runs: Runs, places: Places) -> Figure:
    """The last round's local accuracy, a method a row. Shades are of a column: columns are not equally hard."""
    rows, columns = names(places)
    score = np.full((len(rows), len(columns)), np.nan)
    std = np.zeros_like(score)
    for label, (row, column) in places.items():
        last = [run.series("local", "mean")[1] for run in runs.get(label, ())]
        score[rows.index(row), columns.index(column)], std[rows.index(row), columns.index(column)] = spread(
            float(values[-1]) for values in last if len(values)
        )
    figure = style.blank(1.6 + 0.3 * len(rows))
    axes = figure.subplots()
    low, high = (np.nan_to_num(edge) for edge in _edges(score))
    axes.imshow((score - low) / np.maximum(high - low, 1e-9), cmap=_SHADES, aspect="auto", vmin=0, vmax=1)
    for (i, j), value in np.ndenumerate(score):
        best = value == high[j] > low[j]
        text = "-" if value != value else f"{value:.1f}" + (f"\n± {std[i, j]:.1f}" if std[i, j] else "")
        axes.text(j, i, text, ha="center", va="center", fontsize=8.5, fontweight="bold" if best else "normal")
    axes.set_xticks(range(len(columns)), [style.plain(name.replace(", ", ",\n")) for name in columns])
    axes.set_yticks(range(len(rows)), [style.plain(name, 26) for name in rows])
    axes.tick_params(length=0, labelsize=9, labeltop=True, labelbottom=False)
    axes.tick_params(axis="x", labelsize=9 if len(columns) <= 8 else 6.5)
    axes.spines[:].set_visible(False)
    style.title(figure, "local test accuracy of the last round, mean over clients (%)")
    return figure


def _edges(score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each column the least and the greatest value; none of a number where there is no value."""
    empty = np.isnan(score).all(0)
    low, high = np.where(np.isnan(score), np.inf, score).min(0), np.where(np.isnan(score), -np.inf, score).max(0)
    return np.where(empty, np.nan, low), np.where(empty, np.nan, high)


def panels(runs: Runs, places: Places) -> Figure | None:
    """Local accuracy over rounds, a panel for each column; a method looks the same in all of them. Nothing where every
    run was evaluated once."""
    if not climbs(runs):
        return None
    rows, columns = names(places)
    looks = style.looks(rows)
    beside = min(_BESIDE, len(columns))
    down = -(-len(columns) // beside)
    figure = style.blank(0.9 + 2.3 * down + 0.2 * -(-len(rows) // 4), gap=0.06)
    grid = figure.subplots(down, beside, squeeze=False).ravel()
    handles: dict[str, Line2D] = {}
    for axes, column in zip(grid, columns, strict=False):
        here = {row: _runs(runs, places, row, column) for row in rows}
        drawn, shown = lines(axes, here, looks)
        handles |= drawn
        style.dress(axes)
        style.rounds_axis(axes, max((run.last for run in runs_of(here)), default=1))
        style.percent_axis(axes, shown)
        axes.set_title(style.plain(column, 34), fontsize=9, loc="left")
    for axes in grid[len(columns) :]:
        axes.set_visible(False)
    for axes in grid[: len(columns)][-beside:]:
        axes.set_xlabel("communication round", fontsize=9)
    style.title(figure, "local test accuracy, mean over clients (%)")
    named = [row for row in rows if row in handles]
    figure.legend(
        [handles[row] for row in named],
        [style.plain(row, 30) for row in named],
        loc="outside lower center",
        ncols=4,
        fontsize=9,
        frameon=False,
    )
    return figure


def _runs(runs: Runs, places: Places, row: str, column: str) -> Sequence[Run]:
    return next((runs[label] for label, place in places.items() if place == (row, column) and label in runs), ())
