"""What malicious clients send instead of their updates, to keep the model from learning. They know all honest ones.

Each takes changes as a matrix (K, d) in double precision, and which of its rows are malicious, and returns their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from ..clients.base import Clients
from ..runs.build import Parts
from .base import Attack
from .clients import Forge, Forging


class Untargeted(Attack):
    def __init__(self, forge: Forge) -> None:
        self._forge = forge

    def wrapped(self, clients: Clients, parts: Parts, malicious: Sequence[int]) -> Clients:
        return Forging(clients, parts, malicious, self._forge)


def sign_flip(changes: Tensor, malicious: Tensor, random: torch.Generator) -> Tensor:
    """Their own changes, backwards."""
    return -changes[malicious]


def scaled(changes: Tensor, malicious: Tensor, random: torch.Generator) -> Tensor:
    """Their own changes, backwards and a hundred times as long."""
    return -100 * changes[malicious]


def gaussian(changes: Tensor, malicious: Tensor, random: torch.Generator) -> Tensor:
    """Noise, a hundred times as long as an honest change."""
    noise = torch.randn(changes[malicious].shape, generator=random, dtype=changes.dtype)
    length: Tensor = 100 * changes[~malicious].norm(dim=1).median()
    return length * torch.nn.functional.normalize(noise, dim=1)


def alie(changes: Tensor, malicious: Tensor, random: torch.Generator) -> Tensor:
    """Baruch et al., "A Little Is Enough" (NeurIPS 2019): as far from the mean as enough honest clients are."""
    honest = changes[~malicious]
    count, bad = len(changes), int(malicious.sum())
    supporters = count // 2 + 1 - bad  # honest clients that must be farther away for a majority
    share = min(max((len(honest) - supporters) / len(honest), 0.5), 0.99)
    return _all(honest.mean(0) - NormalDist().inv_cdf(share) * honest.std(0), bad)


def ipm(changes: Tensor, malicious: Tensor, random: torch.Generator) -> Tensor:
    """Inner product manipulation (Xie et al., UAI 2019): so that the mean of all points backwards."""
    honest, bad = changes[~malicious], int(malicious.sum())
    return _all(-1.5 * len(honest) / bad * honest.mean(0), bad)


def min_max(changes: Tensor, malicious: Tensor, random: torch.Generator) -> Tensor:
    """Shejwalkar and Houmansadr (NDSS 2021): as far against the deviation as no honest client is from another."""
    honest = changes[~malicious]
    mean, away = honest.mean(0), -honest.std(0)
    most, low, high = torch.cdist(honest, honest).max(), 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        fits = bool((honest - mean - middle * away).norm(dim=1).max() <= most)
        low, high = (middle, high) if fits else (low, middle)
    return _all(mean + low * away, int(malicious.sum()))


def _all(change: Tensor, count: int) -> Tensor:
    return change.expand(count, -1)


UNTARGETED: dict[str, Forge] = {
    "sign-flip": sign_flip,
    "scaled": scaled,
    "gaussian": gaussian,
    "alie": alie,
    "ipm": ipm,
    "min-max": min_max,
}
