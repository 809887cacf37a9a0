"""What the page says of differential privacy."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from ...privacy import sentence
from ..gather import Group, ReportData
from .html import anchor, h2, plain

_CLIENTS = 60  # rows of the table of clients

Stated = Mapping[str, Any]


def lead(found: ReportData) -> str:
    """The sentence below the finding, where one is true of all rows."""
    each = {group.label: _sentence(group) for group in found.groups}
    if not any(each.values()):
        return ""
    text = next(iter(each.values())) if len(set(each.values())) == 1 else "privacy: not alike in all rows"
    return f'<p>{escape(_capital(text))}. <a href="#{anchor("Privacy")}">What that means</a></p>'


def section(found: ReportData) -> str:
    """Empty where no run has privacy."""
    each = {group.label: _sentence(group) for group in found.groups}
    if not any(each.values()):
        return ""
    text = h2("Privacy")
    if len(set(each.values())) == 1:
        text += f"<p>{escape(_capital(next(iter(each.values()))))}.</p>"
    else:
        rows = [
            (label, words.removeprefix("privacy: ") or "no privacy: privacy.clip is 0") for label, words in each.items()
        ]
        text += plain(("method", "privacy"), rows, "Privacy of each method", wrap=True)
    for group in found.groups:
        text += _clients(group, len(found.groups) > 1)
    known = [stated for group in found.groups for stated in _stated(group)]
    for name, key in (("Protected", "unit"), ("Covered", "covers"), ("Noise", "randomness")):
        told = dict.fromkeys(str(stated[key]) for stated in known)
        text += f'<p class="soft">{name}: {escape("; ".join(told))}.</p>' if told else ""
    gaps = dict.fromkeys(str(one) for stated in known for one in stated["not_covered"])
    items = "".join(f"<li>{escape(one)}</li>" for one in gaps)
    return text + (f"<h3>Not covered</h3><ul>{items}</ul>" if items else "")


def _stated(group: Group) -> list[Stated]:
    return [entry.numbers["privacy"] for entry in group.entries if entry.numbers.get("privacy")]


def _worst(group: Group) -> Stated | None:
    """Of the seed that reveals most; an epsilon of none is infinite."""
    return max(_stated(group), key=lambda one: float("inf") if one["epsilon"] is None else one["epsilon"], default=None)


def _sentence(group: Group) -> str:
    stated = _worst(group)
    if stated:
        return sentence(stated)
    return "privacy: epsilon is stated when the run is done" if group.option("privacy", "clip") else ""


def _clients(group: Group, named: bool) -> str:
    """A table where clients have not revealed the same."""
    stated = _worst(group)
    if not stated or len({one["answers"] for one in stated["per_client"].values()}) < 2:
        return ""
    rows = [
        (group.first.run.name(int(client)), one["answers"], "∞" if one["epsilon"] is None else f"{one['epsilon']:.3g}")
        for client, one in stated["per_client"].items()
    ]
    more = f", the first {_CLIENTS} of {len(rows)}" if len(rows) > _CLIENTS else ""
    head = f"<h3>By client{more}{': ' + escape(group.label) if named else ''}</h3>"
    return head + plain(("client", "updates", "epsilon"), rows[:_CLIENTS], f"Epsilon of each client, {group.label}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
