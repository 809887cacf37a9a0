"""What several sections of the page share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of text; `wrap`: cells may have several lines."""

    label: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    wrap: bool = False


@dataclass(frozen=True)
class Choice:
    """A radio button."""

    value: str
    text: str
    checked: bool
    disabled: bool = False


@dataclass
class Notes:
    """Footnotes: each text once, with its mark."""

    marks: dict[str, str] = field(default_factory=dict)

    def mark(self, text: str) -> str:
        if not text:
            return ""
        number = len(self.marks)
        return self.marks.setdefault(text, chr(97 + number) if number < 26 else str(number))


def listed(values: Iterable[Any], most: int = 6) -> str:
    words = [str(value) for value in values]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
