"""promptfed list."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..errors import unknown
from . import lazy
from .common import console

if TYPE_CHECKING:
    from . import catalog
else:
    catalog = lazy.Module("cli.catalog")


def list_(
    what: Annotated[
        str | None, typer.Argument(help="methods, datasets, backbones, partitions or presets; default: all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List methods, datasets, backbones, partitions and presets."""
    if what is not None and what not in catalog.LISTS:
        raise unknown("list", what, catalog.LISTS)
    lists = {name: rows() for name, rows in catalog.LISTS.items() if what in (None, name)}
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
            console.print(catalog.PLUG_INS, highlight=False)
