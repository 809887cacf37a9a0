"""Membership inference: whether a client has trained on a sample, by its loss under what the client has sent.

After Yeom et al., "Privacy Risk in Machine Learning" (CSF 2018): a model's loss is lower on its training samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..analysis.opened import Opened, unprompted
from ..params import Params
from ..seeding import rng

_DRAWS = 1000
Losses = tuple[np.ndarray, np.ndarray]  # of one client: (n,) of members, (m,) of others


def losses(run: Opened, client: int, params: Params) -> Losses:
    """Of the client's training samples and of its held-out ones, under parameters that an observer knows: without the
    client's private prompts."""
    site, work = run.federation.sites[client], run.work(client)
    found = []
    for index in (site.train, np.concatenate([site.val, site.test])):
        samples = run.host.samples(index)
        said = run.probabilities(work, params, samples, unprompted(run.method.tuning))
        found.append(-np.log(said[np.arange(len(index)), samples.y.cpu().numpy()].clip(1e-30)))
    return found[0], found[1]


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """How often a member has the lower loss of the two; .5 by guessing."""
    order = members[:, None] - others
    return float((order < 0).mean() + (order == 0).mean() / 2)


def interval(clients: Sequence[Losses]) -> tuple[float, float, float]:
    """The mean of the clients' AUC, and its 95 % interval by bootstrap over the samples of each client."""
    g = rng(0, "membership")
    known = [pair for pair in clients if len(pair[0]) and len(pair[1])]
    drawn = [np.mean([auc(*(g.choice(part, len(part)) for part in pair)) for pair in known]) for _ in range(_DRAWS)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.mean([auc(*pair) for pair in known])), float(low), float(high)
