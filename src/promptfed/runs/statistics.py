"""Whether one row of a comparison is ahead of another: paired differences over seeds and clients, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from .protocols import HARMONIC

LEVEL = 0.95
_DRAWS = 4_000
_ROUNDING = 1e-20  # a variance below it is none

Numbers = Mapping[str, Any]  # result.json of a run
# local, global; trained: local, after local training of all clients; newcomers: local, of clients that never trained;
# or the column of a protocol on data that nobody has trained on
Column = str
_STAGES = {"trained": "after_local_all", "newcomers": "newcomers_aggregated"}


@dataclass(frozen=True)
class Difference:
    """Of two accuracies, as fractions: ours minus theirs, with a 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int  # that are paired
    clients: int
    column: Column = "local"  # the accuracy that it is the difference of

    @property
    def word(self) -> str:
        """What the interval allows to say."""
        if self.low <= 0 <= self.high:
            return "cannot be told apart"
        return "ahead" if self.mean > 0 else "behind"

    def complete(self) -> dict[str, Any]:
        return {**asdict(self), "word": self.word}


def one_model(numbers: Numbers) -> bool:
    """Whether all clients of a run share one model: only then its global accuracy follows from the clients' own scores,
    and none of them is scored on all clients' test data."""
    own = any("global_accuracy" in client for client in numbers.get("clients", {}).get("aggregated", ()))
    return not own and numbers["metrics"]["aggregated"]["last"]["global"] is not None


def main_column(*rows: Sequence[Numbers]) -> Column:
    """The accuracy to compare rows by: on all clients' test data if each has one model for all clients; else on each
    client's own."""
    return "global" if all(one_model(numbers) for runs in rows for numbers in runs) else "local"


def difference(ours: Sequence[Numbers], theirs: Sequence[Numbers], column: Column | None = None) -> Difference | None:
    """Between two rows, paired by seed and client, in their main column unless another is asked for. None if they share
    no seed or no client, if their clients hold different test data, or if there is one seed and one client."""
    main = main_column(ours, theirs)
    column = column or main
    apart = column == "global" and main == "local"  # each client's own model, on all clients' test data
    stage = _STAGES.get(column, "aggregated")
    a, b = ({numbers["seed"]: _scores(numbers, stage, apart) for numbers in runs} for runs in (ours, theirs))
    pairs = [(a[seed], b[seed]) for seed in a if seed in b]
    clients = sorted(set.intersection(*({*x} & {*y} for x, y in pairs))) if pairs else []
    sizes = [[(x[c][0], y[c][0]) for c in clients] for x, y in pairs]
    if not clients or any(n != m for row in sizes for n, m in row):
        return None
    values = np.array([[x[c][1] - y[c][1] for c in clients] for x, y in pairs])
    counts = np.array(sizes, float)[..., 0].mean(0)
    weights = counts if column == main == "global" else np.ones(len(clients))
    each = (np.array([[one[c][1] for c in clients] for one in row]) for row in zip(*pairs, strict=True))
    noise = sum(_of_images(scores, counts, apart) for scores in each)
    shares = weights / weights.sum()
    return interval(values, weights, column, float(noise if apart else shares**2 @ noise), shared=apart)


def on_unseen(ours: Sequence[Numbers], theirs: Sequence[Numbers], column: Column) -> Difference | None:
    """As difference(), in the column of a protocol whose images nobody has trained on: the same ones score all models,
    so that one seed and one model have an interval too. None if a row has not recorded how many images, or other ones.
    """
    a, b = ({n["seed"]: one for n in runs if (one := _on_images(n, column))} for runs in (ours, theirs))
    pairs = [(a[seed], b[seed]) for seed in a if seed in b]
    models = max((len(one.accuracies) for pair in pairs for one in pair), default=0)
    if not pairs or any(len(one.accuracies) not in (1, models) for pair in pairs for one in pair):
        return None
    if any(x.images != y.images for x, y in pairs):
        return None
    each = [np.broadcast_to(x.accuracies - y.accuracies, models) for x, y in pairs]
    noise = float(np.mean([x.noise + y.noise for x, y in pairs]))
    return interval(np.array(each), np.ones(models), column, noise, shared=True)


class _OnImages(NamedTuple):
    accuracies: np.ndarray  # of each model
    noise: float  # the variance of their mean by the choice of images
    images: tuple[int, ...]


def _on_images(numbers: Numbers, column: Column) -> _OnImages | None:
    found = numbers.get("protocols", {}).get("scored", {})
    if column == HARMONIC:
        base, novel = (_on_images(numbers, part) for part in ("base", "novel"))
        return _harmonic(base, novel) if base and novel else None
    if column not in found or None in found[column]["accuracies"]:
        return None
    accuracies, images = np.array(found[column]["accuracies"]), found[column]["images"]
    return _OnImages(accuracies, float(_of_images(accuracies, np.array([images]), together=True)), (images,))


