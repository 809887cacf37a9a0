"""What the groups of a method hold, and how stable their selection is (SGPT, Table 4 and Fig. 3).

How many of a client's test samples select each group is on record at every evaluation: half the L1 distance between the
shares of two evaluations is the smallest share of samples that can have changed their group in between; more may have
swapped groups, which counts do not show. Of models only the final state is kept, so its stability is measured by one
more round of local training on a copy: the share of a client's test samples that keep their group under the keys that
it would upload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import numpy as np
import torch

from .. import scoring
from ..errors import UserError
from ..params import Params
from ..report import marks, style
from ..training import Work
from . import Found, Options, Row
from .opened import Opened

# ---- the final state


def groups(opened: Opened, options: Options) -> Found:
    data, sites = opened.federation.dataset, opened.federation.sites
    clients = opened.chosen(options, "test", len(sites))
    before = {client: assigned(opened, *opened.own(client)) for client in clients}
    able = [client for client in opened.chosen(options, "test") if len(sites[client].train)]
    kept = {client: float((assigned(opened, *opened.after_local(client)) == before[client]).mean()) for client in able}
    index = np.concatenate([sites[client].test for client in clients])
    chosen = np.concatenate([before[client] for client in clients])
    count = max(int(chosen.max()) + 1, getattr(opened.method.tuning, "groups", 0))
    what, by, names = "class", data.labels, data.classes
    if data.domain is not None:
        what, by, names = "domain", data.domain, data.domains
    composition = np.zeros((count, len(names)), np.int64)
    np.add.at(composition, (chosen, by[index]), 1)
    rows = [{"group": g, what: names[c], "test_samples": int(n)} for (g, c), n in np.ndenumerate(composition)]
    used = f"{(composition.sum(1) > 0).sum()} of {count} groups"
    text = (
        f"{used} are selected by the {len(index)} test samples of {len(clients)} clients. "
        f"{100 * np.mean(list(kept.values())):.0f} % of a client's test samples keep their group after one more round "
        f"of local training (mean over {len(kept)} clients)."
    )
    if data.domain is not None:
        text += f" Clustering accuracy against domains: {100 * scoring.clustering([composition]):.1f} %."
    chart = style.titled(
        alt.hconcat(_composition(composition, names, what), _kept(opened, kept)).resolve_legend(color="independent"),
        opened.title,
        f"{used} selected by {len(index)} test samples",
    )
    stability = [{"client": client, "kept": share} for client, share in kept.items()]
    return Found(chart, rows, f"Test samples of each {what} in each group", text, {"stability": stability})


def assigned(opened: Opened, work: Work, params: Params) -> np.ndarray:
    """The groups of the client's test samples, (n,)."""
    samples = opened.host.samples(opened.federation.sites[work.client].test)
    found = []
    with torch.no_grad():
        for batch, ctx in opened.batches(work, samples):
            part = opened.method.assign(opened.model, params, batch, ctx)
            if part is None:
                raise UserError(f'groups: under "{opened.config.method.name}" samples have no groups')
            found.append(part.cpu().numpy())
    return np.concatenate(found)


def _composition(counts: np.ndarray, names: Sequence[str], what: str) -> style.Chart:
    """Groups down, domains or classes across."""
    return marks.heat_map(
        counts / counts.sum(1, keepdims=True).clip(1),
        [str(group) for group in range(len(counts))],
        style.short(names, 14),
        x=what,
        y="group (numbers: test samples)",
        legend="share of the group",
        texts=counts,
        width=float(np.clip(32 * len(names), 180, 400)),
    )


def _kept(opened: Opened, kept: Mapping[int, float]) -> style.Chart:
    """The share of each client's samples that keep their group."""
    rows = [{"at": at, "value": 100 * share} for at, share in enumerate(kept.values())]
    title = ["keep their group after", "a local round (% of test)"]
    x = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(grid=True))
    y = alt.Y(title="client", **marks.places("at:O", opened.names(list(kept))))
    bars: style.Chart = marks.data(rows).mark_bar(color=style.BLUE).encode(x, y)
    return bars.properties(width=140, height=marks.tall(len(kept)))


