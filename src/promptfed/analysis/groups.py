"""What the groups of a method hold, and how firmly samples stay in theirs (SGPT, Table 4).

How steadily groups were selected over the rounds is on record: selection.py. Of models only the final state is on disk.
How firm its selection is, is therefore told by one more round of local training on a copy: which share of a client's
test samples keep their group under the keys that it would upload. Given a second run on the same test data (another
seed, more rounds), also which share has the same group there, under the best one-to-one matching of groups.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from .. import scoring
from ..errors import UserError
from ..method import Method
from ..params import Params
from ..report import style
from ..training import Work
from .base import Found, Options
from .opened import Opened

_WRITTEN = 400  # cells up to which each one shows its count


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
        share = agreement(chosen, elsewhere(opened, options, clients, index))
        text += f" {100 * share:.0f} % have the matching group in {options.other.name}."
    stability = [{"client": client, "kept": share} for client, share in kept.items()]
    title = f"Test samples of each {what} in each group"
    return Found(draw(opened, composition, names, what, kept), rows, title, text, {"stability": stability})


def assigned(opened: Opened, work: Work, params: Params) -> np.ndarray:
    """The groups of the client's test samples, (n,)."""
    method, model = opened.method, opened.model
    none = UserError(f'groups: under "{opened.config.method.name}" samples fall into no groups')
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
    """How many pairs there are of each kind."""
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (rows, columns), 1)
    return counts


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of samples in matching groups, in the best one-to-one matching of the groups of a and b."""
    counts = table(a, b, (int(a.max()) + 1, int(b.max()) + 1))
    return float(counts[linear_sum_assignment(counts, maximize=True)].sum() / len(a))


def elsewhere(opened: Opened, options: Options, clients: list[int], index: np.ndarray) -> np.ndarray:
    """Groups of the same samples in the other run."""
    assert options.other
    other = Opened(options.other)
    try:
        theirs = other.federation.sites
        if other.federation.dataset.fingerprint != opened.federation.dataset.fingerprint or not all(
            client < len(theirs) and np.array_equal(theirs[client].test, opened.federation.sites[client].test)
            for client in clients
        ):
            raise UserError(f'--other = "{options.other}" has other test data: the same partition is needed')
        return np.concatenate([assigned(other, *other.own(client)) for client in clients])
    finally:
        other.close()


def draw(opened: Opened, counts: np.ndarray, names: tuple[str, ...], what: str, kept: dict[int, float]) -> Figure:
    """Groups down, domains or classes across; beside it what share of samples keeps its group."""
    height = float(np.clip(2.1 + 0.3 * max(len(counts), len(kept)), 3.4, 8))
    figure = style.blank(height, gap=0.04)
    heat, bars = figure.subplots(1, 2, width_ratios=[2.2, 1])
    share = counts / counts.sum(1, keepdims=True).clip(1)
    drawn = heat.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for g, c in np.argwhere(counts > 0) if counts.size <= _WRITTEN else ():
        colour = "w" if share[g, c] > 0.6 else "k"
        heat.text(c, g, counts[g, c], ha="center", va="center", fontsize=7, color=colour)
    if len(names) <= 40:
        short = [style.plain(name if len(name) <= 14 else f"{name[:13]}…") for name in names]
        heat.set_xticks(range(len(names)), short, fontsize=8, rotation=45, ha="right", rotation_mode="anchor")
    if len(counts) <= 40:
        heat.set_yticks(range(len(counts)), [str(g) for g in range(len(counts))], fontsize=8)
    heat.tick_params(length=2)
    heat.set_xlabel(what, fontsize=10)
    heat.set_ylabel("group (written: test samples)" if counts.size <= _WRITTEN else "group", fontsize=10)
    figure.colorbar(drawn, ax=heat, label="share of the group", pad=0.02).ax.tick_params(labelsize=8)
    place = np.arange(len(kept))
    bars.barh(place, [100 * v for v in kept.values()], color=style.BLUE, height=0.7)
    bars.set_yticks(place, [style.plain(name) for name in opened.names(list(kept))])
    bars.invert_yaxis()
    bars.set_xlim(0, 100)
    style.dress(bars, x="keep their group after\na local round (% of test)", y="client", grid="x")
    used = f"{(counts.sum(1) > 0).sum()} of {len(counts)} groups selected by {counts.sum()} test samples"
    style.title(figure, f"{opened.title}\n{used}", size=10)
    return figure
