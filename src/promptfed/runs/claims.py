"""Whether what a paper claims of its method holds in a comparison: its difference to each of its baselines, in words.

A column of a comparison file is a claim if it says which: `claim`, a sentence; `ours`, the row of the method; `by`, the
accuracy to compare by ("local" or "global"; default: the main one of both rows); and `against`, the rows that decide
(default: all others). What else is in the column is compared, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table as Rich
from rich.text import Text

from .. import files
from ..errors import UserError, unknown
from . import tables
from .api import Result
from .cells import percent, points
from .statistics import Column, Difference, difference

HOLDS, OPEN, FAILS = "holds here", "cannot be told", "does not hold here"
MEANING = (
    "Differences: the method minus a baseline in points of accuracy, paired by seed and client, with a 95 % bootstrap\n"
    f"interval. A claim {HOLDS} if all intervals are above zero; it {FAILS} if one is below zero."
)
BESIDE = "+"  # after a row that does not decide


@dataclass(frozen=True)
class Claim:
    column: str
    text: str
    ours: str
    by: Column | None = None
    against: tuple[str, ...] = ()  # empty: all other rows

    def name(self, row: str) -> str:
        """A row as it is shown."""
        return row if self.decided_by(row) else f"{row} {BESIDE}"

    def decided_by(self, row: str) -> bool:
        return not self.against or row in self.against


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    differences: Mapping[str, Difference]  # by baseline
    accuracies: Mapping[str, str]  # by row, for people

    @property
    def word(self) -> str:
        words = {found.word for row, found in self.differences.items() if self.claim.decided_by(row)}
        if "behind" in words:
            return FAILS
        return HOLDS if words == {"ahead"} else OPEN

    def complete(self) -> dict[str, Any]:
        found = {
            row: {**each.complete(), "decides": self.claim.decided_by(row)} for row, each in self.differences.items()
        }
        return {"label": self.claim.column, "claim": self.claim.text, "verdict": self.word, "differences": found}


def read(spec: Mapping[str, Any]) -> list[Claim]:
    """The claims in a [compare] table."""
    found = []
    for table in spec.get("columns", ()):
        if "claim" not in table:
            continue
        against = table.get("against", [])
        if not isinstance(against, list) or not all(isinstance(row, str) for row in against):
            raise UserError(
                f'compare.columns: against = {against!r} of "{table["label"]}" must be a list of labels of rows'
            )
        claim = Claim(table["label"], table["claim"], table.get("ours", ""), table.get("by"), tuple(against))
        rows = [row for row in spec.get("rows", ()) if claim.column in row.get("columns", [claim.column])]
        if claim.ours not in (labels := {row.get("label", "") for row in rows}):
            raise unknown(f'compare.columns: ours of "{claim.column}"', claim.ours, labels)
        for row in against:
            if row not in labels - {claim.ours}:
                raise unknown(f'compare.columns: against of "{claim.column}"', row, labels - {claim.ours})
        if claim.by not in (None, "local", "global"):
            raise UserError(f'compare.columns: by = {claim.by!r} of "{claim.column}" must be "local" or "global"')
        found.append(claim)
    return found


def judge(claims: Sequence[Claim], results: Mapping[str, Sequence[Result]], places: tables.Places) -> list[Verdict]:
    """Of the claims whose method is done, against the baselines that are."""
    verdicts = []
    for claim in claims:
        runs = {
            row: results[label]
            for label, (row, column) in places.items()
            if column == claim.column and label in results
        }
        if claim.ours not in runs:
            continue
        numbers = {row: [run.numbers for run in each] for row, each in runs.items()}
        paired = {row: difference(numbers[claim.ours], numbers[row], claim.by) for row in runs if row != claim.ours}
        known = {row: found for row, found in paired.items() if found}
        columns: list[Column] = [found.column for found in known.values()]
        column = claim.by or (columns[0] if columns else "local")
        accuracies = {row["label"]: percent(row[column]) for row in tables.table(runs)}
        verdicts.append(Verdict(claim, known, accuracies))
    return verdicts


def save(verdicts: Sequence[Verdict], path: Path) -> None:
    files.write(path, (json.dumps([each.complete() for each in verdicts], indent=1) + "\n").encode())


def show(verdicts: Sequence[Verdict]) -> Group:
    """A block for each claim."""
    parts: list[Text | Rich] = []
    for verdict in verdicts:
        claim = verdict.claim
        block = Rich(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        by = " / ".join(sorted({found.column for found in verdict.differences.values()}))
        for head in ("", f"{by} accuracy", "difference", "95 % interval", f"{claim.ours} is"):
            block.add_column(head, justify="right" if head and "is" not in head else "left", no_wrap=True)
        block.add_row(claim.ours, verdict.accuracies[claim.ours])
        for row, found in verdict.differences.items():
            ends = f"[{points(found.low)}, {points(found.high)}]"
            block.add_row(claim.name(row), verdict.accuracies[row], points(found.mean), ends, found.word)
        parts += [Text(f"{claim.column}: {claim.text}"), block, Text(f"{claim.column}: the claim {verdict.word}.\n")]
    beside = any(not each.claim.decided_by(row) for each in verdicts for row in each.differences)
    return Group(*parts, Text(MEANING + f"\nRows marked {BESIDE} are not part of a claim and do not decide." * beside))
