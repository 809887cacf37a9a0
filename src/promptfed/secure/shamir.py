"""Shamir's secret sharing over a prime field: enough shares give the secret, fewer say nothing about it.

Shamir, "How to Share a Secret" (Communications of the ACM, 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297  # the smallest above all secrets of 32 bytes
SIZE = 33  # bytes of a share


def split(secret: int, coefficients: Sequence[int], points: Iterable[int], prime: int = PRIME) -> dict[int, int]:
    """The polynomial secret + a_1 x + a_2 x^2 + ... at these points, none of them 0. Its coefficients must be random;
    one more share than there are coefficients restores the secret."""
    shares = {}
    for x in points:
        value = 0
        for coefficient in reversed([secret, *coefficients]):
            value = (value * x + coefficient) % prime
        shares[x] = value
    return shares


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """The polynomial through these shares at 0, by Lagrange's formula."""
    secret = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        secret += share * above * pow(below, -1, prime)
    return secret % prime
