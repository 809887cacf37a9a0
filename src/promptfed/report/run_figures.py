"""Pictures of one run. Each function builds a figure from what is on record and saves nothing."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import style
from .runs import Run, percent
from .style import BLUE, GREEN, GREY, VERMILION, Look

_NAMED = 40  # clients up to which each one has a bar and a name


def curves(run: Run) -> Figure | None:
    """Accuracy of the evaluated rounds and the training loss of all of them; nothing before the first round is over."""
    if not run.lines:
        return None
    if any(run.accuracies(line) for line in run.scored):
        figure = style.blank(5.6)
        accuracy, loss = figure.subplots(2, 1, sharex=True, height_ratios=[5, 2])
        _accuracy(accuracy, run)
        style.title(figure, run.title)
    else:
        figure = style.blank(2.8)
        loss = figure.subplots()
        style.title(figure, f"{run.title}; no test accuracy {'known' if run.scored else 'yet'}")
    _loss(loss, run)
    return figure


def _accuracy(axes: Axes, run: Run) -> None:
    rounds, mean = run.series("local", "mean")
    each = [list(run.accuracies(line).values()) for line in run.scored]
    bands = np.array([np.percentile(one, [0, 25, 75, 100]) if one else [math.nan] * 4 for one in each])
    # A single round has no breadth to fill: its bands are drawn as bars.
    for low, high, alpha, width, label in (
        (0, 3, 0.13, 4, "worst to best client"),
        (1, 2, 0.28, 8, "middle half of the clients"),
    ):
        if len(rounds) > 1:
            axes.fill_between(rounds, bands[:, low], bands[:, high], color=BLUE, alpha=alpha, linewidth=0, label=label)
        else:
            axes.vlines(rounds, bands[:, low], bands[:, high], color=BLUE, alpha=alpha, linewidth=width, label=label)
    shown = [*bands.ravel()]
    local = style.marks(Look(BLUE, "o", "-"), len(rounds))
    axes.plot(rounds, mean, label="local: mean over clients, own test data", zorder=4, **local)
    rounds, wide = run.series("global")
    if np.isfinite(wide).any():
        look = style.marks(Look(GREEN, "s", "-"), len(rounds))
        axes.plot(rounds, wide, label="global: everybody's test data", zorder=3, **look)
        shown += [*wide]
    shown += _after_local(axes, run)
    style.dress(axes, y="test accuracy (%)")
    style.percent_axis(axes, shown)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(
        range(len(labels)), key=lambda i: labels[i] in ("worst to best client", "middle half of the clients")
    )
    axes.figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=2,
        fontsize=9,
        frameon=False,
    )


def _after_local(axes: Axes, run: Run) -> list[float]:
    """Locally trained models: of each evaluated round's participants, and apart from them of everyone at the end."""
    rounds, mean = run.series("local", "mean", stage="after_local")
    if np.isfinite(mean).any():
        everyone = all(len(line["clients"]) == run.clients for line in run.scored)
        who = "all clients" if everyone else "that round's clients"
        look = style.marks(Look(VERMILION, "^", "--"), len(rounds))
        axes.plot(rounds, mean, label=f"after local training: {who}", zorder=3, **look)
    last, final = run.series("local", "mean", stage="after_local_all")
    if np.isfinite(final).any():
        look = style.marks(Look(VERMILION, "*", "-"), 1, size=12)
        axes.plot(last, final, label="after local training: all clients", zorder=5, **look)
    return [*mean, *final]


def _loss(axes: Axes, run: Run) -> None:
    rounds = [line["round"] for line in run.lines]
    values = [line["train_loss"] for line in run.lines]
    known = np.array([value if value is not None and math.isfinite(value) else math.nan for value in values], float)
    axes.plot(rounds, known, **style.marks(Look(GREY, "o", "-"), len(rounds), size=4))
    lost = [(line["round"], len(line["left_out"])) for line in run.lines if line["left_out"]]
    if lost:
        count = sum(n for _, n in lost)
        label = f"clients left out of a round ({count} time{'s' if count > 1 else ''})"
        at, bottom = [round for round, _ in lost], axes.get_xaxis_transform()
        axes.plot(
            at, [0.04] * len(at), "x", color=VERMILION, markersize=5, transform=bottom, label=label, clip_on=False
        )
        axes.legend(fontsize=8, frameon=False, loc="upper right", borderaxespad=0)
    style.dress(axes, x="communication round", y="training loss")
    axes.margins(y=0.15)
    style.rounds_axis(axes, run.last)


