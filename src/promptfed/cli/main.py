"""The command line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from .. import files
from ..errors import UserError, nearest
from . import flower, site  # noqa: F401 - its commands join flower's
from .attack import attack
from .common import console
from .listing import list_
from .results import analyse, export, join, predict, report, table
from .runs import compare, partition, run, watch
from .search import choose, tune


class Commands(TyperGroup):
    """Tells how a setting is written where one is taken for an option: --rounds 3 for rounds=3."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # click's own errors, by their attributes: typer has a copy of click
            option: str | None = getattr(error, "option_name", None)
            similar: list[str] | None = getattr(error, "possibilities", None)
            if (
                option is None
                or similar is None
                or ctx.invoked_subcommand not in ("run", "compare", "tune", "choose", "partition", "attack")
            ):
                raise
            name = option.lstrip("-")
            like = nearest(name, (other.lstrip("-") for other in similar))
            setting = f"{name.replace('-', '_')}=VALUE"
            raise UserError(
                f"{option} is not an option of {ctx.invoked_subcommand}{like} (a setting is written {setting})"
            ) from None


app = typer.Typer(
    cls=Commands,
    help="Prompt-based federated learning over vision models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"promptfed {version('promptfed')}")
        raise typer.Exit()


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="print the version, and stop", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Prompt-based federated learning over vision models."""


COMMANDS: tuple[Callable[..., None], ...] = (
    *(run, compare, tune, choose, watch, partition, list_),
    *(table, report, analyse, attack, predict, export, join),
)
for command in COMMANDS:
    app.command(command.__name__.rstrip("_"))(command)
app.add_typer(flower.app, name="flower")


def main() -> None:
    said = Console(stderr=True, markup=False, emoji=False)
    warnings.showwarning = lambda message, *_, **__: said.print(f"warning: {message}", style="yellow")
    if not console.is_terminal:
        os.environ.setdefault("COLUMNS", "120")  # tables in a file or a pipe need not fit a screen
    # method=my_module:MyMethod, next to where the command is run; last, so that no file there replaces a package
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))] + [""]
    try:
        app()
    except UserError as error:
        sys.exit(f"promptfed: {error}")
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        sys.exit(f"promptfed: {error.strerror}: make room and repeat the command")
