"""What a report is made of: the runs found in folders, put together by label, and their numbers.

A folder that cannot be read costs its own rows only: a sentence in `Found.problems` says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import record
from ..comparison import Row
from ..errors import UserError
from ..record import LAST
from .runs import Run, Stage

KINDS = {
    "last": "last round",
    f"mean_of_last_{LAST}": f"mean of the last {LAST} rounds",
    "chosen_on_validation": "chosen on validation data",
}
_FILES = ("config.toml", "rounds.jsonl", "result.json")  # any of them makes a folder a run
_BROKEN = (UserError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True)
class Entry:
    """One run. `numbers`: as in result.json, of the rounds there are; empty before the first evaluation."""

    run: Run
    numbers: dict[str, Any]
    label: str
    origin: Path  # the folder that was named: the run itself or its comparison
    about: dict[str, Any]  # dataset and kind of the partition
    partition: str  # its hash; runs with the same one have the same clients

    @property
    def seed(self) -> int:
        return int(self.run.settings.get("seed", self.numbers.get("seed", 0)))

    @property
    def planned(self) -> int:
        return int(self.run.settings.get("rounds", self.numbers.get("rounds", 0)))

    @property
    def done(self) -> int:
        return self.run.last or int(self.numbers.get("rounds", 0))

    @property
    def finished(self) -> bool:
        return self.done >= max(1, self.planned)


@dataclass(frozen=True)
class Group:
    """A row of the table: the runs of one configuration, a seed each."""

    label: str
    entries: list[Entry]

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def setting(self) -> str:
        return self.first.run.setting

    def option(self, section: str, key: str) -> Any:
        return self.first.run.settings.get(section, {}).get(key)


@dataclass(frozen=True)
class Found:
    groups: list[Group]
    folders: list[Path]  # as they were named
    problems: list[str] = field(default_factory=list)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # label -> row and column, in tables with columns

    @property
    def entries(self) -> list[Entry]:
        return [entry for group in self.groups for entry in group.entries]

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(group.setting for group in self.groups))


def gather(folders: Sequence[Path]) -> Found:
    """All runs in these folders, each a run's or a comparison's."""
    if not folders:
        raise UserError("report: name the folder of a run or of a comparison")
    entries: list[Entry] = []
    problems: list[str] = []
    places: dict[str, tuple[str, str]] = {}
    seen: set[Path] = set()
    for folder in folders:
        for path, label in _runs(folder, problems, places):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            told: list[str] = []
            try:
                entries.append(_read(path, label, folder, told))
                problems += told
            except _BROKEN as error:
                problems.append(f"{path} is left out, as it cannot be read: {_why(error)}.")
    for entry in entries:
        if not entry.finished:
            evaluated = "" if entry.run.scored else ", none of them evaluated yet"
            of = f"{entry.done} of {entry.planned} rounds"
            problems.append(f"{entry.run.folder} is not finished: it has {of}{evaluated}.")
    if not entries:
        raise UserError(" ".join(problems).rstrip(".") or "report: no run was found")
    return Found(_grouped(entries), list(folders), problems, places)


def _runs(folder: Path, problems: list[str], places: dict[str, tuple[str, str]]) -> list[tuple[Path, str | None]]:
    """The folders of runs, and their labels where a comparison names them; in the order of its table. Notes where a
    table with columns has them."""
    if not folder.is_dir():
        raise UserError(f'"{folder}" is no folder')
    if _is_run(folder):
        return [(folder, None)]
    below = sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))
    if not below:
        raise UserError(f'"{folder}" holds no run and no comparison')
    labels: dict[str, str] = {}
    try:
        file = folder / "table.json"
        table = json.loads(file.read_text()) if file.exists() else []
        labels = {Row(row["label"], {}, ()).slug: row["label"] for row in table}
        places |= {row["label"]: (row["row"], row["column"]) for row in table if "column" in row}
    except _BROKEN as error:
        problems.append(f"{folder / 'table.json'} cannot be read: {_why(error)}; labels are the folders' names.")
    order = list(labels)

    def place(path: Path) -> tuple[int, str, int]:
        slug, seed = _slug(path)
        return order.index(slug) if slug in order else len(order), slug, seed

    return [(path, labels.get(_slug(path)[0], _slug(path)[0])) for path in sorted(below, key=place)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _FILES)


def _slug(path: Path) -> tuple[str, int]:
    match = re.fullmatch(r"(.+)-seed(\d+)", path.name)
    return (match[1], int(match[2])) if match else (path.name, 0)


def _read(folder: Path, label: str | None, origin: Path, problems: list[str]) -> Entry:
    run = Run.read(folder)
    numbers = record.result(run.lines, {}) if run.scored else {}
    numbers.pop("versions", None)  # of this process, not of the run
    file = folder / "result.json"
    if file.exists():
        try:
            saved = json.loads(file.read_text())
            if not run.lines:
                numbers = saved
                problems.append(f"{folder} has no rounds.jsonl: there are no curves of it.")
            elif saved["rounds"] <= len(run.lines):
                numbers = {**saved, **numbers}
            else:
                problems.append(
                    f"{folder}: rounds.jsonl is readable up to round {run.last} of {saved['rounds']} only; the numbers "
                    "are those of result.json, the curves end early."
                )
                numbers = saved
            _ = saved["metrics"]["aggregated"]["last"]["local"]["mean"], saved["communication"], saved["passes"]
        except _BROKEN as error:
            if not run.lines:
                raise
            problems.append(f"{file} cannot be read: {_why(error)}; the numbers are taken from rounds.jsonl.")
    for line in run.lines:
        _ = line["round"], line["train_loss"], line["left_out"], line["bytes"]["up"]
    split = folder / "partition.json"
    head: dict[str, Any] = {}
    if split.exists():
        text = split.read_bytes()
        head = {key: value for key, value in json.loads(text).items() if key != "clients"}
        head["hash"] = hashlib.sha256(text).hexdigest()
    name = label or run.settings.get("method", {}).get("name") or numbers.get("method") or folder.name
    return Entry(run, numbers, str(name), origin, head, head.get("hash", run.setting))


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).rstrip(".").splitlines()[0] if str(error) else type(error).__name__


def _grouped(entries: Sequence[Entry]) -> list[Group]:
    """Runs of one configuration together; an unfinished one by itself, as its last round is not the others'."""
    places: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        settings = {key: value for key, value in entry.run.settings.items() if key not in ("seed", "engine")}
        same: Any = (entry.origin, entry.label)
        if entry.origin == entry.run.folder:
            same = json.dumps(settings, sort_keys=True)
        key: tuple[Any, ...] = (same, entry.finished or entry.run.folder)
        while any(other.seed == entry.seed for other in places.get(key, [])):
            key = (*key, "again")
        places.setdefault(key, []).append(entry)
    several = {entry.label for entry in entries if sum(e.label == entry.label for e in entries) > 1}
    groups = []
    for found in places.values():
        first = found[0]
        label = first.label
        if not first.finished:
            seed = f"seed {first.seed}, " if label in several else ""
            label += f" ({seed}{first.done} of {first.planned} rounds)"
        groups.append(Group(label, found))
    names = [group.label for group in groups]
    told = []
    for group in groups:
        label = group.label
        if names.count(label) > 1:
            label = f"{label} · {group.first.origin.name or group.first.origin}"
        while label in told:
            label += "'"
        told.append(label)
    return [replace(group, label=label) for group, label in zip(groups, told, strict=True)]


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


