"""Analyses of a comparison: all its finished runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from ..errors import UserError
from ..methods import parse
from ..report import marks, style
from ..report.gather import SeedRun, gather
from ..runs.cells import in_percent, spread
from ..tuning import Full, PrivatePrompt
from ..tunings.heads import HeadOnly
from . import Found, Options

# The setting that holds a prompt's size, and its unit; of pixels there are several kinds.
_SIZES = {"prompt_size": "pixels", "prompt_tokens": "soft tokens", "tokens": "tokens", "context": "context vectors"}


_LAYERS = "last layer with prompts"


def read(folder: Path) -> list[SeedRun]:
    """All finished runs of a comparison, in the order of its table."""
    found, table = gather([folder]), folder / "table.json"
    if any(problem.startswith(str(table)) for problem in found.problems):
        raise UserError(f'"{table}" is not the table of a comparison; repeat the command that wrote it')
    return [entry for entry in found.entries if entry.run.result]


def _setting(runs: Sequence[SeedRun]) -> str:
    settings = {one.run.setting for one in runs}
    return settings.pop() if len(settings) == 1 else runs[0].origin.name


def _last(one: SeedRun) -> dict[str, Any]:
    found: dict[str, Any] = one.numbers["metrics"]["aggregated"]["last"]
    return found


# ---- global against worst


def scatter(runs: Sequence[SeedRun], options: Options) -> Found:
    """SGPT's two goals: each run is a point."""
    rows = [
        {
            "label": one.label,
            "seed": one.seed,
            "method": one.numbers.get("method", ""),
            "global": _last(one)["global"],
            "worst": _last(one)["local"]["worst"],
            "local": _last(one)["local"]["mean"],
        }
        for one in runs
    ]
    known = [row for row in rows if row["global"] is not None and row["worst"] is not None]
    if not known:
        raise UserError("scatter: no run has both a global and a worst-client accuracy (see eval.pooled)")
    best = max(known, key=lambda row: row["global"] + row["worst"])
    text = (
        f"Accuracy on all clients' test data against the worst client's on its own, of {len(known)} runs. "
        f"Highest sum: {best['label']} (global {100 * best['global']:.1f} %, worst {100 * best['worst']:.1f} %)."
    )
    if len(known) < len(rows):
        text += f" {len(rows) - len(known)} without global accuracy left out."
    looks = style.looks(dict.fromkeys(row["label"] for row in known))
    points = [{"label": row["label"], "x": 100 * row["global"], "y": 100 * row["worst"]} for row in known]
    base = marks.data(points).encode(*marks.by_label(looks, alt.Color, alt.Shape))
    across, up = (_around([point[axis] for point in points]) for axis in "xy")
    x: dict[str, Any] = {"title": "global accuracy: all clients' test data (%)", "scale": across}
    x["axis"] = alt.Axis(grid=True)
    y: dict[str, Any] = {"title": "worst client's accuracy (%)", "scale": up}
    layers = [base.mark_point(filled=True, size=25, opacity=0.5).encode(alt.X("x:Q", **x), alt.Y("y:Q", **y))]
    large = base.mark_point(filled=True, size=150, opacity=1)
    layers.append(large.encode(alt.X("mean(x):Q", **x), alt.Y("mean(y):Q", **y)))
    both = alt.layer(*layers).properties(height=330)
    chart = style.titled(both, _setting(runs), "small: runs; large: mean over seeds")
    return Found(chart, rows, "Global against worst-client accuracy", text)


def _around(accuracies: Sequence[float]) -> alt.Scale:
    """A little more than the range of the values, within 0 to 100 %."""
    low, high = min(accuracies), max(accuracies)
    more = max(2.0, 0.05 * (high - low))
    return alt.Scale(domain=[max(0.0, low - more), min(100.0, high + more)], nice=True, zero=False)


# ---- kind and size of prompts


