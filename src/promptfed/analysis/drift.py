"""How far each role of parameters moves in a client's training, round by round (pFedPT, Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from ..errors import UserError
from ..report import marks, style
from ..runs import statistics
from . import Found, Options
from .opened import Opened


def drift(opened: Opened, options: Options) -> Found:
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
    words, changes, panels = [], [], []
    for role, look in style.looks(dict.fromkeys(row["role"] for row in rows)).items():
        here = [{**row, "value": row["moved"]} for row in rows if row["role"] == role]
        ends = here[0]["round"], here[-1]["round"]
        first, last = (np.mean([row["value"] for row in here if row["round"] == round]) for round in ends)
        words.append(f"{role} {first:.3g} in round {ends[0]}, {last:.3g} in round {ends[1]}")
        changes += [f"{role} {change}" for change in settling(here)]
        y = f"L2 change of {'the private prompt' if role == 'private' else role}"
        panels.append(marks.each_and_mean(here, y, "mean of the round's clients", look.colour).properties(height=150))
    text = f"L2 distance between a client's parameters before and after its training, mean: {'; '.join(words)}."
    if changes:
        text += f" The last third of the rounds minus the second, mean over clients: {'; '.join(changes)}."
    chart = alt.vconcat(*panels).resolve_scale(color="independent")
    chart = style.titled(chart, opened.title, "how far a client's parameters move in a round of training")
    return Found(chart, rows, "How far parameters move in each round", text)


def settling(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How much less or more clients move in the last third of the rounds than in the second, of those that trained in
    both; empty if there are none."""
    rounds = max(row["round"] for row in rows)
    thirds: tuple[dict[int, list[float]], ...] = ({}, {}, {})
    for row in rows:
        thirds[3 * (row["round"] - 1) // rounds].setdefault(row["client"], []).append(row["value"])
    _, second, last = thirds
    both = [np.mean(last[client]) - np.mean(second[client]) for client in last if client in second]
    return [statistics.over_clients(np.array(both), "+.2f")] if both else []
