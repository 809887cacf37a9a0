"""Tables as text: for people in Markdown and LaTeX, for programs as CSV and as a data frame."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"},
}


@dataclass(frozen=True)
class Sheet:
    """A table for people. `references`: how many of the last lines are set apart from the others."""

    title: str
    heads: tuple[str, ...]
    lines: list[tuple[str, ...]]
    references: int = 0

    @property
    def parts(self) -> list[list[tuple[str, ...]]]:
        """The ranked lines, and the references; those of them that there are."""
        cut = len(self.lines) - self.references
        return [part for part in (self.lines[:cut], self.lines[cut:]) if part]

    def without(self, empty: Mapping[str, set[str]]) -> Sheet:
        """Only columns that say something: not one of the values given for their head in every line."""
        told = [i for i, head in enumerate(self.heads) if {line[i] for line in self.lines} - empty.get(head, set())]
        return self.only(told)

    def only(self, columns: Sequence[int]) -> Sheet:
        lines = [tuple(line[i] for i in columns) for line in self.lines]
        return Sheet(self.title, tuple(self.heads[i] for i in columns), lines, self.references)


def markdown(sheets: Iterable[Sheet], head: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    blocks = [f"{_capital(text)}.\n" for text in head]
    for sheet in sheets:
        rule = ("---",) + ("---:",) * (len(sheet.heads) - 1)
        for title, part in zip((f"{_capital(sheet.title)}:", "References:"), sheet.parts, strict=False):
            lines = (sheet.heads, rule, *part)
            blocks.append(f"{title}\n\n" + "".join(f"| {' | '.join(_cell(c) for c in line)} |\n" for line in lines))
    return "\n".join([*blocks, "".join(f"{note}\n" for note in notes)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def latex(sheets: Iterable[Sheet], head: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """A tabular for each sheet, with the rules of booktabs."""
    blocks = ["".join(f"% {line}\n" for line in (r"needs \usepackage{booktabs}", *head))]
    for sheet in sheets:
        parts = ["".join(_row(line) for line in part) for part in ([sheet.heads], *sheet.parts)]
        body = "\\midrule\n".join(parts)
        columns = "l" + "r" * (len(sheet.heads) - 1)
        blocks.append(
            f"% {sheet.title}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\\bottomrule\n\\end{{tabular}}\n"
        )
    return "\n".join([*blocks, "".join(f"% {note}\n" for note in notes)])


def _row(line: Sequence[str]) -> str:
    text = " & ".join(map(_escaped, line)) + " \\\\\n"
    return "{}" + text if text.startswith("[") else text  # else an optional argument of the line break before it


def _escaped(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", escaped)  # a minus sign is no hyphen


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- for programs


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """{"local": {"mean": 0.5}} -> {"local_mean": 0.5}"""
    return dict(_flat(record, ""))


def _flat(record: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}_")
        else:
            yield f"{before}{key}", value


def csv_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Every column that some record has; empty where a value is not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for record in records for key in record)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame."""
    try:
        import pandas
    except ImportError:
        raise UserError("frame() needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(list(records))
