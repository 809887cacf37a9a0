"""How steadily clients select their groups over the rounds of a run (SGPT, Fig. 3).

On record is how many of a client's test samples select each group, at every evaluation: mean and deviation over the
evaluations are the paper's figure. Half the L1 distance between the shares of two evaluations is the smallest share of
samples that can have changed their group in between; more may have swapped groups, which counts do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import altair as alt
import numpy as np

from ..errors import UserError
from ..report import marks, style
from .base import Found, Options
from .opened import Opened


def selection(opened: Opened, options: Options) -> Found:
    counts = recorded(opened, options)
    changes = {client: changed(of) for client, of in counts.items()}
    rows = [
        {
            "client": client,
            "name": opened.name(client),
            "group": group,
            "mean": float(mean),
            "std": float(std),
            "evaluations": len(of),
            "test_samples": int(next(iter(of.values())).sum()),
        }
        for client, of in counts.items()
        for group, (mean, std) in enumerate(zip(*spread(of), strict=True))
    ]
    moves = [
        {
            "client": client,
            "round": round,
            "changed_at_least": least,
            "majority_group": int(counts[client][round].argmax()),
        }
        for client, of in changes.items()
        for round, least in of.items()
    ]
    each = [least for of in changes.values() for least in of.values()]
    last = [list(of.values())[-1] for of in changes.values()]
    others = np.mean([other for of in counts.values() for other in majority_changes(of)])
    wide = np.mean([spread(of)[1].mean() / next(iter(of.values())).sum() for of in counts.values()])
    text = (
        f"Between an evaluation and the next at least {100 * np.mean(each):.1f} % of a client's test samples change "
        f"their group (mean over {len(counts)} clients; at the last one {100 * np.mean(last):.1f} %), and "
        f"{100 * others:.0f} % of the clients have another group that most of their samples select. How many samples "
        f"select a group varies by {100 * wide:.1f} % of a client's samples (standard deviation over evaluations, mean "
        f"over groups)."
    )
    title = "How steadily clients select their groups"
    return Found(draw(opened, counts, changes), rows, title, text, {"changes": moves})


Counts = dict[int, np.ndarray]  # round -> test samples that select each group, (groups,)


def recorded(opened: Opened, options: Options) -> dict[int, Counts]:
    """Of each client that has test data and was evaluated at least twice, in the order of rounds."""
    found: dict[int, dict[int, list[int]]] = {}
    for line in opened.lines:
        for stage in ("aggregated", "newcomers_aggregated"):
            for one in line.get(stage, {"clients": ()})["clients"]:
                if any(one.get("groups", ())):
                    found.setdefault(one["client"], {})[line["round"]] = one["groups"]
    if not found:
        raise UserError(
            "selection: no selections are on record; methods with groups, such as SGPT, record them on data with "
            "domains or superclasses"
        )
    often = {client: of for client, of in found.items() if len(of) > 1}
    for client in options.clients:
        if client not in often:
            known = ", ".join(map(str, often)) or "none"
            raise UserError(f"--client = {client} must be one that was evaluated at least twice ({known})")
    if not often:
        raise UserError("selection: at least two evaluations are needed; a smaller eval.every gives more")
    count = max(len(groups) for of in often.values() for groups in of.values())
    return {
        client: {round: np.array(groups + [0] * (count - len(groups))) for round, groups in often[client].items()}
        for client in options.clients or sorted(often)
    }


def spread(of: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over the evaluations, of each group."""
    table = np.stack(list(of.values()))
    return table.mean(0), table.std(0)


def changed(of: Counts) -> dict[int, float]:
    """Round -> the smallest share of samples that have another group than at the evaluation before."""
    shares = {round: counts / counts.sum() for round, counts in of.items()}
    rounds = list(shares)
    return {b: float(np.abs(shares[b] - shares[a]).sum() / 2) for a, b in pairwise(rounds)}


def majority_changes(of: Counts) -> list[bool]:
    """Whether the group that most samples select is another one than at the evaluation before."""
    most = [int(counts.argmax()) for counts in of.values()]
    return [a != b for a, b in pairwise(most)]


def draw(opened: Opened, counts: Mapping[int, Counts], changes: Mapping[int, Mapping[int, float]]) -> style.Chart:
    """The client with most test samples as in the paper's figure; and all clients' changes over the rounds."""
    client = max(counts, key=lambda c: next(iter(counts[c].values())).sum())
    rows = [
        {"group": group, "mean": float(mean), "low": float(max(0, mean - std)), "high": float(mean + std)}
        for group, (mean, std) in enumerate(zip(*spread(counts[client]), strict=True))
    ]
    base = marks.data(rows).encode(alt.X("group:O", axis=alt.Axis(labelAngle=0)))
    y = [f"test samples of client {opened.names([client])[0]}", f"(mean, std over {len(counts[client])} evaluations)"]
    bars = alt.layer(
        base.mark_bar(color=style.BLUE).encode(alt.Y("mean:Q", title=y)),
        base.mark_rule(color=style.INK, strokeWidth=1.5).encode(alt.Y("low:Q", title=y), alt.Y2("high:Q")),
    )
    moved = [
        {"client": client, "round": round, "value": 100 * value}
        for client, of in changes.items()
        for round, value in of.items()
    ]
    title = ["change their group, at least", "(% of a client's test samples)"]
    lines = marks.each_and_mean(moved, title, "mean of the clients")
    chart = alt.hconcat(*(part.properties(width=250, height=210) for part in (bars, lines)))
    chart = chart.resolve_scale(color="independent")
    return style.titled(chart, opened.title, "how steadily clients select their groups")
