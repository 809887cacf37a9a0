"""Attack: what the malicious clients of a run do, and how to tell whether it worked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..analysis.opened import Opened
from ..clients.base import Clients
from ..data import Federation
from ..method import Method
from ..runs import build

TARGET = 0  # the class that targeted attacks want: the first one


class Attack:
    """One object serves one run. By default, malicious clients do what honest ones do."""

    def why_not(self, method: Method) -> str:
        """Why it cannot be tried on a method; empty if it can."""
        return ""

    def poisoned(self, federation: Federation, malicious: Sequence[int]) -> Federation:
        """The federation with the data that malicious clients train on instead of their own."""
        return federation

    def wrapped(self, clients: Clients, parts: build.Parts, malicious: Sequence[int]) -> Clients:
        """The clients, of which the malicious ones send something else."""
        return clients

    def aimed(self, images: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Images (n, C, H, W) uint8 as the attacker shows them to the trained model, and the classes (n,) that it wants
        to see predicted; None if it wants no class in particular."""
        return None

    def clients(self, parts: build.Parts, folder: Path, malicious: Sequence[int]) -> Clients:
        """The engine of the run. Poisoned data are in this process only."""
        poisoned = replace(parts, federation=self.poisoned(parts.federation, malicious))
        return self.wrapped(build.clients(poisoned, folder), parts, malicious)

    def success(self, run: Opened, clients: Sequence[int]) -> float | None:
        """The share of these clients' test images that get the wanted class, of those that do not belong to it."""
        data, hits = run.federation.dataset, list[np.ndarray]()
        for client in clients:
            index = run.federation.sites[client].test
            aim = self.aimed(data.images[index], data.labels[index], len(data.classes))
            if aim is None:
                return None
            images, wanted = aim
            other = wanted != data.labels[index]
            if other.any():
                found = run.probabilities(*run.own(client), run.samples(images[other])).argmax(1)
                hits.append(found == wanted[other])
        return float(np.concatenate(hits).mean()) if hits else None