def sweep(runs: Sequence[SeedRun], options: Options) -> Found:
    """pFedPT, Fig. 8; SGPT, Fig. 4."""
    settings = [one.run.settings["method"] for one in runs]
    several = len({one["name"] for one in settings if not _SIZES.keys().isdisjoint(one)}) > 1
    of_layers = all("group_layers" in method for method in settings)
    rows = []
    for one, method in zip(runs, settings, strict=True):
        kind, unit, size = prompt(method, several)
        row = {"label": one.label, "seed": one.seed, "kind": kind, "unit": unit, "size": size}
        # SGPT's number, for its one model; others are compared by the clients' own.
        drawn = one.numbers["metrics"]["aggregated"]["mean_of_last_10"]["global"] if of_layers else None
        local = _last(one)["local"]["mean"]
        rows.append({**row, "local": local, "global": _last(one)["global"], "drawn": local if drawn is None else drawn})
    kinds = {row["kind"]: row["unit"] for row in rows if len({r["size"] for r in rows if r["kind"] == row["kind"]}) > 1}
    if not kinds:
        raise UserError("sweep: no prompt of the comparison was run at two sizes")
    best = {kind: max(points(rows, kind), key=lambda point: point[1]) for kind in kinds}
    words = [f"{kind} {mean:.1f} % at {size:g}" for kind, (size, mean, _) in best.items()]
    what = "Accuracy on all clients' test data, mean of the last ten rounds and over seeds"
    what = what if of_layers else "Local accuracy after the last round, mean over clients and seeds"
    text = f"{what}. Best: {'; '.join(words)}."
    seeds = len({row["seed"] for row in rows})
    chart = style.titled(_sweep(rows, kinds), _setting(runs), f"bars: ± std over {seeds} seeds" if seeds > 1 else "")
    return Found(chart, rows, "Accuracy over the size of the prompt", text)


def prompt(settings: dict[str, Any], several: bool) -> tuple[str, str | None, int | None]:
    """The kind of a method's prompt, the unit of its size and the size, where that is a setting; otherwise its name.
    With `several` methods the kind begins with the method's name."""
    if "group_layers" in settings:  # SGPT, Fig. 4: how deep shared prompts go, or the group prompts after them
        kind = "shared" if settings["training"] == "shared" else "group"
        return f"{kind} prompts", _LAYERS, max(settings[f"{kind}_layers"]) + 1
    size = next((key for key in _SIZES if key in settings), None)
    if size is None:
        return settings["name"], None, None
    kind = settings["prompt"] if size == "prompt_size" else _SIZES[size]
    return f"{settings['name']}: {kind}" if several else kind, _SIZES[size], settings[size]


def unprompted(name: str) -> bool:
    """Whether a method has no prompt of any size."""
    try:
        recipe = parse(name)
    except UserError:  # a user's method that is no longer registered
        return False
    return recipe.tuning in (Full, HeadOnly) and not any(issubclass(kind, PrivatePrompt) for kind in recipe.wrappers)


def points(rows: list[dict[str, Any]], kind: str) -> list[tuple[int, float, float]]:
    """Size, mean and standard deviation over seeds of the drawn accuracy in per cent, by size."""
    sizes = sorted({row["size"] for row in rows if row["kind"] == kind})
    return [(s, *spread(in_percent(r["drawn"]) for r in rows if (r["kind"], r["size"]) == (kind, s))) for s in sizes]


