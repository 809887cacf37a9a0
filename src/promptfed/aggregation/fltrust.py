"""After FLTrust (Cao et al., NDSS 2021): updates count by how far they agree with one that the server trusts.

There, the server trains on samples of its own. Here, one of the clients does, which the server's operator runs.
"""

from __future__ import annotations

from ..params import Params
from .base import Change, Combination, Notes, scaled, weighted


class FlTrust(Combination):
    """Each update is scaled to the norm of the trusted one and weighted by their cosine, if that is positive."""

    name = "fltrust"

    def __init__(self, trusted: int) -> None:
        self._trusted = trusted

    def combine(self, changes: list[Change]) -> tuple[Params, Notes]:
        root = next((change for change in changes if change.update.client == self._trusted), None)
        if root is None or root.norm == 0:  # nothing can be judged: the model stays
            return dict(changes[0].still), {"trust": [0.0] * len(changes)}
        trust = [max(0.0, _cosine(change, root)) for change in changes]
        ups = [scaled(change, root.norm / change.norm if change.norm else 0.0) for change in changes]
        return weighted(ups, trust), {"trust": trust}


def _cosine(a: Change, b: Change) -> float:
    if a.norm == 0:
        return 0.0
    inner = sum(
        float(((p.double() - a.still[n].double()) * (b.update.up[n].double() - b.still[n].double())).sum())
        for n, p in a.update.up.items()
    )
    return inner / (a.norm * b.norm)
