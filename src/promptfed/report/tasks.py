"""Which rows of a report can be compared: those whose clients hold the same samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .gather import Group, ReportData


@dataclass(frozen=True)
class Task:
    """Rows with the same partition; in a table with columns, of one column."""

    words: str  # unique
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
    details = [_details(groups[0], columns[groups[0].label]) for groups in each]
    for name in dict.fromkeys(name for one in details for name in one):
        for alike in _repeated(words):
            if len({details[i].get(name) for i in alike}) > 1:
                for i in alike:
                    words[i] = ", ".join(filter(None, (words[i], details[i].get(name))))
    for alike in _repeated(words):
        for number, i in enumerate(alike):
            words[i] += f", split {chr(65 + number) if number < 26 else number + 1}"
    return words


def _repeated(words: Sequence[str]) -> list[list[int]]:
    """Where the same words stand, of those that stand several times."""
    places = [[i for i, one in enumerate(words) if one == word] for word in dict.fromkeys(words)]
    return [alike for alike in places if len(alike) > 1]


def _details(group: Group, column: str) -> dict[str, str]:
    """The most telling first; other settings as partition.shots 16."""
    run = group.first.run
    images = (group.first.numbers.get("dataset") or {}).get("images") or group.first.about.get("dataset", {}).get("n")
    images = images or sum(one.train + one.val + one.test for one in run.shares)
    classes = group.option("partition", "classes_per_client")
    settings = {
        f"{section}.{key}": f"{section}.{key} {value}"
        for section in ("partition", "dataset")
        for key, value in run.settings.get(section, {}).items()
        if value is not None and key not in ("name", "clients", "classes_per_client", "limit")
    }
    return {
        "images": f"{images} images" if images else "",
        "classes": f"{classes} class{'es' if classes > 1 else ''} per client" if classes else "",
        **settings,
        "column": column,
    }
