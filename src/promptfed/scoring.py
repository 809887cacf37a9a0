"""Scores of models, and the numbers of a table made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import Method, Model, Params, Tuning
from . import params as P
from .training import Samples, Work, chunks, context


@dataclass(frozen=True)
class Score:
    """Predictions against labels, as counts that can be added up."""

    n: int
    loss: float  # summed
    tp: np.ndarray  # (classes,) each
    fp: np.ndarray
    fn: np.ndarray

    def __add__(self, other: Score) -> Score:
        return Score(
            self.n + other.n, self.loss + other.loss, self.tp + other.tp, self.fp + other.fp, self.fn + other.fn
        )

    @property
    def accuracy(self) -> float | None:
        return float(self.tp.sum() / self.n) if self.n else None

    @property
    def macro_f1(self) -> float | None:
        """Mean F1 over the classes that occur in labels or predictions."""
        seen = self.tp + self.fp + self.fn > 0
        if not seen.any():
            return None
        return float((2 * self.tp[seen] / (2 * self.tp + self.fp + self.fn)[seen]).mean())


@dataclass(frozen=True)
class Scores:
    """How one client's model does: on its own validation and test data, and on all clients' test data where known."""

    client: int
    parts: dict[str, Score] = field(default_factory=dict)  # "val", "test", "global"
    passes: int = 0  # samples drawn to adapt the model before it was scored
    groups: np.ndarray | None = None  # (groups, domains) test samples, where the method has groups


def evaluate(method: Method, model: Model, work: Work, params: Params, samples: Samples) -> Score:
    """How well these parameters do on these samples; `work` says whose they are."""
    ctx = context(work, model)
    with torch.no_grad():
        each = ((method.tuning.logits(model, params, batch, ctx), batch.y) for batch in chunks(samples))
        return _tally(each, model.classes)


def evaluate_union(
    method: Method, model: Model, work: Work, params: Params, parts: Iterable[Samples], sizes: Sequence[int]
) -> list[Score]:
    """How well one model does on each of several sets of samples of these sizes, which come one after another in parts:
    each is a pass, whatever set its samples are of."""
    ctx, seen = context(work, model), list[tuple[Tensor, Tensor]]()
    with torch.no_grad():
        for samples in parts:
            seen += [(method.tuning.logits(model, params, batch, ctx), batch.y) for batch in chunks(samples)]
    if not seen:
        return [_tally([], model.classes) for _ in sizes]
    logits, labels = (torch.split_with_sizes(torch.cat(values), list(sizes)) for values in zip(*seen, strict=True))
    return [_tally([one], model.classes) for one in zip(logits, labels, strict=True)]


def unions(method: Method) -> bool:
    """Whether all clients that received the same have one model, whose predictions depend on nothing else of them."""
    tuning, kind = method.tuning, type(method)
    plain = type(tuning).logits is Tuning.logits and bool(tuning.feature_roles())
    return plain and not method.personal and kind.start is Method.start and kind.assign is Method.assign


class Pooled:
    """All clients' test data, on which every personal model is scored. Features are kept for the next model: personal
    ones often differ in their heads only."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._shared: Params | None = None  # what the features were made with
        self._known: list[tuple[Tensor, Tensor]] = []  # features and labels of each batch

    @torch.no_grad()
    def score(self, method: Method, model: Model, work: Work, params: Params) -> Score:
        tuning, samples = method.tuning, self._samples
        roles = tuning.feature_roles() if type(tuning).logits is Tuning.logits else ()
        if not roles:
            return evaluate(method, model, work, params, samples)
        shared = {name: p for name, p in params.items() if tuning.role(name) in roles}
        if self._shared is None or not P.equal(shared, self._shared):
            ctx = context(work, model)
            self._known = [(tuning.features(model, params, batch, ctx), batch.y) for batch in chunks(samples)]
            self._shared = shared
        return _tally(((tuning.head(model, params, features), y) for features, y in self._known), model.classes)


