"""What attacks have done: one cell per attack, defence and seed, as a table, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .. import files

NONE = "none"  # the row without an attack


@dataclass(frozen=True)
class Cell:
    attack: str
    defence: str
    seed: int
    accuracy: float  # mean over honest clients, on their test data
    success: float | None = None  # share of honest clients' test images that get the class that the attack wants
    chance: float | None = None  # the same share under the model of the run without an attack
    weight_shared: float | None = None  # of malicious clients in DP2FL's global model
    weight_own: float | None = None  # and in honest clients' data prompts, on average

    @property
    def sentence(self) -> str:
        hits = "" if self.success is None else f", success {self.success:.1%} (without the attack {self.chance:.1%})"
        return f"{self.attack} against {self.defence}, seed {self.seed}: accuracy {self.accuracy:.1%}{hits}"


def mean(cells: Sequence[Cell], attack: str, defence: str, of: str) -> float | None:
    """One of a cell's numbers, over seeds; None where there is none."""
    found = [getattr(cell, of) for cell in cells if (cell.attack, cell.defence) == (attack, defence)]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


def attacks(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.attack for cell in cells))


def targeted(cells: Sequence[Cell]) -> list[str]:
    """Attacks that want a class."""
    return attacks([cell for cell in cells if cell.success is not None])


def defences(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.defence for cell in cells))


def table(cells: Sequence[Cell]) -> str:
    """In per cent, as Markdown: accuracy and in brackets what an attack costs under the same defence; then the success
    of targeted attacks, and in brackets the same without the attack. Of DP2FL also what malicious clients weigh in
    honest clients' data prompts, and in brackets in the global model."""

    def accuracy(attack: str, defence: str) -> str:
        value, base = (mean(cells, name, defence, "accuracy") or 0.0 for name in (attack, NONE))
        return f"{100 * value:.1f}" + ("" if attack == NONE else f" ({100 * (value - base):+.1f})")

    def pair(first: str, second: str) -> Callable[[str, str], str]:
        def text(attack: str, defence: str) -> str:
            values = (mean(cells, attack, defence, of) for of in (first, second))
            return "{} ({})".format(*("–" if value is None else f"{100 * value:.1f}" for value in values))

        return text

    columns = defences(cells)
    made = [_matrix("accuracy", attacks(cells), columns, accuracy)]
    if targeted(cells):
        made.append(_matrix("success", targeted(cells), columns, pair("success", "chance")))
    if any(cell.weight_shared is not None for cell in cells):
        made.append(_matrix("weight", attacks(cells), columns, pair("weight_own", "weight_shared")))
    return "\n".join(made)


def _matrix(corner: str, rows: Sequence[str], columns: Sequence[str], text: Callable[[str, str], str]) -> str:
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | {' | '.join(text(row, column) for column in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def sheet(rows: Sequence[Any]) -> str:
    """Dataclasses of one kind as CSV."""
    text = io.StringIO()
    made = csv.DictWriter(text, [field.name for field in fields(rows[0])])
    made.writeheader()
    made.writerows(map(asdict, rows))
    return text.getvalue()


def write(out: Path, name: str, rows: Sequence[Any], about: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Dataclasses of one kind as name.csv and name.json, and texts by their suffixes."""
    numbers = json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    for suffix, text in {**texts, ".csv": sheet(rows), ".json": numbers}.items():
        files.write(out / f"{name}{suffix}", text.encode())