def clients(run: Run) -> Figure | None:
    """Each client's accuracy in the last evaluated round, best first, above the samples it has."""
    accuracy = run.accuracies(run.scored[-1]) if run.scored else {}
    if not accuracy:
        return None
    line = run.scored[-1]
    ids = sorted(accuracy, key=lambda client: (-accuracy[client], client))
    without = [row["client"] for row in line["aggregated"]["clients"] if row["client"] not in accuracy]
    away = run.away(line)
    named = len(ids) + len(without) + len(away) <= _NAMED
    if named:
        ids += without + away
    figure = style.blank(4.8)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    place = np.arange(len(ids))
    heights = np.array([accuracy.get(client, 0.0) for client in ids])
    mean = percent(line["aggregated"]["summary"]["local"]["mean"])
    _bars(top, place, heights, np.zeros(len(ids)), BLUE, named)
    top.axhline(mean, color="0.15", linewidth=1, linestyle="--")
    beside = top.get_yaxis_transform()  # of the axes, where no bar can cover it
    top.text(1.01, mean, f"mean\n{mean:.1f} %", transform=beside, fontsize=9, va="center")
    if named:
        for x, client in enumerate(ids):
            if client not in accuracy:
                why = "not evaluated" if client in away else "no test data"
                top.text(x, 2, why, fontsize=8, color=GREY, rotation=90, ha="center", va="bottom")
    style.dress(top, y="test accuracy (%)")
    top.set_ylim(0, 100)
    few = f", {len(away)} of {run.clients} not evaluated" if away else ""
    style.title(figure, f"{run.title}; round {line['round']}{few}")

    below = np.zeros(len(ids))
    if run.shares:
        for part, label in (("train", "train"), ("val", "validation"), ("test", "test")):
            counts = np.array([getattr(run.shares[client], part) for client in ids], float)
            _bars(bottom, place, counts, below, style.PARTS[part], named, label)
            below = below + counts
    else:
        tests = {row["client"]: row["n_test"] for row in line["aggregated"]["clients"]}
        below = np.array([tests.get(client, 0) for client in ids], float)
        _bars(bottom, place, below, np.zeros(len(ids)), style.PARTS["test"], named, "test")
    text = "client, best accuracy first"
    if without and not named:
        text += f" ({len(without)} without test data left out)"
    style.dress(bottom, x=text, y="samples")
    bottom.set_ylim(0, 1.05 * max(1.0, below.max()))
    bottom.set_xlim(-0.6, len(ids) - 0.4)
    bottom.legend(fontsize=8, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.97), borderaxespad=0)
    if named:
        _name(bottom, run, ids)
    return figure


def _bars(
    axes: Axes, place: np.ndarray, heights: np.ndarray, below: np.ndarray, colour: str, named: bool, label: str = ""
) -> None:
    if named:
        axes.bar(place, heights, width=0.75, bottom=below, color=colour, label=label)
    else:  # one polygon in place of hundreds of bars
        edges = np.arange(len(place) + 1) - 0.5
        axes.stairs(below + heights, edges, baseline=below, fill=True, color=colour, label=label)


def _name(axes: Axes, run: Run, ids: list[int]) -> None:
    """The clients' numbers, or their names where they have names of their own."""
    names = [run.name(client) for client in ids]
    if all(name == f"client-{client}" for name, client in zip(names, ids, strict=True)):
        names = [str(client) for client in ids]
    short = [style.plain(name) for name in style.short(names, 18)]
    tilted = max(map(len, short)) * len(short) > 90
    axes.set_xticks(range(len(ids)), short, rotation=90 if tilted else 0)
