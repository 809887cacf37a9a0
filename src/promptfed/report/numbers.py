"""The numbers of a report: the cells of its tables, and its curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runs.record import LAST
from .gather import Group, ReportData, SeedRun
from .runs import Stage

KINDS = {
    "last": "last round",
    f"mean_of_last_{LAST}": f"mean of the last {LAST} rounds",
    "chosen_on_validation": "chosen on validation data",
}

# ---- the table


@dataclass(frozen=True)
class Cell:
    """A number of a table: mean and standard deviation over seeds; or why there is none."""

    mean: float | None
    std: float | None = None
    why: str = ""  # it is missing, or not quite what the column says


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    help: str
    kind: str  # text, percent, bytes, count, seconds
    better: int = 0  # 1: more is better, -1: less is
    stages: tuple[str, ...] = ()  # the first that a run has
    path: tuple[str, ...] = ()
    optional: bool = False  # shown where some run has it


_LOCAL = ("local", "mean")
_COUNTED = ("aggregated", "after_local", "after_local_all", "common")  # not those of newcomers
_NOW, _AFTER = ("aggregated",), ("after_local_all", "after_local")
_LATE, _LATE_AFTER = ("newcomers_aggregated",), ("newcomers_after_local_all", "newcomers_after_local")
_AFTER_HELP = (
    "local accuracy after a round of local training: of everyone where that was asked for, otherwise of the round's "
    "participants"
)
_COMMON_HELP = "local accuracy of the one model that a personal method has besides the clients' own"
_LATE_HELP = "local accuracy of the clients that were not there from the start"
COLUMNS = (
    Column("local", "Local", "accuracy on a client's own test data, mean over clients", "percent", 1, _NOW, _LOCAL),
    Column("worst", "Worst", "local accuracy of the worst client", "percent", 1, _NOW, ("local", "worst")),
    Column("global", "Global", "accuracy on everybody's test data", "percent", 1, _NOW, ("global",)),
    Column("f1", "Macro F1", "mean over classes, then over clients", "percent", 1, _NOW, ("macro_f1",)),
    Column("after", "After local", _AFTER_HELP, "percent", 1, _AFTER, _LOCAL),
    Column("common", "Common", _COMMON_HELP, "percent", 1, ("common",), _LOCAL, True),
    Column("common_global", "Common, global", "on everybody's test data", "percent", 1, ("common",), ("global",), True),
    Column("newcomers", "Newcomers", _LATE_HELP, "percent", 1, _LATE, _LOCAL, True),
    Column("newcomers_after", "Newcomers after local", _AFTER_HELP, "percent", 1, _LATE_AFTER, _LOCAL, True),
    Column("newcomers_common", "Newcomers, common", _COMMON_HELP, "percent", 1, ("newcomers_common",), _LOCAL, True),
    Column(
        "clustering",
        "Groups",
        "samples in the group matched to their domain",
        "percent",
        1,
        _NOW,
        ("clustering",),
        True,
    ),
    Column("bytes", "Bytes", "exchanged by a client in a round, up and down", "bytes", -1),
    Column("passes", "Passes", "samples passed through the model in training, all clients and rounds", "count", -1),
    Column("seconds", "Seconds", "training and evaluation; to be compared on one idle machine only", "seconds", -1),
)


def columns(found: ReportData) -> list[Column]:
    """Those that say something of at least one run."""
    shown = []
    for column in COLUMNS:
        known = any(
            _value(entry, column, kind) is not None for entry in found.entries for kind in KINDS if column.optional
        )
        if known or not column.optional:
            shown.append(column)
    return shown


def cell(group: Group, column: Column, kind: str) -> Cell:
    known = [v for v in (_value(entry, column, kind) for entry in group.entries) if v is not None]
    if not known:
        return Cell(None, None, _missing(group, column, kind))
    few = _few(group, column, kind)
    std = float(np.std(known, ddof=1)) if len(known) > 1 else None
    if len(known) < len(group.entries):
        few.insert(0, f"known of {len(known)} of {len(group.entries)} seeds")
    return Cell(float(np.mean(known)), std, "; ".join(few))


def rounds(group: Group, kind: str) -> str:
    """Which round a row shows: 20; 11-20; one a seed where seeds differ."""
    told = []
    for entry in group.entries:
        stage = entry.numbers.get("metrics", {}).get("aggregated", {}).get(kind)
        if stage and "round" in stage:
            told.append(str(stage["round"]))
        elif stage:
            ends = stage["rounds"][0], stage["rounds"][-1]
            told.append(f"{ends[0]}–{ends[1]}" if ends[0] != ends[1] else str(ends[0]))
    return ", ".join(dict.fromkeys(told)) or "–"


def _stage(entry: SeedRun, column: Column, kind: str) -> Mapping[str, Any] | None:
    metrics = entry.numbers.get("metrics", {})
    stage = next((name for name in column.stages if name in metrics), None)
    found: Mapping[str, Any] | None = metrics[stage].get(kind) if stage else None
    return found


def _value(entry: SeedRun, column: Column, kind: str) -> float | None:
    numbers = entry.numbers
    if not numbers:
        return None
    if column.key == "bytes":
        each = numbers["communication"]["per_client_and_round"]
        return float(each["up"] + each["down"])
    if column.key == "passes":
        return float(numbers["passes"]["train"])
    if column.key == "seconds":
        return float(sum(numbers["seconds"].values()))
    value: Any = _stage(entry, column, kind)
    for key in column.path:
        value = value.get(key) if value else None
    return None if value is None else float(value)


def _missing(group: Group, column: Column, kind: str) -> str:
    """Why nobody knows the number."""
    metrics = group.first.numbers.get("metrics", {})
    if not metrics:
        return "no round has been evaluated yet"
    stage = next((name for name in column.stages if name in metrics), None)
    if stage is None:
        if column.key == "after":
            how = group.option("eval", "after_local")
            return f'locally trained models were not scored (eval.after_local = "{how}")' if how == "none" else (
                "no locally trained model has been scored"
            )  # fmt: skip
        if column.key.startswith("newcomers"):
            join = group.option("join", "clients")
            none = "every client is there from the start (join.clients is empty)"
            return "not scored for newcomers under this method and evaluation" if join else none
        return "the method has no common model"
    if kind not in metrics[stage]:
        if column.key == "after" and kind in metrics.get("aggregated", {}):
            return "each round was trained by other clients: rounds cannot be put together or chosen from"
        if kind == "chosen_on_validation":
            return "no client has validation data to choose a round by"
        return f"the last {LAST} rounds hold no evaluation"
    if column.key == "global":
        pooled = group.option("eval", "pooled")
        if pooled == "never":
            return 'personal models were not scored on everybody\'s test data (eval.pooled = "never")'
        if pooled == "last":
            return (
                'personal models are scored on everybody\'s test data after the last round only (eval.pooled = "last")'
            )
        return "the models were not scored on everybody's test data"
    if column.key == "clustering":
        return "the method forms no groups, or samples have no domain"
    return "no client has test data"


def _few(group: Group, column: Column, kind: str) -> list[str]:
    """Where a mean is over fewer clients or rounds than it seems."""
    told = []
    for entry in group.entries:
        seed = f" (seed {entry.seed})" if len(group.entries) > 1 else ""
        told += [f"{words}{seed}" for words in (_clients(entry, column, kind), _rounds(entry, column, kind)) if words]
    return told


def _clients(entry: SeedRun, column: Column, kind: str) -> str:
    """A round's evaluation misses the clients that were away; locally trained models may be its participants' alone."""
    stage = next((name for name in column.stages if name in entry.numbers.get("metrics", {})), "")
    found = entry.numbers.get("metrics", {}).get(stage, {}).get(kind)
    if not found or stage not in _COUNTED:
        return ""
    at = found.get("rounds") or [found["round"]]
    lines: list[Any] = [line for line in entry.run.lines if line["round"] in at and stage in line]
    if not lines and kind == "last" and stage in entry.numbers.get("clients", {}):
        lines = [{stage: {"clients": entry.numbers["clients"][stage]}}]
    each = [entry.run.covered(line, stage) for line in lines]
    few = [(seen, of) for seen, of in each if seen < of]
    if not few:
        return ""
    if len(at) == 1:
        others = "did not take part in the round" if stage == "after_local" else "were not evaluated"
        return f"of {few[0][0]} of {few[0][1]} clients: the others {others}"
    return f"of fewer than all {few[0][1]} clients in {len(few)} of these {len(at)} evaluated rounds"


def _rounds(entry: SeedRun, column: Column, kind: str) -> str:
    if column.key != "global" or not kind.startswith("mean"):
        return ""
    shown = (_stage(entry, column, kind) or {}).get("rounds", [])
    known = sum(
        line["aggregated"]["summary"]["global"] is not None for line in entry.run.scored if line["round"] in shown
    )
    few = entry.run.scored and known < len(shown)
    return f"known in {known} of these {len(shown)} evaluated rounds only" if few else ""


# ---- curves


MEASURES: dict[str, tuple[str, Stage, tuple[str, ...]]] = {
    "local": ("Local accuracy, mean over clients (%)", "aggregated", ("local", "mean")),
    "worst": ("Local accuracy of the worst client (%)", "aggregated", ("local", "worst")),
    "global": ("Accuracy on everybody's test data (%)", "aggregated", ("global",)),
    "after": ("Local accuracy after local training, participants (%)", "after_local", ("local", "mean")),
    "loss": ("Training loss", "aggregated", ()),
}


def series(entry: SeedRun, measure: str) -> dict[int, float]:
    """Round -> value, where it is known."""
    if measure == "loss":
        found = {line["round"]: line["train_loss"] for line in entry.run.lines}
        return {at: float(v) for at, v in found.items() if v is not None and np.isfinite(v)}
    _, stage, path = MEASURES[measure]
    at, values = entry.run.series(*path, stage=stage)
    return {int(r): float(v) for r, v in zip(at, values, strict=True) if v == v}


def over_seeds(found: Iterable[Mapping[int, float]]) -> dict[int, tuple[float, float]]:
    """Round -> mean and standard deviation of the seeds that have it."""
    each: dict[int, list[float]] = {}
    for one in found:
        for at, value in one.items():
            each.setdefault(at, []).append(value)
    return {at: (float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else 0.0) for at, v in sorted(each.items())}


def thin(rounds: Sequence[int], most: int) -> list[int]:
    """So many of them, evenly spread, the first and the last always."""
    if len(rounds) <= most:
        return list(rounds)
    at = np.linspace(0, len(rounds) - 1, most).round().astype(int)
    return [rounds[i] for i in dict.fromkeys(at.tolist())]
