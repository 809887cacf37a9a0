"""DP2FL: what malicious clients weigh in what the others learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..clients.base import Clients
from ..methods.dp2fl import Dp2fl
from ..methods.dp2fl.data_prompt import in_order, maps
from ..phases import Update
from ..runs.build import Parts
from .clients import Malicious


class Weighed(Malicious):
    """Clients whose weights are noted in every round, by the losses that they report."""

    def __init__(self, clients: Clients, parts: Parts, malicious: Sequence[int]) -> None:
        super().__init__(clients, parts, malicious)
        self._shared: list[float] = []
        self._own: list[float] = []

    def forged(self, updates: Sequence[Update], round: int) -> list[Update]:
        method, ordered = self.parts.method, in_order([update for update in updates if not update.error])
        assert isinstance(method, Dp2fl)
        bad = np.array([update.client in self.malicious for update in ordered])
        self._shared.append(float(np.array(method.shared_weights(ordered))[bad].sum()))
        others = [maps(update.up) for update in ordered]
        for update in ordered:
            if update.client not in self.malicious and "before" in update.stats:
                losses = [float(other.stats[f"loss.{update.client}"]) for other in ordered]
                weights = method.own_weights(maps(update.sent), float(update.stats["before"]), losses, others)
                self._own.append(float(np.array(weights)[bad].sum()))
        return list(updates)

    @property
    def weights(self) -> tuple[float | None, float | None]:
        """Of all malicious clients together: in the global model, and in honest clients' data prompts, where these are
        made by the server. Means over rounds and clients."""
        shared, own = (float(np.mean(values)) if values else None for values in (self._shared, self._own))
        return shared, own