def columns(found: Found) -> list[Column]:
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
        few = f"known of {len(known)} of {len(group.entries)} seeds"
    return Cell(float(np.mean(known)), std, few)


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


def _stage(entry: Entry, column: Column, kind: str) -> Mapping[str, Any] | None:
    metrics = entry.numbers.get("metrics", {})
    stage = next((name for name in column.stages if name in metrics), None)
    found: Mapping[str, Any] | None = metrics[stage].get(kind) if stage else None
    return found


def _value(entry: Entry, column: Column, kind: str) -> float | None:
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


def _few(group: Group, column: Column, kind: str) -> str:
    """Where a mean over rounds has fewer of them than it seems."""
    if column.key != "global" or not kind.startswith("mean"):
        return ""
    for entry in group.entries:
        shown = (_stage(entry, column, kind) or {}).get("rounds", [])
        known = sum(
            line["aggregated"]["summary"]["global"] is not None for line in entry.run.scored if line["round"] in shown
        )
        if entry.run.scored and known < len(shown):
            return f"known in {known} of these {len(shown)} evaluated rounds only"
    return ""


# ---- curves


MEASURES: dict[str, tuple[str, Stage, tuple[str, ...]]] = {
    "local": ("Local accuracy, mean over clients (%)", "aggregated", ("local", "mean")),
    "worst": ("Local accuracy of the worst client (%)", "aggregated", ("local", "worst")),
    "global": ("Accuracy on everybody's test data (%)", "aggregated", ("global",)),
    "after": ("Local accuracy after local training, participants (%)", "after_local", ("local", "mean")),
    "loss": ("Training loss", "aggregated", ()),
}


def series(entry: Entry, measure: str) -> dict[int, float]:
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
