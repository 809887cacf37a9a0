"""Analyses of recorded numbers: no model is built."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import numpy as np

from ..errors import UserError
from ..report import marks, run_charts, style
from ..runs.record import STAGES
from .base import Found, Options
from .opened import Opened

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
        raise UserError(f"drift: distances{whose} are not on record; run with eval.drift=true to record them")
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


def _drift(opened: Opened, rows: list[dict[str, Any]], roles: list[str]) -> style.Chart:
    panels = []
    for role, look in style.looks(roles).items():
        here = [{**row, "value": row["moved"]} for row in rows if row["role"] == role]
        y = f"L2 change of {'the private prompt' if role == 'private' else role}"
        panels.append(marks.each_and_mean(here, y, "mean of the round's clients", look.colour).properties(height=150))
    chart = alt.vconcat(*panels).resolve_scale(color="independent")
    return style.titled(chart, opened.title, "how far a client's parameters move in a round of training")


# ---- clients


def clients(opened: Opened, options: Options) -> Found:
    """Accuracy of every client, in the last evaluation of each stage."""
    run = opened
    found: dict[str, dict[int, float]] = {}
    rows = []
    for client in options.clients:
        if not 0 <= client < run.clients:
            raise UserError(f"--client = {client} must be 0 to {run.clients - 1}")
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


def _bars(opened: Opened, found: dict[str, dict[int, float]]) -> style.Chart:
    """Clients by their accuracy as received, and after them those that have none."""
    first = next(iter(found.values()))
    ids = sorted({client for of in found.values() for client in of}, key=lambda c: (-first.get(c, -1.0), c))
    rows = [
        {"at": ids.index(client), "kind": _word(stage), "value": value}
        for stage, of in found.items()
        for client, value in of.items()
    ]
    colours = {_word(stage): look.colour for stage, look in style.looks(found).items()}
    base = marks.data(rows).encode(marks.by_colour(colours, columns=2))
    x = alt.X(title="client, best accuracy first", **marks.places("at:O", opened.names(ids), style.WIDTH))
    y = alt.Y("value:Q", title="test accuracy (%)", scale=alt.Scale(domain=[0, 100]))
    if len(ids) <= marks.NAMED:
        each = base.mark_bar().encode(x, y, xOffset=alt.XOffset("kind:N", sort=list(colours)))
    else:
        each = base.mark_circle(size=18, opacity=0.8).encode(x, y)
    mean = base.mark_rule(strokeDash=[5, 3], strokeWidth=1.5).encode(alt.Y("mean(value):Q"))
    chart = alt.layer(each, mean).properties(width=style.WIDTH + 60)
    return style.titled(chart, opened.title, "dashed: means")


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
    return Found(run_charts.partition(federation), rows, "Who holds which classes", text)


def _entropy(counts: np.ndarray) -> float:
    """Mean over the clients that have samples, in bits."""
    shares = counts[counts.sum(1) > 0]
    shares = shares / shares.sum(1, keepdims=True)
    return float(-(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1).mean()) if len(shares) else 0.0