# ---- over rounds


def selection(opened: Opened, options: Options) -> Found:
    found = recorded(opened, options)
    changes = {client: changed(counts) for client, (_, counts) in found.items()}
    rows = [
        {
            "client": client,
            "name": opened.name(client),
            "group": group,
            "mean": float(mean),
            "std": float(std),
            "evaluations": len(counts),
            "test_samples": int(counts[0].sum()),
        }
        for client, (_, counts) in found.items()
        for group, (mean, std) in enumerate(zip(counts.mean(0), counts.std(0), strict=True))
    ]
    moves = [
        {"client": client, "round": round, "changed_at_least": float(least), "majority_group": int(most)}
        for client, (rounds, counts) in found.items()
        for round, least, most in zip(rounds[1:], changes[client], counts.argmax(1)[1:], strict=True)
    ]
    last = np.mean([each[-1] for each in changes.values()])
    others = np.concatenate([np.diff(counts.argmax(1)) != 0 for _, counts in found.values()])
    wide = np.mean([counts.std(0).mean() / counts[0].sum() for _, counts in found.values()])
    text = (
        f"Between an evaluation and the next at least {100 * np.concatenate(list(changes.values())).mean():.1f} % of a "
        f"client's test samples change their group (mean over {len(found)} clients; at the last one {100 * last:.1f} "
        f"%), and {100 * others.mean():.0f} % of the clients have another group that most of their samples select. How "
        f"many samples select a group varies by {100 * wide:.1f} % of a client's samples (standard deviation over "
        f"evaluations, mean over groups)."
    )
    return Found(
        _steadiness(opened, rows, moves), rows, "How steadily clients select their groups", text, {"changes": moves}
    )


def recorded(opened: Opened, options: Options) -> dict[int, tuple[list[int], np.ndarray]]:
    """Rounds, and how many test samples selected each group (rounds, groups): of each client that has test data and was
    evaluated at least twice."""
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
        client: (list(of), np.array([groups + [0] * (count - len(groups)) for groups in of.values()]))
        for client, of in sorted(often.items())
        if not options.clients or client in options.clients
    }


def changed(counts: np.ndarray) -> np.ndarray:
    """The smallest share of samples that have another group than at the evaluation before, (evaluations - 1,)."""
    shares = counts / counts.sum(1, keepdims=True)
    return np.asarray(np.abs(np.diff(shares, axis=0)).sum(1) / 2)


def _steadiness(opened: Opened, rows: Sequence[Row], moves: Sequence[Row]) -> style.Chart:
    """The client with most test samples as in the paper's figure; and all clients' changes over the rounds."""
    largest = max(rows, key=lambda row: row["test_samples"])
    name = opened.names([largest["client"]])[0]
    y = [f"test samples of client {name}", f"(mean, std over {largest['evaluations']} evaluations)"]
    base = marks.data([row for row in rows if row["client"] == largest["client"]])
    base = base.encode(alt.X("group:O", axis=alt.Axis(labelAngle=0)))
    spread = base.transform_calculate(low="max(0, datum.mean - datum.std)", high="datum.mean + datum.std")
    bars = alt.layer(
        base.mark_bar(color=style.BLUE).encode(alt.Y("mean:Q", title=y)),
        spread.mark_rule(color=style.INK, strokeWidth=1.5).encode(alt.Y("low:Q", title=y), alt.Y2("high:Q")),
    )
    moved = [{**move, "value": 100 * move["changed_at_least"]} for move in moves]
    title = ["change their group, at least", "(% of a client's test samples)"]
    lines = marks.each_and_mean(moved, title, "mean of the clients")
    chart = alt.hconcat(*(part.properties(width=250, height=210) for part in (bars, lines)))
    chart = chart.resolve_scale(color="independent")
    return style.titled(chart, opened.title, "how steadily clients select their groups")
