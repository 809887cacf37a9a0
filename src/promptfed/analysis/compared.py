"""Analyses of a comparison: all its finished runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..report import style
from ..report.runs import percent, spread
from .base import Found, Options
from .opened import Comparison, One

# A prompt's size, in the setting that says it; of pixels there are several kinds.
_SIZES = {"prompt_size": "pixels", "prompt_tokens": "soft tokens", "tokens": "tokens", "context": "context vectors"}


def _last(one: One) -> dict[str, Any]:
    found: dict[str, Any] = one.numbers["metrics"]["aggregated"]["last"]
    return found


# ---- global against worst


def scatter(comparison: Comparison, options: Options) -> Found:
    """SGPT's two goals: one run a point."""
    rows = [
        {
            "label": one.label,
            "seed": one.numbers.get("seed", 0),
            "method": one.numbers.get("method", ""),
            "global": _last(one)["global"],
            "worst": _last(one)["local"]["worst"],
            "local": _last(one)["local"]["mean"],
        }
        for one in comparison.runs
    ]
    known = [row for row in rows if row["global"] is not None and row["worst"] is not None]
    if not known:
        raise UserError("scatter: no run has both a global and a worst-client accuracy (see eval.pooled)")
    best = max(known, key=lambda row: row["global"] + row["worst"])
    left_out = len(rows) - len(known)
    text = (
        f"Accuracy on everybody's test data against that of the worst client on its own, of {len(known)} runs. "
        f"Highest sum: {best['label']} (global {100 * best['global']:.1f} %, worst {100 * best['worst']:.1f} %)."
    )
    if left_out:
        text += f" {left_out} without global accuracy left out."
    return Found(_scatter(comparison, known), rows, "Global against worst-client accuracy", text)


def _scatter(comparison: Comparison, rows: list[dict[str, Any]]) -> Figure:
    figure = style.blank(5.0)
    axes = figure.subplots()
    several = False
    for label, look in style.looks(dict.fromkeys(row["label"] for row in rows)).items():
        points = 100 * np.array([(row["global"], row["worst"]) for row in rows if row["label"] == label])
        several |= len(points) > 1
        if len(points) > 1:
            axes.plot(*points.T, look.marker, color=look.colour, markersize=4, alpha=0.5, markeredgewidth=0, zorder=3)
        mean = style.marks(look, 1, size=10) | {"linestyle": "none", "zorder": 4}
        axes.plot(*points.mean(0), label=style.plain(label, 20), **mean)
    style.dress(axes, x="global accuracy: everybody's test data (%)", y="worst client's accuracy (%)", grid="both")
    axes.margins(0.12)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    style.title(figure, comparison.setting + ("; large: mean over seeds" if several else ""))
    return figure


# ---- kind and size of prompts


def sweep(comparison: Comparison, options: Options) -> Found:
    """pFedPT, Fig. 8."""
    settings = [one.run.settings["method"] for one in comparison.runs]
    methods = {one["name"] for one in settings if not _SIZES.keys().isdisjoint(one)}
    rows = []
    for one in comparison.runs:
        kind, size = prompt(one.run.settings["method"], several=len(methods) > 1)
        rows.append(
            {
                "label": one.label,
                "seed": one.numbers.get("seed", 0),
                "kind": kind,
                "size": size,
                "local": _last(one)["local"]["mean"],
                "global": _last(one)["global"],
            }
        )
    prompts = {(row["kind"], row["size"]) for row in rows if row["size"] is not None}
    if len(prompts) < 2:
        raise UserError("sweep: the runs of the comparison do not differ in kind or size of a prompt")
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["size"] is not None))
    best = {kind: max(points(rows, kind), key=lambda point: point[1]) for kind in kinds}
    words = [f"{kind} {mean:.1f} % at {size:g}" for kind, (size, mean, _) in best.items()]
    text = f"Local accuracy after the last round, mean over clients and seeds. Best: {'; '.join(words)}."
    units = {unit for setting, unit in _SIZES.items() if any(setting in one for one in settings)}
    return Found(_sweep(comparison, rows, kinds, units), rows, "Accuracy over the size of the prompt", text)


def prompt(settings: dict[str, Any], several: bool = False) -> tuple[str, int | None]:
    """The kind of a method's prompt and its size; (name, None) without one. With `several` methods their names too."""
    size = next((key for key in _SIZES if key in settings), None)
    if size is None:
        return settings["name"], None
    kind = settings["prompt"] if size == "prompt_size" else _SIZES[size]
    return f"{settings['name']}: {kind}" if several else kind, settings[size]


def points(rows: list[dict[str, Any]], kind: str) -> list[tuple[int, float, float]]:
    """Size, mean and standard deviation over seeds of the local accuracy in per cent, by size."""
    sizes = sorted({row["size"] for row in rows if row["kind"] == kind})
    return [(s, *spread(percent(r["local"]) for r in rows if (r["kind"], r["size"]) == (kind, s))) for s in sizes]


def _sweep(comparison: Comparison, rows: list[dict[str, Any]], kinds: list[str], units: set[str]) -> Figure:
    figure = style.blank(4.6)
    axes = figure.subplots()
    levels = list(dict.fromkeys(row["kind"] for row in rows if row["size"] is None))
    shown = []
    for name, look in style.looks([*kinds, *levels]).items():
        if name in levels:
            level, _ = spread(percent(row["local"]) for row in rows if row["kind"] == name)
            label = f"{name} (no prompt)"
            axes.axhline(level, color=look.colour, linestyle=":", linewidth=1.8, label=style.plain(label, 20))
            shown.append(level)
            continue
        x, mean, std = np.array(points(rows, name)).T
        if std.any():
            axes.errorbar(x, mean, yerr=std, color=look.colour, capsize=3, linewidth=0, elinewidth=1.2)
        axes.plot(x, mean, label=style.plain(name, 20), **style.marks(look, len(x)))
        shown += [*(mean - std), *(mean + std)]
    sizes = sorted({row["size"] for row in rows if row["size"] is not None})
    if len(sizes) <= 12:
        axes.set_xticks(sizes)
    style.dress(
        axes, x=f"size of the prompt ({' or '.join(sorted(units))})", y="local test accuracy, mean over clients (%)"
    )
    style.percent_axis(axes, shown)
    seeds = len({row["seed"] for row in rows})
    style.title(figure, comparison.setting + (f"; bars: ± std over {seeds} seeds" if seeds > 1 else ""))
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure
