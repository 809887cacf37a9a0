"""Analyses of a comparison: all its finished runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..methods import parse
from ..report import style
from ..report.runs import percent, spread
from ..tuning import Full, HeadOnly, PrivatePrompt
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
        kind, unit, size = prompt(one.run.settings["method"], several=len(methods) > 1)
        rows.append(
            {
                "label": one.label,
                "seed": one.numbers.get("seed", 0),
                "kind": kind,
                "unit": unit,
                "size": size,
                "local": _last(one)["local"]["mean"],
                "global": _last(one)["global"],
            }
        )
    kinds = {row["kind"]: row["unit"] for row in rows if len({r["size"] for r in rows if r["kind"] == row["kind"]}) > 1}
    if not kinds:
        raise UserError("sweep: no prompt of the comparison was run at two sizes")
    best = {kind: max(points(rows, kind), key=lambda point: point[1]) for kind in kinds}
    words = [f"{kind} {mean:.1f} % at {size:g}" for kind, (size, mean, _) in best.items()]
    text = f"Local accuracy after the last round, mean over clients and seeds. Best: {'; '.join(words)}."
    return Found(_sweep(comparison, rows, kinds), rows, "Accuracy over the size of the prompt", text)


def prompt(settings: dict[str, Any], several: bool = False) -> tuple[str, str | None, int | None]:
    """The kind of a method's prompt, the unit of its size and the size, where that is a setting; otherwise its name.
    With `several` methods their names too."""
    size = next((key for key in _SIZES if key in settings), None)
    if size is None:
        return settings["name"], None, None
    kind = settings["prompt"] if size == "prompt_size" else _SIZES[size]
    return f"{settings['name']}: {kind}" if several else kind, _SIZES[size], settings[size]


def unprompted(name: str) -> bool:
    """Whether a method has no prompt at all, of whatever size."""
    try:
        recipe = parse(name)
    except UserError:  # a method of one's own that is not here any more
        return False
    return recipe.tuning in (Full, HeadOnly) and not any(issubclass(kind, PrivatePrompt) for kind in recipe.wrappers)


def points(rows: list[dict[str, Any]], kind: str) -> list[tuple[int, float, float]]:
    """Size, mean and standard deviation over seeds of the local accuracy in per cent, by size."""
    sizes = sorted({row["size"] for row in rows if row["kind"] == kind})
    return [(s, *spread(percent(r["local"]) for r in rows if (r["kind"], r["size"]) == (kind, s))) for s in sizes]


def _sweep(comparison: Comparison, rows: list[dict[str, Any]], kinds: dict[str, str]) -> Figure:
    """A panel for each unit, as sizes in different ones cannot be compared; with the methods that have no prompt."""
    figure = style.blank(4.6)
    units = list(dict.fromkeys(kinds.values()))
    panels = dict(zip(units, figure.subplots(1, len(units), sharey=True, squeeze=False)[0], strict=True))
    levels = [name for name in dict.fromkeys(r["kind"] for r in rows if r["size"] is None) if unprompted(name)]
    shown: list[float] = []
    for name, look in style.looks([*kinds, *levels]).items():
        label = style.plain(f"{name} (no prompt)" if name in levels else name, 20)
        if name in levels:
            level, _ = spread(percent(row["local"]) for row in rows if row["kind"] == name)
            for i, axes in enumerate(panels.values()):
                its = None if i else label
                axes.axhline(level, color=look.colour, linestyle=":", linewidth=1.8, label=its)
            shown.append(level)
            continue
        axes = panels[kinds[name]]
        x, mean, std = np.array(points(rows, name)).T
        if std.any():
            axes.errorbar(x, mean, yerr=std, color=look.colour, capsize=3, linewidth=0, elinewidth=1.2)
        axes.plot(x, mean, label=label, **style.marks(look, len(x)))
        shown += [*(mean - std), *(mean + std)]
    for unit, axes in panels.items():
        sizes = sorted({row["size"] for row in rows if row["kind"] in kinds and row["unit"] == unit})
        if len(sizes) <= 12:
            axes.set_xticks(sizes)
        y = "local test accuracy, mean over clients (%)" if unit == units[0] else ""
        style.dress(axes, x=f"size of the prompt ({unit})", y=y)
        style.percent_axis(axes, shown)
    seeds = len({row["seed"] for row in rows})
    style.title(figure, comparison.setting + (f"; bars: ± std over {seeds} seeds" if seeds > 1 else ""))
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure
