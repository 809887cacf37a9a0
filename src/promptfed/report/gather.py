"""What a report is made of: the runs found in folders, put together by label.

A folder that cannot be read costs its own rows only: a sentence in `ReportData.problems` says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs import record
from ..runs.comparison import Row
from .runs import Run

_FILES = ("config.toml", "rounds.jsonl", "result.json")  # any of them makes a folder a run
_BROKEN = (UserError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True)
class SeedRun:
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
    entries: list[SeedRun]

    @property
    def first(self) -> SeedRun:
        return self.entries[0]

    def option(self, section: str, key: str) -> Any:
        return self.first.run.settings.get(section, {}).get(key)


@dataclass(frozen=True)
class ReportData:
    groups: list[Group]
    folders: list[Path]  # as they were named
    problems: list[str] = field(default_factory=list)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # label -> row and column, in tables with columns

    @property
    def entries(self) -> list[SeedRun]:
        return [entry for group in self.groups for entry in group.entries]


def gather(folders: Sequence[Path]) -> ReportData:
    """All runs in these folders, each a run's or a comparison's."""
    if not folders:
        raise UserError("report: name the folder of a run or of a comparison")
    entries: list[SeedRun] = []
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
                entries.append(read(path, label, folder, told))
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
    return ReportData(_grouped(entries), list(folders), problems, places)


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


def read(folder: Path, label: str | None, origin: Path, problems: list[str]) -> SeedRun:
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
    return SeedRun(run, numbers, str(name), origin, head, head.get("hash", run.setting))


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).rstrip(".").splitlines()[0] if str(error) else type(error).__name__


def _grouped(entries: Sequence[SeedRun]) -> list[Group]:
    """Runs of one configuration together; an unfinished one by itself, as its last round is not the others'."""
    places: dict[tuple[Any, ...], list[SeedRun]] = {}
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
