"""Secure aggregation: the server learns the sum of a round's updates, and of no client more than that.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), with the
neighbourhoods of Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (CCS 2020).

keys.py         keys, encrypted shares and masks, from libsodium
shamir.py       secrets that enough clients together can restore
fixed_point.py  parameters as integers modulo 2^32, in which masks cancel exactly
site.py         a client's half of a round
server.py       the server's half
"""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from ..errors import UserError
from ..method import Method
from ..privacy import sums_off, tells
from ..seeding import rng

FEWEST = 3  # clients: of two, each knows the other's update from their sum


class Secure(BaseModel):
    """The [secure] section."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    aggregation: bool = Field(False, description="clients mask their updates, so that the server learns only the sum")
    threshold: float = Field(
        0.6, gt=0.5, le=1, description="share of a round's clients that must answer, and that can restore masks"
    )
    neighbours: int = Field(
        0, ge=0, multiple_of=2, description="clients that each one shares masks with, an even number; 0: all others"
    )
    range: float = Field(64.0, gt=0, description="largest absolute value that an update may hold")

    def needed(self, count: int) -> int:
        """How many of so many clients must answer: more than half, so that no two such groups are disjoint."""
        return max(count // 2 + 1, math.ceil(self.threshold * count - 1e-9))


def check(method: Method, name: str, rule: str) -> None:
    """Raises UserError if the server needs more than the sum of updates, or clients send more than updates."""
    if rule != "mean":
        raise UserError(
            f'aggregation.name = "{rule}" looks at single updates, and with secure.aggregation = true the server sees '
            "only their sum (allowed: mean; privacy.clip bounds norms at the clients)"
        )
    if method.centralised:
        why = "it pools the training data of all clients"
    elif all(role in method.private for role in method.roles()):
        why = "its clients send no parameters"
    elif not method.streams or type(method).uploads is not Method.uploads:
        why = "its server needs each update"
    elif told := tells(method):
        why = f"a client tells more of its data {told} than the update that is masked"
    elif method.tuning.collects:
        why = f"clients send sums of their features before training (allowed: {sums_off(method)})"
    else:
        return
    raise UserError(f'secure.aggregation = true: "{name}" cannot be aggregated under masks, since {why}')


def check_count(count: int) -> None:
    """Raises UserError if a round has too few clients."""
    if count < FEWEST:
        raise UserError(f"secure.aggregation = true needs {FEWEST} clients in a round, and {count} take part")


def ring(clients: list[int], seed: int, round: int) -> list[int]:
    """A round's clients in a random order that all of them can compute; neighbours in it share masks."""
    order: list[int] = rng(seed, round, "neighbours").permutation(sorted(clients)).tolist()
    return order


def neighbours(ring: list[int], client: int, count: int) -> list[int]:
    """The clients next to one in the ring, half of them on each side; all others if `count` is 0 or too many."""
    if not count or count >= len(ring) - 1:
        return sorted(other for other in ring if other != client)
    at, half = ring.index(client), count // 2
    return sorted(ring[(at + step) % len(ring)] for step in range(-half, half + 1) if step)