def _sweep(rows: list[dict[str, Any]], kinds: dict[str, str]) -> style.Chart:
    """A panel for each unit, as sizes in different ones cannot be compared; with the methods that have no prompt."""
    none = [name for name in dict.fromkeys(row["kind"] for row in rows if row["size"] is None) if unprompted(name)]
    looks = style.looks([*kinds, *(f"{name} (no prompt)" for name in none)])
    colour, shape, dash = marks.by_label(looks, alt.Color, alt.Shape, alt.StrokeDash)
    levels = [{"label": f"{name} (no prompt)", "mean": points(rows, name)[0][1]} for name in none]
    units = list(dict.fromkeys(kinds.values()))
    panels = []
    for unit in units:
        here: list[dict[str, Any]] = [
            {"label": kind, "size": size, "mean": mean, "low": mean - std, "high": mean + std}
            for kind in kinds
            if kinds[kind] == unit
            for size, mean, std in points(rows, kind)
        ]
        axis, scale = alt.Axis(tickMinStep=1), alt.Scale(zero=False, padding=12)
        across = unit if unit == _LAYERS else f"size of the prompt ({unit})"
        x = alt.X("size:Q", title=across, axis=axis, scale=scale)
        whose = (
            "test accuracy, all clients' data (%)" if unit == _LAYERS else "local test accuracy, mean over clients (%)"
        )
        title = whose if unit == units[0] else None
        up: dict[str, Any] = {"title": title, "scale": marks.NEAR}
        base = marks.data(here).encode(x, colour)
        layers = [
            marks.data(levels).mark_rule(strokeDash=[2, 4], strokeWidth=2).encode(alt.Y("mean:Q", **up), colour),
            base.mark_rule(strokeWidth=1.5).encode(alt.Y("low:Q", **up), alt.Y2("high:Q")),
            base.mark_line(strokeWidth=2).encode(alt.Y("mean:Q", **up), dash),
            base.mark_point(filled=True, size=70, opacity=1).encode(alt.Y("mean:Q", **up), shape),
        ]
        panels.append(alt.layer(*layers).properties(width=style.WIDTH / len(units)))
    chart: style.Chart = alt.hconcat(*panels).resolve_scale(y="shared")
    return chart


# ---- one client after the other


def clients(runs: Sequence[SeedRun], options: Options) -> Found:
    """DP2FL, Fig. 4: of each method a panel, the mean of all its runs."""
    methods: dict[str, list[SeedRun]] = {}
    for one in runs:
        methods.setdefault(one.numbers.get("method", ""), []).append(one)
    rows = []
    for method, its in methods.items():
        scored = [row for one in its for row in one.numbers.get("clients", {}).get("aggregated", ())]
        for client in sorted({row["client"] for row in scored}):
            own = [row for row in scored if row["client"] == client]
            means = {key: spread(in_percent(row[key]) for row in own)[0] for key in ("accuracy", "macro_f1")}
            rows.append({"method": method, "client": client, "runs": len(its), **means})
    known = [row for row in rows if not math.isnan(row["accuracy"])]
    if not known:
        raise UserError("clients: no client of the comparison has test data")
    words = []
    for method in dict.fromkeys(row["method"] for row in known):
        each = [row["accuracy"] for row in known if row["method"] == method]
        words.append(f"{method} {min(each):.1f} to {max(each):.1f} %")
    text = (
        f"Accuracy and macro F1 of each client on its own test data, means over datasets and seeds: {'; '.join(words)}."
    )
    colours = {"accuracy": style.BLUE, "macro F1": style.LIGHT}
    bars = [
        {"method": row["method"], "client": row["client"], "kind": kind, "value": row[key]}
        for row in known
        for kind, key in (("accuracy", "accuracy"), ("macro F1", "macro_f1"))
    ]
    base = (
        marks.data(bars)
        .mark_bar()
        .encode(
            alt.X("client:O", title="client", axis=alt.Axis(labelAngle=0)),
            alt.Y("value:Q", title="%", scale=alt.Scale(domain=[0, 100])),
            alt.Row("method:N", title=None, sort=list(methods)),
            marks.by_colour(colours),
            xOffset=alt.XOffset("kind:N", sort=list(colours)),
        )
    )
    chart = style.titled(
        base.properties(width=style.WIDTH, height=110), _setting(runs), "means over datasets and seeds"
    )
    return Found(chart, rows, "Accuracy and F1 of each client", text)
