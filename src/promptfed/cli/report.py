"""The commands that show what was recorded: report and analyse."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..analysis import ANALYSES, Options, make
from ..errors import UserError
from . import interrupts
from .common import console

_LIST = "; ".join(f"{name}: {analysis.about}" for name, analysis in ANALYSES.items())


def analyse(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run, or of a comparison")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help=f"which ones; default: all that apply. {_LIST}")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="where to write (default: RUN/analysis)")] = None,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", help="whose models, by number or site; may be given several times (default: some)"),
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="how many: shown, of pure colours, or of each class")
    ] = None,
) -> None:
    """Make pictures, tables and captions of what a finished run, or a comparison, has learnt."""
    with interrupts.at_once():
        from ..analysis import opened  # noqa: F401 - with torch, which is slow to import
    made = make(run, names or (), out, Options(_numbers(run, client or []), images))
    for name, files in made.files.items():
        console.print(f"{name}: {', '.join(str(file) for file in files)}", soft_wrap=True)
    for name, why in made.left_out.items():
        console.print(f"{name} left out: {why.removeprefix(f'{name}: ')}", soft_wrap=True, style="dim")
    if not made.files:
        raise UserError(f'no analysis applies to "{run}"')


def _numbers(folder: Path, clients: list[str]) -> tuple[int, ...]:
    """Numbers of clients that are given so, or by the names of their sites."""
    if not clients:
        return ()
    from ..runs.opened import Run

    run = Run(folder)
    return tuple(run.number(client) for client in clients)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs or comparisons")],
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("report.html"),
) -> None:
    """Write one HTML page about runs and comparisons; it works offline."""
    with interrupts.at_once():
        from ..report.page import write  # altair is slow to import, and not every command draws
    path = write(folders, out)
    console.print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
