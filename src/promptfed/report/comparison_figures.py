"""Pictures of several methods side by side. Each function builds a figure and saves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import style
from .runs import Run, percent, spread
from .style import Look

Runs = Mapping[str, Sequence[Run]]  # label -> a run for each seed


def bars(numbers: Mapping[str, Sequence[Mapping[str, Any]]], setting: str) -> Figure:
    """The last round's local accuracy of every label, best on top. `numbers`: the result.json of each seed's run."""
    looks = style.looks(numbers)
    scores = {label: [n["metrics"]["aggregated"]["last"] for n in each] for label, each in numbers.items()}
    local = {label: spread(percent(s["local"]["mean"]) for s in each) for label, each in scores.items()}
    order = sorted(local, key=lambda label: (np.nan_to_num(local[label][0], nan=-1.0), label))
    figure = style.blank(1.7 + 0.42 * len(order))
    axes = figure.subplots()
    ends = [1.0]
    for y, label in enumerate(order):
        mean, std = local[label]
        worst, _ = spread(percent(s["local"]["worst"]) for s in scores[label])
        wide, _ = spread(percent(s["global"]) for s in scores[label])
        if mean == mean:
            axes.barh(y, mean, height=0.62, color=looks[label].colour, linewidth=0)
            if std:
                axes.errorbar(mean, y, xerr=std, color="0.15", capsize=3, linewidth=1.2, zorder=5)
        for value, marker, size in ((worst, "v", 7.0), (wide, "o", 6.5)):
            if value == value:
                axes.plot(
                    value, y, marker, markersize=size, color="white", markeredgecolor="0.1", zorder=4, clip_on=False
                )
        text = "-" if mean != mean else f"{mean:.1f} ± {std:.1f} %" if std else f"{mean:.1f} %"
        axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=10)
        ends += [value for value in (mean + std, wide) if value == value]
    axes.set_yticks(range(len(order)), [style.plain(label, 26) for label in order])
    style.dress(axes, x="test accuracy (%)", grid="x")
    axes.tick_params(axis="y", labelsize=10, length=0, pad=7)
    axes.set_xlim(0, min(100.0, 1.05 * max(ends)))
    axes.set_ylim(-0.6, len(order) - 0.4)
    rounds = max(score["round"] for each in scores.values() for score in each)
    style.title(figure, f"{setting}; after {rounds} round{'s' if rounds > 1 else ''}".removeprefix("; "))
    parts: list[Artist] = [
        Patch(color="0.55"),
        Line2D([], [], marker="v", linestyle="none", color="white", markeredgecolor="0.1", markersize=7),
        Line2D([], [], marker="o", linestyle="none", color="white", markeredgecolor="0.1", markersize=6.5),
    ]
    names = ["local: mean over clients", "worst client", "global: everybody's test data"]
    if any(std for _, std in local.values()):
        parts.append(Line2D([], [], color="0.15", marker="|", markersize=7, linewidth=1.2))
        names.append("± std over seeds")
    figure.legend(parts, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False, columnspacing=1.2)
    return figure


def curves(runs: Runs, setting: str) -> Figure | None:
    """Local accuracy over rounds; nothing where every run was evaluated once, as `bars` says that."""
    if not climbs(runs):
        return None
    figure = style.blank(4.6)
    axes = figure.subplots()
    handles, shown = lines(axes, runs, style.looks(runs))
    style.dress(axes, x="communication round", y="local test accuracy, mean over clients (%)")
    style.rounds_axis(axes, max((run.last for run in runs_of(runs)), default=1))
    style.percent_axis(axes, shown)
    style.title(figure, setting + _band(runs))
    _legend(figure, handles)
    return figure


def lines(axes: Axes, runs: Runs, looks: Mapping[str, Look]) -> tuple[dict[str, Line2D], list[float]]:
    """Draws local accuracy over rounds; -> the lines, and the values that are to be seen"""
    handles: dict[str, Line2D] = {}
    shown: list[float] = []
    for label, each in runs.items():
        at, mean, std = _over_seeds(each)
        if np.isfinite(mean).any():
            handles[label] = _line(axes, looks[label], at, mean, std)
            shown += [*(mean - std), *(mean + std)]
    return handles, shown


def climbs(runs: Runs) -> bool:
    """Whether there is a line to draw."""
    return any(len(run.scored) > 1 for run in runs_of(runs))


def runs_of(runs: Runs) -> list[Run]:
    return [run for each in runs.values() for run in each]


def communication(runs: Runs, setting: str) -> Figure | None:
    """Local accuracy over what a client has exchanged with the server. Who exchanges nothing is a level to beat.

    Nothing where nobody exchanges anything.
    """
    figure = style.blank(4.6)
    axes = figure.subplots()
    handles, shown, names = {}, [], {}
    totals = []
    for label, look in style.looks(runs).items():
        at, mean, std = _over_seeds(runs[label])
        if not np.isfinite(mean).any():
            continue
        sent = [run.sent() for run in runs[label]]
        cost = np.array([np.mean([one[round] for one in sent if round in one]) for round in at])
        if cost[-1] == 0:
            level = mean[np.isfinite(mean)][-1]
            handles[label] = axes.axhline(level, color=look.colour, linestyle=":", linewidth=1.8)
            names[label] = f"{label} (exchanges nothing)"
            shown.append(level)
        else:
            handles[label] = _line(axes, look, cost, mean, std)
            shown += [*(mean - std), *(mean + std)]
            totals.append(cost[-1])
    if not totals:
        return None
    if max(totals) > 30 * min(totals):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_xlim(0, 1.04 * max(totals))
    x = "exchanged with the server per client so far (MB, up and down)"
    style.dress(axes, x=x, y="local test accuracy, mean over clients (%)")
    style.percent_axis(axes, shown)
    style.title(figure, setting + _band(runs))
    _legend(figure, handles, names)
    return figure


def _band(runs: Runs) -> str:
    return "; bands: ± std over seeds" if any(len(each) > 1 for each in runs.values()) else ""


def _over_seeds(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds that any of the runs evaluated; mean and standard deviation of the local accuracy in per cent."""
    found: dict[float, list[float]] = {}
    for run in runs:
        for round, value in zip(*run.series("local", "mean"), strict=True):
            found.setdefault(float(round), []).append(float(value))
    rounds = sorted(found)
    table = np.array([spread(found[round]) for round in rounds]).reshape(-1, 2)
    return np.array(rounds), table[:, 0], table[:, 1]


def _line(axes: Axes, look: Look, x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Line2D:
    if len(x) > 1 and std.any():
        axes.fill_between(x, mean - std, mean + std, color=look.colour, alpha=0.15, linewidth=0)
    elif std.any():
        axes.errorbar(x, mean, yerr=std, color=look.colour, capsize=3, linewidth=1.2)
    return axes.plot(x, mean, **style.marks(look, len(x)))[0]


def _legend(figure: Figure, handles: Mapping[str, Line2D], names: Mapping[str, str] | None = None) -> None:
    """Beside the axes, in the order of the lines' right ends."""

    def end(label: str) -> float:
        y = np.asarray(handles[label].get_ydata(), float)
        return float(y[np.isfinite(y)][-1])

    order = sorted(handles, key=end, reverse=True)
    words = [style.plain((names or {}).get(label, label), 20) for label in order]
    figure.legend([handles[label] for label in order], words, loc="outside right upper", fontsize=9, frameon=False)
