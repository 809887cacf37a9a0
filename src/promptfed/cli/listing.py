"""promptfed list."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import unknown
from . import lazy
from .common import console

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from .. import data, methods, models
    from ..runs import config
else:
    config, data, methods, models = map(lazy.Module, ("runs.config", "data", "methods", "models"))

Rows = list[dict[str, Any]]


def list_(
    what: Annotated[
        str | None, typer.Argument(help="methods, datasets, backbones, partitions or presets; default: all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List methods, datasets, backbones, partitions and presets."""
    if what is not None and what not in LISTS:
        raise unknown("list", what, LISTS)
    lists = {name: rows() for name, rows in LISTS.items() if what in (None, name)}
    if as_json:
        print(json.dumps(lists[what] if what else lists, indent=1))
        return
    for name, rows in lists.items():
        table = Table(title=None if what else name, title_justify="left")
        for key in rows[0]:
            if key != "settings":
                table.add_column(key, overflow="fold", no_wrap=key == "name")
        for row in rows:
            table.add_row(*(str(value) for key, value in row.items() if key != "settings"))
        console.print(table)
        if name == "methods":
            tunings, prompts = (", ".join(f"+{name}" for name in kind) for kind in (methods.TUNINGS, methods.PROMPTS))
            console.print(
                f"After a method's name: {tunings}, tuned in place of all weights; {prompts}, a private prompt around "
                "what is tuned; +ft, fine-tuning of the result. For example fedprox+pt, fedper+vpt, fedavg+ft.",
                highlight=False,
            )


def _methods() -> Rows:
    rows = []
    for name in (*methods.METHODS, *methods.ALIASES):
        method = methods.create(name)
        own = {"private": "prompt", "stored": "stored features"}
        private = [*method.private, *(own[role] for role in method.tuning.role_names() if role in own)]
        row = {
            "name": name,
            "paper": methods.PAPERS.get(name, method.paper),
            "tunes": methods.tunes(method),
            "travels": " + ".join(role for role in method.roles() if role not in method.private) or "nothing",
            "private": " + ".join(private) or "nothing",
            "backbones": methods.backbones(method),
            "settings": _settings(methods.fields(name)),
        }
        rows.append(row)
    return rows


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
    "datasets": _datasets,
    "backbones": lambda: [{"name": name, "about": about} for name, (_, about) in models.BACKBONES.items()],
    "partitions": _partitions,
    "presets": lambda: [{"name": name, "about": config.preset_about(name)} for name in config.presets()],
}
