"""promptfed list."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import UserError, unknown
from . import lazy
from .common import console

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from .. import data, methods, models
    from ..methods import overview
    from ..runs import config, protocols
else:
    config, data, methods, models = map(lazy.Module, ("runs.config", "data", "methods", "models"))
    overview, protocols = map(lazy.Module, ("methods.overview", "runs.protocols"))

Rows = list[dict[str, Any]]
_APART = ("family", "tunes", "settings")  # a heading, and what only JSON has
_PLUGINS = (
    "After a method's name: {tunings}, tuned in place of all weights; {prompts}, a private prompt around what is "
    "tuned; +ft, fine-tuning of the result. For example fedprox+pt, fedper+vpt, fedavg+ft."
)
_PROTOCOLS = (
    "Protocols: those that not every method can serve (promptfed list protocols); base-to-novel and cross-dataset need "
    "a CLIP."
)


def list_(
    what: Annotated[
        str | None, typer.Argument(help="methods, protocols, datasets, backbones, partitions or presets; default: all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print a Markdown table")] = False,
) -> None:
    """List methods, protocols, datasets, backbones, partitions and presets."""
    if what is not None and what not in LISTS:
        raise unknown("list", what, LISTS)
    if as_markdown and (as_json or what is None):
        raise UserError("--markdown prints one list: promptfed list methods --markdown")
    lists = {name: rows() for name, rows in LISTS.items() if what in (None, name)}
    if as_json:
        print(json.dumps(lists[what] if what else lists, indent=1))
        return
    for name, rows in lists.items():
        if as_markdown:
            print(markdown(rows), end="")
            continue
        for family, members in _groups(rows):
            title = ": ".join(filter(None, ("" if what else name, family)))
            console.print(_table(title, members))
        if name == "methods":
            tunings, prompts = (
                ", ".join(f"+{plugin}" for plugin in kind) for kind in (methods.TUNINGS, methods.PROMPTS)
            )
            console.print(_PLUGINS.format(tunings=tunings, prompts=prompts), _PROTOCOLS, sep="\n", highlight=False)


def _groups(rows: Rows) -> list[tuple[str, Rows]]:
    """Methods by what is tuned; everything else as one."""
    return [(family, list(members)) for family, members in groupby(rows, lambda row: str(row.get("family", "")))]


def _table(title: str, rows: Rows) -> Table:
    table = Table(title=title or None, title_justify="left")
    for key in _columns(rows):
        table.add_column(key, overflow="fold", no_wrap=key == "name")
    for row in rows:
        table.add_row(*(str(row[key]) for key in _columns(rows)))
    return table


def _columns(rows: Rows) -> list[str]:
    return [key for key in rows[0] if key not in _APART]


def markdown(rows: Rows) -> str:
    """A table with a line in bold for each group."""
    heads = _columns(rows)
    lines: list[Sequence[str]] = [heads, ["---"] * len(heads)]
    for family, members in _groups(rows):
        lines += [[f"**{family}**", *[""] * (len(heads) - 1)]] if family else []
        lines += [[f"`{row['name']}`", *(str(row[key]).replace("|", "\\|") for key in heads[1:])] for row in members]
    return "".join(f"| {' | '.join(line)} |\n".replace("  ", " ") for line in lines)


def _methods() -> Rows:
    rows = []
    for one in overview.overviews():
        row = one._asdict()
        paper, settings = row.pop("paper"), _settings(methods.fields(one.name))
        served = ", ".join(protocols.served(methods.create(one.name))) or "-"
        rows.append({**row, "protocols": served, "paper": paper, "settings": settings})
    return rows


def _protocols() -> Rows:
    return [
        {"name": one.name, "setting": one.setting or "-", "columns": one.columns, "about": one.about}
        for one in protocols.PROTOCOLS.values()
    ]


def _datasets() -> Rows:
    def source(entry: data.Entry) -> str:
        return entry.hub or ("fetched by hand" if entry.manual else "embedded")

    return [
        {"name": name, "title": entry.title, "classes": entry.classes, "size": entry.size, "source": source(entry)}
        for name, entry in data.CATALOGUE.items()
    ]


def _partitions() -> Rows:
    return [
        {"name": name, "about": " ".join((kind.__doc__ or "").split()), "settings": _settings(kind.model_fields)}
        for name, kind in data.PARTITIONS.items()
    ]


def _settings(fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    return {key: {"default": info.default, "description": info.description} for key, info in fields.items()}


LISTS: dict[str, Callable[[], Rows]] = {
    "methods": _methods,
    "protocols": _protocols,
    "datasets": _datasets,
    "backbones": lambda: [{"name": name, "about": about} for name, (_, about) in models.BACKBONES.items()],
    "partitions": _partitions,
    "presets": lambda: [{"name": name, "about": config.preset_about(name)} for name in config.presets()],
}
