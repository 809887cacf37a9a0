"""The numbers of a report: the cells of its tables, and its curves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..runs.cells import spread
from ..runs.opened import Run, Stage
from ..runs.protocols import UNSEEN, accuracies
from ..runs.record import LAST
from .gather import Group, ReportData, SeedRun

KINDS = {
    "last": "last round",
    f"mean_of_last_{LAST}": f"mean of the last {LAST} rounds",
    "chosen_on_validation": "chosen on validation data",
}

# ---- the table


@dataclass(frozen=True)
class Cell:
    """A number of a table: mean and standard deviation over seeds; or why it is missing."""

    mean: float | None
    std: float | None = None
    why: str = ""  # it is missing or incomplete


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    help: str
    kind: str  # percent, bytes, count, seconds
    path: tuple[str, ...] = ()
    stages: tuple[str, ...] = ("aggregated",)  # the first that a run has
    optional: bool = False  # shown only if some run has it
    protocol: str = ""  # which of a run's accuracies on unseen data it shows

    @property
    def higher_is_better(self) -> bool:
        return self.kind == "percent"

    def stage(self, metrics: Mapping[str, Any]) -> str:
        return next((name for name in self.stages if name in metrics), "")


_LOCAL = ("local", "mean")
_AFTER, _LATE = ("after_local_all", "after_local"), ("newcomers_aggregated",)
_COUNTED = ("aggregated", "after_local", "after_local_all", "common")  # stages of clients that are there from the start
_AFTER_HELP = "local accuracy after local training: of all clients if eval.after_local is all, else of the participants"
_COMMON_HELP = "local accuracy of the shared model that a personal method has besides the clients' own"
_LATE_HELP = "local accuracy of the clients that join later"
_GROUPS_HELP = "share of samples in the group that is matched to their domain"
COLUMNS = (
    Column("local", "Local", "accuracy on a client's own test data, mean over clients", "percent", _LOCAL),
    Column("worst", "Worst", "local accuracy of the worst client", "percent", ("local", "worst")),
    Column("f1", "Local F1", "macro F1 on a client's own test data, mean over clients", "percent", ("macro_f1",)),
    Column("global", "Global", "accuracy on all clients' test data", "percent", ("global",)),
    Column("global_f1", "Global F1", "macro F1 on all clients' test data", "percent", ("global_macro_f1",)),
    Column("val", "Validation", "local accuracy on validation data", "percent", ("val",)),
    Column("after", "After local", _AFTER_HELP, "percent", _LOCAL, _AFTER),
    Column("common", "Common", _COMMON_HELP, "percent", _LOCAL, ("common",), True),
    Column("newcomers", "Newcomers", _LATE_HELP, "percent", _LOCAL, _LATE, True),
    Column("clustering", "Groups", _GROUPS_HELP, "percent", ("clustering",), optional=True),
    Column("bytes", "Bytes", "exchanged per client and round, up and down", "bytes"),
    Column("passes", "Passes", "samples passed through the model in training, all clients and rounds", "count"),
    Column("seconds", "Seconds", "training and evaluation; comparable on one idle machine only", "seconds"),
)
# By column: why a run may not have it, and the setting that decides so.
_POOLED = ("personal models were not evaluated on all clients' test data in these rounds", "eval.pooled")
_ABSENT = {
    "global": _POOLED,
    "global_f1": _POOLED,
    "val": ("no client has validation data", ""),
    "after": ("there is no evaluation after local training", "eval.after_local"),
    "common": ("the method has no common model", ""),
    "newcomers": ("no newcomer was evaluated in this way", "join.clients"),
    "clustering": ("the method forms no groups, or samples have no domain", ""),
}


# By the heads of protocols.accuracies(), without those of other datasets.
_UNSEEN_HELP = {
    "base": "accuracy on all clients' test data, of the classes that were trained on",
    "novel": "accuracy on classes that nobody has trained on, by their names",
    "H": "harmonic mean of base and novel",
    UNSEEN: "accuracy on the domain whose clients do not train",
}


def columns(data: ReportData) -> list[Column]:
    """Those that are known of at least one run."""
    heads = dict.fromkeys(head for entry in data.entries for head in accuracies(entry.numbers))
    unseen = [
        Column(f"on {head}", head.capitalize(), _UNSEEN_HELP.get(head, "accuracy on another dataset"), "percent",
               stages=(), protocol=head)
        for head in heads
    ]  # fmt: skip
    known = [
        column
        for column in COLUMNS
        if not column.optional or any(_value(e, column, kind) is not None for e in data.entries for kind in KINDS)
    ]
    scores = [column for column in known if column.higher_is_better]
    return [*scores, *unseen, *(column for column in known if not column.higher_is_better)]


def cell(group: Group, column: Column, kind: str) -> Cell:
    known = [v for v in (_value(entry, column, kind) for entry in group.entries) if v is not None]
    if not known:
        return Cell(None, None, _missing(group, column, kind))
    mean, std = spread(known)
    seeds = [f"over {len(known)} of {len(group.entries)} seeds"] if len(known) < len(group.entries) else []
    why = "; ".join([*seeds, *_incomplete(group, column, kind)])
    return Cell(mean, std if len(known) > 1 else None, why)


def rounds(group: Group, kind: str) -> str:
    """Which round a row shows: 20; 11-20; each once where seeds differ."""
    told = []
    for entry in group.entries:
        stage = entry.numbers.get("metrics", {}).get("aggregated", {}).get(kind)
        if stage and "round" in stage:
            told.append(str(stage["round"]))
        elif stage:
            ends = stage["rounds"][0], stage["rounds"][-1]
            told.append(f"{ends[0]}–{ends[1]}" if ends[0] != ends[1] else str(ends[0]))
    return ", ".join(dict.fromkeys(told)) or "–"


def _value(entry: SeedRun, column: Column, kind: str) -> float | None:
    numbers = entry.numbers
    if not numbers:
        return None
    if column.protocol:  # of the final models
        return accuracies(numbers).get(column.protocol) if kind == "last" else None
    if column.key == "bytes":
        each = numbers["communication"]["per_client_and_round"]
        return float(each["up"] + each["down"])
    if column.key == "passes":
        return float(numbers["passes"]["train"])
    if column.key == "seconds":
        return float(sum(numbers["seconds"].values()))
    value: Any = _summary(entry, column, kind)
    for key in column.path:
        value = value.get(key) if value else None
    return None if value is None else float(value)


def _summary(entry: SeedRun, column: Column, kind: str) -> Mapping[str, Any]:
    metrics = entry.numbers.get("metrics", {})
    found: Mapping[str, Any] = metrics.get(column.stage(metrics), {}).get(kind) or {}
    return found


def _missing(group: Group, column: Column, kind: str) -> str:
    """Why no run has the number."""
    metrics = group.first.numbers.get("metrics", {})
    if not metrics:
        return "no round has been evaluated yet"
    if column.protocol:
        return "only the final models were tested on this" if kind != "last" else "this was not asked for"
    stage = column.stage(metrics)
    if stage and kind not in metrics[stage]:
        if column.key == "after" and kind in metrics.get("aggregated", {}):
            return "different clients train in each round, so their rounds cannot be averaged or chosen from"
        if kind == "chosen_on_validation":
            return "no client has validation data to choose a round by"
        return f"none of the last {LAST} rounds was evaluated"
    why, setting = _ABSENT.get(column.key, ("no client has test data", ""))
    value = group.option(*setting.split(".")) if setting else None
    return why if value is None else f"{why} ({setting} = {json.dumps(value)})"


def _incomplete(group: Group, column: Column, kind: str) -> list[str]:
    """Where a mean is over fewer clients or rounds than it seems."""
    found = []
    for entry in group.entries:
        seed = f" (seed {entry.seed})" if len(group.entries) > 1 else ""
        words = (_few_clients(entry, column, kind), _few_rounds(entry, column, kind))
        found += [f"{one}{seed}" for one in words if one]
    return found


def _few_clients(entry: SeedRun, column: Column, kind: str) -> str:
    """An evaluation misses clients that did not answer; after local training it may be of the participants only."""
    stage = column.stage(entry.numbers.get("metrics", {}))
    summary = _summary(entry, column, kind)
    if not summary or stage not in _COUNTED:
        return ""
    at = summary.get("rounds") or [summary["round"]]
    lines: list[Any] = [line for line in entry.run.lines if line["round"] in at and stage in line]
    if not lines and kind == "last" and stage in entry.numbers.get("clients", {}):
        lines = [{stage: {"clients": entry.numbers["clients"][stage]}}]
    few = [(seen, of) for seen, of in (entry.run.covered(line, stage) for line in lines) if seen < of]
    if not few:
        return ""
    seen, of = few[0]
    if len(at) == 1:
        others = "did not take part in the round" if stage == "after_local" else "were not evaluated"
        return f"over {seen} of {of} clients: the others {others}"
    return f"over fewer than all {of} clients in {len(few)} of these {len(at)} evaluated rounds"


def _few_rounds(entry: SeedRun, column: Column, kind: str) -> str:
    if column.key not in ("global", "global_f1") or not kind.startswith("mean"):
        return ""
    at = _summary(entry, column, kind).get("rounds", [])
    scored = [line for line in entry.run.scored if line["round"] in at]
    known = sum(line["aggregated"]["summary"]["global"] is not None for line in scored)
    return f"known in {known} of these {len(at)} evaluated rounds only" if entry.run.scored and known < len(at) else ""


# ---- curves


class Measure(NamedTuple):
    word: str
    title: str  # of its axis
    stage: Stage
    path: tuple[str, ...]


MEASURES = {
    "local": Measure("local", "Local accuracy, mean over clients (%)", "aggregated", _LOCAL),
    "worst": Measure("worst client", "Local accuracy of the worst client (%)", "aggregated", ("local", "worst")),
    "global": Measure("global", "Accuracy on all clients' test data (%)", "aggregated", ("global",)),
    "after": Measure("after local", "Local accuracy after local training, participants (%)", "after_local", _LOCAL),
    "loss": Measure("loss", "Training loss", "aggregated", ()),
}


def series(run: Run, name: str) -> dict[int, float]:
    """Round -> value, where it is known."""
    if name == "loss":
        found = {line["round"]: line["train_loss"] for line in run.lines}
        return {at: float(v) for at, v in found.items() if v is not None and np.isfinite(v)}
    measure = MEASURES[name]
    at, values = run.series(*measure.path, stage=measure.stage)
    return {int(r): float(v) for r, v in zip(at, values, strict=True) if v == v}


def over_seeds(found: Iterable[Mapping[int, float]]) -> dict[int, tuple[float, float]]:
    """Round -> mean and standard deviation of the seeds that have it."""
    each: dict[int, list[float]] = {}
    for one in found:
        for at, value in one.items():
            each.setdefault(at, []).append(value)
    return {at: spread(values) for at, values in sorted(each.items())}


def listed(values: Iterable[Any], most: int = 6) -> str:
    words = [str(value) for value in values]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def thin(rounds: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, evenly spread, always with the first and the last."""
    if len(rounds) <= most:
        return list(rounds)
    at = np.linspace(0, len(rounds) - 1, most).round().astype(int)
    return [rounds[i] for i in dict.fromkeys(at.tolist())]
