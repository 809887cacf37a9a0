"""Analyses of what is on record: no model is built."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..data import heatmap
from ..errors import UserError
from ..report import style
from ..runs.record import STAGES
from .base import Found, Options
from .opened import Opened

_NAMED = 40  # clients up to which each one has a name
_WORDS = {
    "aggregated": "as received",
    "after_local": "after local training, participants",
    "after_local_all": "after local training, all",
    "common": "the common model",
}


# ---- drift


def drift(opened: Opened, options: Options) -> Found:
    """pFedPT, Fig. 7: how far each role of parameters moves in a client's training, round by round (L2)."""
    lines = [line for line in opened.lines if "moved" in line]
    rows = [
        {"round": line["round"], "client": one["client"], "role": role, "moved": value}
        for line in lines
        for one in line["moved"]
        for role, value in one["roles"].items()
        if not options.clients or one["client"] in options.clients
    ]
    if not rows:
        whose = "" if not lines else " of these clients"
        raise UserError(f"drift: how far parameters{whose} moved is not on record; it is in runs with eval.drift=true")
    roles = list(dict.fromkeys(row["role"] for row in rows))
    words = []
    for role in roles:
        rounds, mean = _means(rows, role)
        words.append(f"{role} {mean[0]:.3g} in round {rounds[0]}, {mean[-1]:.3g} in round {rounds[-1]}")
    text = f"L2 distance between a client's parameters before and after its training, mean: {'; '.join(words)}."
    return Found(_drift(opened, rows, roles), rows, "How far parameters move in each round", text)