def _harmonic(a: _OnImages, b: _OnImages) -> _OnImages:
    """The harmonic mean of two mean accuracies, to first order in each model's."""
    mean_a, mean_b = a.accuracies.mean(), b.accuracies.mean()
    by_a, by_b = _slopes(mean_a, mean_b)
    each = by_a * a.accuracies + by_b * b.accuracies  # whose mean is 2ab / (a + b)
    by_a, by_b = _slopes(*(max(mean, 1 / one.images[0]) for mean, one in ((mean_a, a), (mean_b, b))))
    return _OnImages(each, float(by_a**2 * a.noise + by_b**2 * b.noise), a.images + b.images)


def _slopes(a: float, b: float) -> tuple[float, float]:
    """Of the harmonic mean, by each of both; it is homogeneous, so that it is their weighted sum."""
    return (2 * (b / (a + b)) ** 2, 2 * (a / (a + b)) ** 2) if a + b else (1.0, 1.0)


def _of_images(scores: np.ndarray, counts: np.ndarray, together: bool) -> Any:
    """The variance of accuracies (seeds, clients) by the choice of test images: of each client, or `together` of models
    that are all scored on the images of all. By Laplace's rule, so that it is never zero."""
    n, mean = (counts.sum(), scores.mean()) if together else (counts, scores.mean(0))
    likely = (mean * n + 1) / (n + 2)
    return likely * (1 - likely) / n


def interval(
    values: np.ndarray, weights: np.ndarray, column: Column = "local", noise: float = 0.0, shared: bool = False
) -> Difference | None:
    """The mean of paired differences (seeds, clients), the clients weighted, and its bootstrap interval. None if
    nothing tells how wide it is.

    Seeds and clients are resampled independently. A percentile interval of few values is too narrow, so each part is
    scaled by sqrt(n / (n - 1)) and their sum by the ratio of Student's t to the normal quantile, with Satterthwaite's
    degrees of freedom. What is specific to a seed at a client is in both parts: the interval is rather too wide.

    `noise`: the variance by the choice of test images, as if both rows had erred independently. Where images differ
    between clients it is in their spread already, and counts only if all differences are equal; if the same images
    score all clients' models (`shared`), it is added."""
    seeds, clients = values.shape
    shares = weights / weights.sum()
    mean = float((values @ shares).mean())
    rng, draws, variances = np.random.default_rng(0), np.zeros(_DRAWS), []
    for each, share in ((values @ shares, np.full(seeds, 1 / seeds)), (values.mean(0), shares)):
        if len(each) == 1:
            continue
        n = 1 / float(share @ share)  # Kish's effective number
        drawn = rng.multinomial(len(each), np.full(len(each), 1 / len(each)), _DRAWS) * share
        part = np.sqrt(n / (n - 1)) * (drawn @ (each - mean)) / drawn.sum(1)
        variances.append((float(part.var()), n - 1))
        draws += part
    if not variances and not shared:
        return None
    if shared or (mean and max(variance for variance, _ in variances) < _ROUNDING):
        if not noise:
            return None
        variances.append((noise, np.inf))
        error = rng.normal(0, np.sqrt(noise), _DRAWS)
        draws = np.concatenate([draws + error, draws - error])  # symmetric: theirs minus ours has the mirrored interval
    total = sum(variance for variance, _ in variances)
    uncertain = sum(v**2 / df for v, df in variances)
    tail = (1 + LEVEL) / 2
    wider = stdtrit(total**2 / uncertain, tail) / ndtri(tail) if uncertain else 1.0
    low, high = (float(mean + wider * q) for q in np.quantile(draws, (1 - tail, tail)))
    return Difference(mean, low, high, seeds, clients, column)


def over_clients(values: np.ndarray, form: str = ".2f") -> str:
    """The mean of one number per client, with its interval where there are several."""
    found = interval(values[None], np.ones(len(values)))
    return f"{values.mean():{form}}" + (f" [{found.low:{form}}, {found.high:{form}}]" if found else "")


def _scores(numbers: Numbers, stage: str, apart: bool) -> dict[int, tuple[int, float]]:
    """Client -> its test samples and accuracy in the last evaluated round. `apart`: on all clients' test data, where a
    model that all clients share has one accuracy for all."""
    rows = numbers.get("clients", {}).get(stage, ())
    whole = numbers["metrics"]["aggregated"]["last"]["global"]
    scores = ((row, row.get("global_accuracy", whole) if apart else row["accuracy"]) for row in rows)
    return {row["client"]: (row["n_test"], score) for row, score in scores if score is not None}
