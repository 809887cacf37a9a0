"""The weights of both aggregations, Eq. 7-17, as functions of plain numbers.

Everything is float64, and sums are rounded once (`fsum`): a result depends neither on an order nor on a number of
threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

Rule = Literal["bounded", "paper", "proportional"]  # what a retained negative client weighs beside positive ones
EPS = 1e-5  # added to a distance (Eq. 14)


def raised(losses: Sequence[float], share: float) -> list[float]:
    """With the lowest ones, as many as this share, raised to the next: who reports less than it has gains no more than
    the best of the others."""
    least = sorted(losses)[int(share * len(losses) + 1e-9)]
    return [max(loss, least) for loss in losses]


def global_weights(totals: Sequence[float]) -> list[float]:
    """Eq. 8. totals[k] = sum_j loss_kj, of client k's model on all sets: w_k = (S - totals[k]) / (S (K - 1)).

    They sum to 1. Equal ones where there is nothing to tell clients apart (S = 0); a client alone has weight 1.
    """
    k, s = len(totals), math.fsum(totals)
    if k == 1 or s <= 0:
        return [1 / k] * k
    return [(s - total) / (s * (k - 1)) for total in totals]


def local_weights(
    before: float,
    losses: Sequence[float],
    distances: Sequence[float],
    *,
    alpha: float,
    beta: float,
    rule: Rule = "bounded",
    gamma: float = 0.0,
) -> list[float]:
    """Eq. 9-11 and 13-17, for client k: what each of K trained data prompts weighs in its own one.

    before: L, the loss on k's validation set before the round; losses (K,): those of the K trained models on it;
    distances (K,): of the K data prompts from k's own one. Positive clients have a loss below L, retained negative ones
    one in [L, alpha L), and the others are discarded: weight 0. The weights sum to 1; to beta where nobody is positive;
    to 0 where all are discarded, or L is no number.
    """
    if not math.isfinite(before):
        return [0.0] * len(losses)
    loss = np.asarray(losses, np.float64)
    positive = loss < before
    retained = (loss >= before) & (loss < alpha * before)
    # Eq. 14: > 0 for a positive client, <= 0 for a retained negative one.
    raw = np.where(positive | retained, before - loss, 0.0) / (np.asarray(distances, np.float64) + EPS)
    if positive.any():
        f = np.where(positive, raw, 0.0)
        f[retained] = _retained(raw[retained], float(raw[positive].min()), rule, gamma)
        return list(map(float, f / math.fsum(f)))
    weights = np.zeros_like(loss)
    count, s = int(retained.sum()), math.fsum(raw[retained])
    if count == 1 or s == 0:  # one alone, or all with a loss of exactly L
        weights[retained] = beta / max(count, 1)
    else:
        weights[retained] = beta * (s - raw[retained]) / (s * (count - 1))
    return list(map(float, weights))


def _retained(raw: np.ndarray, weakest: float, rule: Rule, gamma: float) -> np.ndarray:
    """f(x) of retained negatives, x <= 0, beside positive clients of which the weakest has raw weight m.

    bounded: m M / x, where M is the x nearest to 0: at most m, and falling as the loss grows. M = 0: m where x = 0,
    and 0 elsewhere, which is the limit. proportional: gamma |x|, which grows with the loss and has no bound. paper: the
    same with gamma = m / |M| (M below 0), which gives the best one the weight m and all worse ones more.
    """
    below = raw[raw < 0]
    if rule == "paper":
        gamma = weakest / float(-below.max()) if below.size else 0.0
    if rule != "bounded":
        return np.asarray(gamma * np.abs(raw))
    nearest = max(raw, default=0.0)
    return np.where(raw == 0, weakest, 0.0) if nearest == 0 else np.asarray(weakest * (nearest / raw))
