"""What a report is made of: the runs found in folders, grouped by label.

A folder that cannot be read costs its own rows only: a sentence in `ReportData.problems` says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import UserError, unknown
from ..method import Method
from ..methods import reference
from ..runs import record, statistics
from ..runs.opened import Run
from ..runs.rows import Row

Family = Literal["own", "one", "reference"]  # own models, one model for all clients, or there to measure others by
FAMILIES: tuple[Family, ...] = get_args(Family)  # as they follow each other in tables and charts

_FILES = ("config.toml", "rounds.jsonl", "result.json")  # any of them makes a folder a run
_BROKEN = (UserError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True)
class SeedRun:
    """One run. `numbers`: as in result.json, for the rounds so far; empty before the first evaluation."""

    run: Run
    numbers: dict[str, Any]
    label: str
    origin: Path  # the folder that the user named: of the run or of its comparison
    about: dict[str, Any]  # partition.json without its clients
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
    """A row of the table: the runs of one configuration, one per seed."""

    label: str
    entries: list[SeedRun]

    @property
    def first(self) -> SeedRun:
        return self.entries[0]

    @property
    def reference(self) -> type[Method] | None:
        """Its method, if that is there to measure others by."""
        return reference(str(self.option("method", "name") or self.first.numbers.get("method", "")))

    @property
    def family(self) -> Family:
        """Rows are ranked among those of one family; references are not ranked."""
        if self.reference:
            return "reference"
        return "one" if self.main_column == "global" else "own"

    @property
    def results(self) -> list[dict[str, Any]]:
        """Of the runs that have been evaluated, with their seeds."""
        return [{**entry.numbers, "seed": entry.seed} for entry in self.entries if entry.numbers]

    @property
    def main_column(self) -> statistics.Column:
        """The accuracy that it is ranked by."""
        return statistics.main_column(self.results) if self.results else "local"

    def option(self, section: str, key: str) -> Any:
        return self.first.run.settings.get(section, {}).get(key)


@dataclass(frozen=True)
class ReportData:
    groups: list[Group]
    folders: list[Path]  # that the user named
    problems: list[str] = field(default_factory=list)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # label -> row and column, in tables with columns
    against: str = ""  # the row that the others are compared with
    notes: list[str] = field(default_factory=list)  # what comparisons say of themselves: a small scale, a tuning budget

    @property
    def entries(self) -> list[SeedRun]:
        return [entry for group in self.groups for entry in group.entries]

    @property
    def several_seeds(self) -> bool:
        return any(len(group.entries) > 1 for group in self.groups)

    def row(self, group: Group) -> str:
        """The name of a row, without that of its column."""
        return self.places[group.label][0] if group.label in self.places else group.label


@dataclass(frozen=True)
class Task:
    """Rows that can be compared, as their clients hold the same samples; in a table with columns, of one column."""

    words: str  # unique
    groups: list[Group]

    @property
    def first(self) -> SeedRun:
        return self.groups[0].first


def gather(folders: Sequence[Path], against: str = "") -> ReportData:
    """All runs in these folders, each of a run or of a comparison. `against`: the row to compare the others with; by
    default the one that a comparison was made with."""
    if not folders:
        raise UserError("report: name the folder of a run or of a comparison")
    entries: dict[Path, SeedRun] = {}
    problems: list[str] = []
    places: dict[str, tuple[str, str]] = {}
    bases: list[str] = []
    notes: list[str] = []
    for folder in folders:
        for path, label in _runs(folder, problems, places, bases, notes):
            if path.resolve() in entries:
                continue
            found: list[str] = []
            try:
                entries[path.resolve()] = read(path, label, folder, found)
                problems += found
            except _BROKEN as error:
                problems.append(f"{path} is left out because it cannot be read: {_why(error)}.")
    for entry in entries.values():
        if entry.numbers and (why := record.unused(entry.numbers)):
            problems.append(f"{entry.run.folder}: {why}.")
        if not entry.finished:
            evaluated = "" if entry.run.scored else ", none of them evaluated"
            problems.append(f"{entry.run.folder} is not finished: {entry.done} of {entry.planned} rounds{evaluated}.")
    if not entries:
        raise UserError(" ".join(problems).rstrip("."))
    base = against or next((places.get(label, (label,))[0] for label in bases), "")
    data = ReportData(_grouped(list(entries.values())), list(folders), problems, places, base, notes)
    if against and against not in (names := {data.row(group) for group in data.groups}):
        raise unknown("--against", against, names)
    return data


def _runs(
    folder: Path, problems: list[str], places: dict[str, tuple[str, str]], bases: list[str], notes: list[str]
) -> list[tuple[Path, str | None]]:
    """The folders of runs, with the labels that a comparison gives them, in the order of its table; adds to `places`
    where that has columns, to `bases` the labels that others were compared with, and to `notes` what it says of
    itself."""
    if not folder.is_dir():
        raise UserError(f'"{folder}" is not a folder')
    if _is_run(folder):
        return [(folder, None)]
    below = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    if not below:
        raise UserError(f'"{folder}" contains no run and no comparison')
    labels: dict[str, str] = {}
    try:
        file = folder / "table.json"
        table = json.loads(file.read_text()) if file.exists() else []
        labels = {Row(row["label"], {}, ()).slug: row["label"] for row in table}
        places |= {row["label"]: (row["row"], row["column"]) for row in table if "column" in row}
        bases += [row["against"]["row"] for row in table if "against" in row]
        notes += dict.fromkeys(f"{folder.name}: {row['scale']}." for row in table if "scale" in row)
    except _BROKEN as error:
        problems.append(f"{folder / 'table.json'} cannot be read: {_why(error)}; labels are the folders' names.")
    order = list(labels)
    found = []
    for path in below:
        match = re.fullmatch(r"(.+)-seed(\d+)", path.name)
        slug, seed = (match[1], int(match[2])) if match else (path.name, 0)
        found.append((order.index(slug) if slug in order else len(order), slug, seed, path))
    return [(path, labels.get(slug, slug)) for _, slug, _, path in sorted(found)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _FILES)


def read(folder: Path, label: str | None, origin: Path, problems: list[str]) -> SeedRun:
    run = Run(folder)
    split = folder / "partition.json"
    about: dict[str, Any] = {}
    if split.exists():
        text = split.read_bytes()
        about = {key: value for key, value in json.loads(text).items() if key != "clients"}
        about["hash"] = hashlib.sha256(text).hexdigest()
    for line in run.lines:
        _ = line["round"], line["train_loss"], line["left_out"], line["bytes"]["up"]
    numbers = _numbers(run, problems)
    name = label or run.settings.get("method", {}).get("name") or numbers.get("method") or folder.name
    return SeedRun(run, numbers, str(name), origin, about, about.get("hash", run.setting))


def _numbers(run: Run, problems: list[str]) -> dict[str, Any]:
    """As in result.json. An unfinished run has none, and rounds.jsonl may be newer or shorter than it."""
    numbers = record.result(run.lines, {}) if run.scored else {}
    numbers.pop("versions", None)  # of this process, not of the run
    try:
        saved = run.result
        if saved is None:
            return numbers
        _ = saved["metrics"]["aggregated"]["last"]["local"]["mean"], saved["communication"], saved["passes"]
        if not run.lines:
            problems.append(f"{run.folder} has no rounds.jsonl, so there are no curves for it.")
        elif saved["rounds"] > len(run.lines):
            problems.append(
                f"{run.folder}: rounds.jsonl is readable up to round {run.last} of {saved['rounds']} only; the numbers "
                "are those of result.json, the curves end early."
            )
        else:
            return {**saved, **numbers}
        return saved
    except _BROKEN as error:
        if not run.lines:
            raise
        unread = "" if isinstance(error, UserError) else f"{run.folder / 'result.json'} cannot be read: "
        problems.append(f"{unread}{_why(error)}; the numbers are taken from rounds.jsonl.")
        return numbers


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error).rstrip(".").splitlines()[0] if str(error) else type(error).__name__


def _grouped(entries: Sequence[SeedRun]) -> list[Group]:
    """Runs of one configuration together; an unfinished one by itself, as its last round differs from the others'."""
    groups: dict[tuple[Any, ...], list[SeedRun]] = {}
    for entry in entries:
        same: Any = (entry.origin, entry.label)
        if entry.origin == entry.run.folder:
            settings = {key: value for key, value in entry.run.settings.items() if key not in ("seed", "engine")}
            precision = entry.run.settings.get("engine", {}).get("precision", "fp32")
            same = json.dumps([settings, precision], sort_keys=True)
        key: tuple[Any, ...] = (same, entry.finished or entry.run.folder)
        while any(other.seed == entry.seed for other in groups.get(key, [])):
            key = (*key, "again")
        groups.setdefault(key, []).append(entry)
    labels = Counter(entry.label for entry in entries)
    named = [(_label(found[0], labels[found[0].label] > 1), found) for found in groups.values()]
    repeated = Counter(label for label, _ in named)
    unique: dict[str, Group] = {}
    for label, found in named:
        if repeated[label] > 1:
            label = f"{label} · {found[0].origin.name or found[0].origin}"
        while label in unique:
            label += "'"
        unique[label] = Group(label, found)
    return list(unique.values())


