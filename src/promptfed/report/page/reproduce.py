"""What it takes to reproduce the runs that the page shows."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ..gather import Group, ReportData, SeedRun
from .view import listed


@dataclass(frozen=True)
class Recipe:
    label: str
    commands: list[str]
    facts: dict[str, str]
    file: str
    config: str


@dataclass(frozen=True)
class Reproduce:
    command: str  # that makes the page
    simulated: bool  # some run has all images on one machine
    deployed: bool  # some run has sites with their own images
    recipes: list[Recipe]


def reproduce(data: ReportData, out: Path) -> Reproduce:
    deployed = [bool(entry.run.consortium) for entry in data.entries]
    command = shlex.join(["promptfed", "report", *map(str, data.folders), "--out", str(out)])
    return Reproduce(command, not all(deployed), any(deployed), [_recipe(group) for group in data.groups])


def _recipe(group: Group) -> Recipe:
    file = group.first.run.folder / "config.toml"
    config = file.read_text() if file.exists() else "config.toml is not in the folder"
    commands = [shlex.join(_command(group, entry)) for entry in group.entries]
    return Recipe(group.label, commands, _facts(group), f"{file.parent.name}.toml", config)


def _command(group: Group, entry: SeedRun) -> list[str]:
    folder = entry.run.folder
    if entry.run.consortium:  # a new name: the old one would resume its run
        return ["promptfed", "flower", "submit", str(folder.parent.parent), "--name", f"{folder.name}-again"]
    seed = [] if entry is group.first else [f"seed={entry.seed}"]
    return ["promptfed", "run", f"{group.first.run.folder.name}.toml", *seed, "--out", folder.name]


def _facts(group: Group) -> dict[str, str]:
    first = group.first
    data = first.numbers.get("dataset") or first.about.get("dataset") or {}
    deployed = bool(first.run.consortium)
    images = sum(one.train + one.val + one.test for one in first.run.shares) if deployed else 0
    missing = "none: each site has its own images" if deployed else "not recorded: the run has no partition.json"
    return {
        "folder": ", ".join(str(entry.run.folder) for entry in group.entries),
        "seed": listed(entry.seed for entry in group.entries),
        "rounds": f"{first.done} of {first.planned}",
        "dataset": f"{data.get('name', '–')}, {images or data.get('images') or data.get('n', '–')} images",
        "dataset fingerprint": str(data.get("fingerprint") or missing),
        "partition (sha256)": str(first.about.get("hash") or ("none" if deployed else "not recorded")),
        "versions": _versions(group),
    }


def _versions(group: Group) -> str:
    known = [entry.numbers.get("versions") for entry in group.entries]
    first = next(filter(None, known), None)
    if first is None:
        return "not recorded: they are written when a run is finished"
    text = ", ".join(f"{name} {version}" for name, version in first.items())
    return text if all(one == first for one in known) else f"{text}; those of other seeds differ or are not recorded"