def _tally(each: Iterable[tuple[Tensor, Tensor]], classes: int) -> Score:
    """Counts of logits (B, classes) against labels (B,)."""
    confusion = torch.zeros(classes, classes, dtype=torch.int64)  # label, prediction
    loss = 0.0
    for logits, y in each:
        logits = logits.float()
        loss += float(torch.nn.functional.cross_entropy(logits, y, reduction="sum"))
        cells = y * classes + logits.argmax(1)
        confusion += torch.bincount(cells, minlength=classes**2).reshape(classes, classes).cpu()
    tp, n = confusion.diagonal(), int(confusion.sum())
    return Score(n, loss, tp.numpy(), (confusion.sum(0) - tp).numpy(), (confusion.sum(1) - tp).numpy())


def summary(scores: Sequence[Scores], classes: int, one_model: bool) -> dict[str, Any]:
    """Local accuracy over clients, global accuracy, macro F1 and loss. None where no client has the data for it.

    `one_model`: all clients share one global model, so its global accuracy is known from their own test data.
    """
    zero = np.zeros(classes, np.int64)
    tests = [s.parts["test"] for s in scores]
    pooled = sum(tests, Score(0, 0.0, zero, zero, zero))
    wide = [s.parts["global"] for s in scores if "global" in s.parts]
    if one_model:
        wide = [pooled]
    local = [t.accuracy for t in tests if t.accuracy is not None]
    found = {
        "local": {
            "mean": _mean(local),
            "std": float(np.std(local)) if local else None,
            "worst": min(local, default=None),
            "weighted": pooled.accuracy,  # mean over samples, not clients
        },
        "macro_f1": _mean(t.macro_f1 for t in tests),
        "global": _mean(w.accuracy for w in wide),
        "global_macro_f1": _mean(w.macro_f1 for w in wide),
        "loss": _loss(pooled),
        "clients": len(local),  # that have test data
        "val": _mean(s.parts["val"].accuracy for s in scores),
    }
    tables = [s.groups for s in scores if s.groups is not None and s.groups.size]
    if tables:
        found["clustering"] = clustering(tables)
    return found


def clustering(tables: Sequence[np.ndarray]) -> float:
    """Share of samples whose group is the one matched to their domain, in the best one-to-one matching. Tables are
    (groups, domains); one client may have seen fewer groups than another."""
    whole = np.zeros((max(len(t) for t in tables), tables[0].shape[1]), np.int64)
    for t in tables:
        whole[: len(t)] += t
    from scipy.optimize import linear_sum_assignment  # half a second, which each worker process would take

    rows, columns = linear_sum_assignment(whole, maximize=True)
    return float(whole[rows, columns].sum() / max(whole.sum(), 1))


def per_client(scores: Sequence[Scores]) -> list[dict[str, Any]]:
    rows = []
    for s in scores:
        test, val = s.parts["test"], s.parts["val"]
        row = {"client": s.client, "n_test": test.n, "accuracy": test.accuracy, "macro_f1": test.macro_f1}
        row |= {"loss": _loss(test), "n_val": val.n, "val_accuracy": val.accuracy}
        if "global" in s.parts:
            row["global_accuracy"] = s.parts["global"].accuracy
        if s.groups is not None:
            row["groups"] = s.groups.sum(1).tolist()  # test samples that select each; later groups are not selected
        rows.append(row)
    return rows


def average(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each number, leaving the unknown ones out."""
    out: dict[str, Any] = {}
    for key, first in summaries[0].items():
        values = [s[key] for s in summaries]
        out[key] = average(values) if isinstance(first, dict) else _mean(values)
    return out


def _loss(score: Score) -> float | None:
    """A sample's mean; None where there is none, or where the model has diverged."""
    mean = score.loss / score.n if score.n else None
    return mean if mean is not None and math.isfinite(mean) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None