def _means(rows: list[dict[str, Any]], role: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and the mean over the clients that trained in each."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["role"] == role:
            found.setdefault(row["round"], []).append(row["moved"])
    return np.array(sorted(found)), np.array([np.mean(found[round]) for round in sorted(found)])


def _drift(opened: Opened, rows: list[dict[str, Any]], roles: list[str]) -> Figure:
    figure = style.blank(1.4 + 2.3 * len(roles))
    grid = figure.subplots(len(roles), 1, squeeze=False, sharex=True)[:, 0]
    looks = style.looks(roles)
    clients = sorted({row["client"] for row in rows})
    for axes, role in zip(grid, roles, strict=True):
        for n, client in enumerate(clients):
            own = [(row["round"], row["moved"]) for row in rows if (row["client"], row["role"]) == (client, role)]
            label = "one client" if n == 0 else ""
            if own:
                dot = {"marker": ".", "markersize": 3.5} if len(clients) <= 20 else {}
                axes.plot(*zip(*own, strict=True), color="0.75", linewidth=0.8, zorder=2, label=label, **dot)
        rounds, mean = _means(rows, role)
        axes.plot(rounds, mean, label="mean of the round's clients", zorder=3, **style.marks(looks[role], len(rounds)))
        style.dress(axes, y=f"L2 change of\n{'the private prompt' if role == 'private' else role}")
        axes.set_ylim(bottom=0)
        axes.margins(y=0.1)
    handles, labels = grid[0].get_legend_handles_labels()
    grid[0].legend(
        handles, labels, fontsize=9, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0
    )
    style.dress(grid[-1], x="communication round", y=grid[-1].get_ylabel())
    style.rounds_axis(grid[-1], max(row["round"] for row in rows))
    style.title(figure, f"{opened.title}\nhow far a client's parameters move in a round of training")
    return figure


# ---- clients


def clients(opened: Opened, options: Options) -> Found:
    """Accuracy of every client, in the last evaluation of each stage."""
    run = opened
    found: dict[str, dict[int, float]] = {}
    rows = []
    for stage in STAGES:
        line = next((line for line in reversed(run.lines) if stage in line), None)
        for one in line[stage]["clients"] if line else ():
            if options.clients and one["client"] not in options.clients:
                continue
            rows.append(
                {
                    "client": one["client"],
                    "name": run.name(one["client"]),
                    "stage": stage,
                    "round": line["round"] if line else 0,
                    **{key: one.get(key) for key in ("n_test", "accuracy", "macro_f1", "loss", "global_accuracy")},
                }
            )
            if one["accuracy"] is not None:
                found.setdefault(stage, {})[one["client"]] = 100 * one["accuracy"]
    if not found:
        raise UserError("clients: no client's test accuracy is on record")
    words = [
        f"{_word(stage)}: {np.mean(list(of.values())):.1f} % (worst {min(of.values()):.1f} %, {len(of)} clients)"
        for stage, of in found.items()
    ]
    return Found(_bars(opened, found), rows, "Each client's test accuracy", f"Mean accuracy {'; '.join(words)}.")


def _word(stage: str) -> str:
    base = stage.removeprefix("newcomers_")
    return _WORDS[base] + (", newcomers" if stage != base else "")


def _bars(opened: Opened, found: dict[str, dict[int, float]]) -> Figure:
    """Clients by their accuracy as received; those without one behind them."""
    first = next(iter(found.values()))
    ids = sorted({client for of in found.values() for client in of}, key=lambda c: (-first.get(c, -1.0), c))
    figure = style.blank(4.4)
    axes = figure.subplots()
    named, wide = len(ids) <= _NAMED, 0.8 / len(found)
    for n, (stage, look) in enumerate(style.looks(found).items()):
        at = [x for x, client in enumerate(ids) if client in found[stage]]
        values = [found[stage][ids[x]] for x in at]
        shift = (n - (len(found) - 1) / 2) * wide
        if named:
            axes.bar(np.array(at) + shift, values, wide, color=look.colour, label=_word(stage), linewidth=0)
        else:
            axes.plot(at, values, look.marker, color=look.colour, markersize=3.5, label=_word(stage))
        axes.axhline(float(np.mean(values)), color=look.colour, linestyle="--", linewidth=1)
    style.dress(axes, x="client, best accuracy first", y="test accuracy (%)")
    if named:
        names = [style.plain(name) for name in opened.names(ids)]
        tilted = max(map(len, names)) * len(names) > 90
        axes.set_xticks(range(len(ids)), names, rotation=90 if tilted else 0)
    axes.set_ylim(0, min(100.0, 1.15 * max(1.0, *(value for of in found.values() for value in of.values()))))
    axes.set_xlim(-0.6, len(ids) - 0.4)
    mean = axes.axhline(-1, color="0.3", linestyle="--", linewidth=1)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        [*handles, mean],
        [*labels, "mean"],
        loc="outside lower center",
        ncols=2 if len(labels) == 3 else 4,
        fontsize=9,
        frameon=False,
    )
    style.title(figure, opened.title)
    return figure


# ---- partition


def partition(opened: Opened, options: Options) -> Found:
    """pFedPT, Fig. 10."""
    federation = opened.federation
    parts = {split: federation.label_counts(split) for split in ("train", "val", "test")}
    classes = federation.dataset.classes
    rows = [
        {
            "client": i,
            "name": site.name,
            "class": name,
            **{split: int(counts[i, c]) for split, counts in parts.items()},
        }
        for i, site in enumerate(federation.sites)
        for c, name in enumerate(classes)
    ]
    sizes, held = parts["train"].sum(1), (parts["train"] > 0).sum(1)
    text = (
        f"{len(federation.sites)} clients with {sizes.min()} to {sizes.max()} training samples of {held.min()} to "
        f"{held.max()} of {len(classes)} classes. Mean entropy of their labels: {_entropy(parts['train']):.2f} of "
        f"{math.log2(max(len(classes), 1)):.2f} bits."
    )
    return Found(lambda path: heatmap.draw(federation, path), rows, "Who holds which classes", text)


def _entropy(counts: np.ndarray) -> float:
    """Mean over the clients that have samples, in bits."""
    shares = counts[counts.sum(1) > 0]
    shares = shares / shares.sum(1, keepdims=True)
    return float(-(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1).mean()) if len(shares) else 0.0
