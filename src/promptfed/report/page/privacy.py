"""What the page says about differential privacy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...privacy import sentence
from ..gather import Group, ReportData
from .view import Table

_CLIENTS = 60  # rows of the table of clients


@dataclass(frozen=True)
class Privacy:
    lead: str  # at the top of the page
    methods: Table | None  # where the methods differ
    clients: list[tuple[str, Table]]  # heading, epsilon per client
    facts: dict[str, str]
    gaps: list[str]


def privacy(data: ReportData) -> Privacy | None:
    """None where no run has privacy."""
    sentences = {group.label: _sentence(group) for group in data.groups}
    if not any(sentences.values()):
        return None
    differ = len(set(sentences.values())) > 1
    rows = [(label, words or "no privacy: privacy.clip is 0") for label, words in sentences.items()]
    stated = [one for group in data.groups for one in _stated(group)]
    facts = {name: dict.fromkeys(str(one[key]) for one in stated) for name, key in _FACTS.items()}
    return Privacy(
        lead="differs between methods" if differ else rows[0][1],
        methods=Table("Privacy of each method", ("method", "privacy"), rows, wrap=True) if differ else None,
        clients=[one for group in data.groups if (one := _clients(group, len(data.groups) > 1))],
        facts={name: "; ".join(values) for name, values in facts.items() if values},
        gaps=list(dict.fromkeys(str(gap) for one in stated for gap in one["not_covered"])),
    )


_FACTS = {"Protected": "unit", "Covered": "covers", "Noise": "randomness"}


def _stated(group: Group) -> list[Mapping[str, Any]]:
    return [entry.numbers["privacy"] for entry in group.entries if entry.numbers.get("privacy")]


def _worst(group: Group) -> Mapping[str, Any] | None:
    """Of the seed that reveals most; without noise, epsilon is None and means infinite."""
    return max(_stated(group), key=lambda one: float("inf") if one["epsilon"] is None else one["epsilon"], default=None)


def _sentence(group: Group) -> str:
    if stated := _worst(group):
        return sentence(stated).removeprefix("privacy: ")
    return "epsilon is stated when the run is finished" if group.option("privacy", "clip") else ""


def _clients(group: Group, named: bool) -> tuple[str, Table] | None:
    """Where clients have sent different numbers of updates."""
    stated = _worst(group)
    if not stated or len({one["answers"] for one in stated["per_client"].values()}) < 2:
        return None
    rows = [
        (group.first.run.name(int(client)), one["answers"], "∞" if one["epsilon"] is None else f"{one['epsilon']:.3g}")
        for client, one in stated["per_client"].items()
    ]
    more = f", the first {_CLIENTS} of {len(rows)}" if len(rows) > _CLIENTS else ""
    table = Table(f"Epsilon of each client, {group.label}", ("client", "updates", "epsilon"), rows[:_CLIENTS])
    return f"By client{more}{f': {group.label}' if named else ''}", table
