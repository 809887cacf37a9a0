"""DP2FL: malicious clients enrol with validation sets of wrong labels, on which good models have high losses."""

from __future__ import annotations

from collections.abc import Sequence

from ..clients.base import Clients
from ..method import Method
from ..methods.dp2fl import Dp2fl
from ..params import Params
from ..runs.build import Parts
from .base import Attack
from .clients import Malicious
from .false_losses import ONLY_DP2FL


class PoisonedValidation(Attack):
    """Their training is honest."""

    def why_not(self, method: Method) -> str:
        return "" if isinstance(method, Dp2fl) else ONLY_DP2FL

    def wrapped(self, clients: Clients, parts: Parts, malicious: Sequence[int]) -> Clients:
        return _Poisoned(clients, parts, malicious)


class _Poisoned(Malicious):
    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        last = self.parts.model.classes - 1
        told = super().enroll(clients)
        flipped = {client: {**hello, "y": last - hello["y"]} for client, hello in told.items() if "y" in hello}
        return {
            client: flipped.get(client, hello) if client in self.malicious else hello for client, hello in told.items()
        }
