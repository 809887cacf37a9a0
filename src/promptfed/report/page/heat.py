"""One HTML file of tables whose cells are coloured by a share. It loads nothing, in light and dark."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...runs import record
from . import environment


@dataclass(frozen=True)
class Heat:
    """A cell: `share` from 0 (no colour) to 1."""

    text: str
    share: float
    note: str = ""  # small, after the text


@dataclass(frozen=True)
class HeatTable:
    heading: str
    about: str  # what a number is, and what the colour means
    corner: str  # heading of the first column
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Heat | None]]  # by their names; None: there is no number


def render(title: str, lead: str, facts: Mapping[str, str], tables: Sequence[HeatTable]) -> str:
    """The page. `facts`: short values by their names."""
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return environment().get_template("heat.html").render(
        title=title, lead=lead, facts=facts, tables=tables, made=made,
        version=record.versions()["promptfed"],
    )  # fmt: skip
