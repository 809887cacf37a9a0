"""Which rows of a report may be held against each other: those whose clients hold the same samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .gather import Group, ReportData

_Feature = Callable[[Group], str]


@dataclass(frozen=True)
class Task:
    """Rows with one partition; in a table with columns, of one column."""

    words: str  # no other task's
    groups: list[Group]

    @property
    def first(self) -> Group:
        return self.groups[0]


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


def words(found: ReportData) -> dict[str, str]:
    """Label -> its task."""
    return {group.label: task.words for task in tasks(found) for group in task.groups}


def _same(a: Group, b: Group) -> bool:
    """Seeds may have partitions of their own: those that both rows have are looked at. Without one, what the
    configurations ask for has to do."""
    if a.first.run.setting != b.first.run.setting:
        return False
    ours, theirs = ({entry.seed: entry.partition for entry in group.entries} for group in (a, b))
    both = ours.keys() & theirs.keys()
    if both:
        return all(ours[seed] == theirs[seed] for seed in both)
    return _asked(a) == _asked(b)


def _asked(group: Group) -> str:
    sections = {name: group.first.run.settings.get(name) for name in ("dataset", "partition", "consortium")}
    return json.dumps(sections, sort_keys=True)


# ---- words


def _words(each: Sequence[list[Group]], columns: dict[str, str]) -> list[str]:
    """A task's setting, with as much besides as it takes to tell it from the others."""
    told = [groups[0].first.run.setting for groups in each]
    firsts = [groups[0] for groups in each]

    def column(group: Group) -> str:
        return columns[group.label]

    for feature in (_images, _classes, *_options(firsts), column):
        for setting in {one for one in told if told.count(one) > 1}:
            alike = [i for i, one in enumerate(told) if one == setting]
            if len({feature(firsts[i]) for i in alike}) > 1:
                for i in alike:
                    told[i] = ", ".join(part for part in (told[i], feature(firsts[i])) if part)
    for setting in {one for one in told if told.count(one) > 1}:
        for number, i in enumerate(i for i, one in enumerate(told) if one == setting):
            told[i] += f", split {chr(65 + number) if number < 26 else number + 1}"
    return told


def _images(group: Group) -> str:
    data = group.first.numbers.get("dataset") or {}
    count = data.get("images") or group.first.about.get("dataset", {}).get("n")
    count = count or sum(one.train + one.val + one.test for one in group.first.run.shares)
    return f"{count} images" if count else ""


def _classes(group: Group) -> str:
    count = group.option("partition", "classes_per_client")
    return f"{count} class{'es' if count > 1 else ''} a client" if count else ""


def _options(groups: Sequence[Group]) -> list[_Feature]:
    """What else was asked for: partition.shots 16"""
    keys = {
        (section, key): None
        for section in ("partition", "dataset")
        for group in groups
        for key in group.first.run.settings.get(section, {})
        if key not in ("name", "clients", "classes_per_client", "limit")
    }
    return [_option(section, key) for section, key in keys]


def _option(section: str, key: str) -> _Feature:
    def told(group: Group) -> str:
        value: Any = group.option(section, key)
        return "" if value is None else f"{section}.{key} {value}"

    return told
