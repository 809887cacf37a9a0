"""Pieces of HTML that the parts of the page share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .. import style


def plain(heads: Sequence[str], rows: Sequence[Sequence[Any]], label: str, wrap: bool = False) -> str:
    """`wrap`: cells may have several lines."""
    kind = "text wrap" if wrap else "text"
    head = "".join(f'<th scope="col" class="text">{escape(one)}</th>' for one in heads)
    body = "".join("<tr>" + "".join(f'<td class="{kind}">{escape(str(v))}</td>' for v in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def h2(name: str, title: str = "") -> str:
    return f'<h2 id="h-{anchor(name)}">{escape(title or name)}</h2>'


def listed(values: Iterable[Any]) -> str:
    told = [str(value) for value in values]
    return ", ".join(told[:6]) + (f" and {len(told) - 6} more" if len(told) > 6 else "")


def swatch(look: style.Look) -> str:
    dashed = " dashed" if look.line == "--" else ""
    return (
        f'<span class="swatch{dashed}" data-colour="{look.colour}" style="--c:{look.colour}" aria-hidden="true"></span>'
    )


def anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