def _label(entry: SeedRun, several: bool) -> str:
    if entry.finished:
        return entry.label
    return f"{entry.label} ({f'seed {entry.seed}, ' if several else ''}{entry.done} of {entry.planned} rounds)"


# ---- which rows can be compared


def tasks(found: ReportData) -> list[Task]:
    columns = {group.label: found.places.get(group.label, ("", ""))[1] for group in found.groups}
    each: list[list[Group]] = []
    for group in found.groups:
        for known in each:
            if columns[known[0].label] == columns[group.label] and all(_same(group, other) for other in known):
                known.append(group)
                break
        else:
            each.append([group])
    return [Task(words, groups) for words, groups in zip(_words(each, columns), each, strict=True)]


def _same(a: Group, b: Group) -> bool:
    """Seeds may have different partitions: those of seeds that both rows have must agree; without a common seed, the
    configurations must."""
    if a.first.run.setting != b.first.run.setting:
        return False
    ours, theirs = ({entry.seed: entry.partition for entry in group.entries} for group in (a, b))
    both = ours.keys() & theirs.keys()
    if both:
        return all(ours[seed] == theirs[seed] for seed in both)
    return _configured(a) == _configured(b)


def _configured(group: Group) -> str:
    sections = {name: group.first.run.settings.get(name) for name in ("dataset", "partition", "consortium")}
    return json.dumps(sections, sort_keys=True)


def _words(each: Sequence[list[Group]], columns: dict[str, str]) -> list[str]:
    """Each task's setting, with as many details as it takes to distinguish it from the others."""
    words = [groups[0].first.run.setting for groups in each]
    details = [_details(groups[0].first.run, columns[groups[0].label]) for groups in each]
    for name in dict.fromkeys(name for one in details for name in one):
        for alike in _repeated(words):
            if len({details[i].get(name) for i in alike}) > 1:
                for i in alike:
                    words[i] = ", ".join(filter(None, (words[i], details[i].get(name))))
    for alike in _repeated(words):
        for number, i in enumerate(alike, 1):
            words[i] += f", split {number}"
    return words


def _repeated(words: Sequence[str]) -> list[list[int]]:
    """Where the same words stand, of those that stand several times."""
    places = [[i for i, one in enumerate(words) if one == word] for word in dict.fromkeys(words)]
    return [alike for alike in places if len(alike) > 1]


def _details(run: Run, column: str) -> dict[str, str]:
    """partition.shots = 16"""
    settings = {
        f"{section}.{key}": f"{section}.{key} = {value}"
        for section in ("partition", "dataset")
        for key, value in run.settings.get(section, {}).items()
        if value is not None
    }
    return {**settings, "column": column}
