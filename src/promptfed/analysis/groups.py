"""What the groups of a method hold, and how stable the selection is (SGPT, Table 4).

How steadily groups were selected over the rounds is on record: selection.py. Of models only the final state is kept,
so its stability is measured by one more round of local training on a copy: the share of a client's test samples that
keep their group under the keys that it would upload. Given a second run on the same test data (another seed, more
rounds), also the share that has the same group there, under the best one-to-one matching of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from .. import scoring
from ..errors import UserError
from ..method import Method
from ..params import Params
from ..report import marks, style
from ..training import Work
from .base import Found, Options
from .opened import Opened


def groups(opened: Opened, options: Options) -> Found:
    clients = opened.chosen(options, "test", len(opened.federation.sites))
    data, sites = opened.federation.dataset, opened.federation.sites
    before = {client: assigned(opened, *opened.own(client)) for client in clients}
    able = [client for client in opened.chosen(Options(options.clients), "test") if len(sites[client].train)]
    kept = {client: float((assigned(opened, *opened.after_local(client)) == before[client]).mean()) for client in able}
    index = np.concatenate([sites[client].test for client in clients])
    chosen = np.concatenate([before[client] for client in clients])
    count = max(int(chosen.max()) + 1, getattr(opened.method.tuning, "groups", 0))
    by = data.domain[index] if data.domain is not None else data.labels[index]
    names = data.domains if data.domain is not None else data.classes
    composition = table(chosen, by, (count, len(names)))
    what = "domain" if data.domain is not None else "class"
    rows = [
        {"group": g, what: names[c], "test_samples": int(composition[g, c])}
        for g in range(count)
        for c in range(len(names))
    ]
    used = int((composition.sum(1) > 0).sum())
    text = (
        f"{used} of {count} groups are selected by the {len(index)} test samples of {len(clients)} clients. "
        f"{100 * np.mean(list(kept.values())):.0f} % of a client's test samples keep their group after one more round "
        f"of local training (mean over {len(kept)} clients)."
    )
    if data.domain is not None:
        text += f" Clustering accuracy against domains: {100 * scoring.clustering([composition]):.1f} %."
    if options.other:
        share = agreement(chosen, groups_in_other(opened, options, clients))
        text += f" {100 * share:.0f} % have the matching group in {options.other.name}."
    stability = [{"client": client, "kept": share} for client, share in kept.items()]
    title = f"Test samples of each {what} in each group"
    return Found(draw(opened, composition, names, what, kept), rows, title, text, {"stability": stability})


def assigned(opened: Opened, work: Work, params: Params) -> np.ndarray:
    """The groups of the client's test samples, (n,)."""
    method, model = opened.method, opened.model
    none = UserError(f'groups: under "{opened.config.method.name}" samples have no groups')
    if type(method).assign is Method.assign:
        raise none
    found = []
    samples = opened.host.samples(opened.federation.sites[work.client].test)
    with torch.no_grad():
        for batch, ctx in opened.batches(work, samples):
            part = method.assign(model, params, batch, ctx)
            if part is None:
                raise none
            found.append(part.cpu().numpy())
    return np.concatenate(found)


def table(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Counts of the pairs (row, column)."""
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (rows, columns), 1)
    return counts


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of samples in matching groups, in the best one-to-one matching of the groups of a and b."""
    counts = table(a, b, (int(a.max()) + 1, int(b.max()) + 1))
    return float(counts[linear_sum_assignment(counts, maximize=True)].sum() / len(a))


def groups_in_other(opened: Opened, options: Options, clients: list[int]) -> np.ndarray:
    """Groups of the same samples in the other run."""
    assert options.other
    other = Opened(options.other)
    try:
        theirs = other.federation.sites
        if other.federation.dataset.fingerprint != opened.federation.dataset.fingerprint or not all(
            client < len(theirs) and np.array_equal(theirs[client].test, opened.federation.sites[client].test)
            for client in clients
        ):
            raise UserError(f'--other = "{options.other}" must be a run with the same partition: its test data differ')
        return np.concatenate([assigned(other, *other.own(client)) for client in clients])
    finally:
        other.close()


def draw(opened: Opened, counts: np.ndarray, names: Sequence[str], what: str, kept: Mapping[int, float]) -> style.Chart:
    """Groups down, domains or classes across; beside it the share of samples that keep their group."""
    heat = marks.heat_map(
        counts / counts.sum(1, keepdims=True).clip(1),
        [str(group) for group in range(len(counts))],
        style.short(names, 14),
        x=what,
        y="group (numbers: test samples)",
        legend="share of the group",
        texts=counts,
        width=float(np.clip(32 * len(names), 180, 400)),
    )
    clients = list(kept)
    rows = [{"at": at, "value": 100 * kept[client]} for at, client in enumerate(clients)]
    title = ["keep their group after", "a local round (% of test)"]
    at = alt.X("value:Q", title=title, scale=alt.Scale(domain=[0, 100]), axis=alt.Axis(grid=True))
    down = alt.Y(title="client", **marks.places("at:O", opened.names(clients)))
    bars = marks.data(rows).mark_bar(color=style.BLUE).encode(at, down)
    chart = alt.hconcat(heat, bars.properties(width=140, height=marks.tall(len(clients)))).resolve_legend(
        color="independent"
    )
    used = f"{(counts.sum(1) > 0).sum()} of {len(counts)} groups selected by {counts.sum()} test samples"
    return style.titled(chart, opened.title, used)
