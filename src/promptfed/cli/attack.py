"""The command that attacks a simulated federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from . import lazy
from .common import Out, Words, console, names, numbers, split

if TYPE_CHECKING:
    from ..attacks import bench, outcome
    from ..attacks import privacy as leaks
else:
    bench, outcome, leaks = (lazy.Module(f"attacks.{name}") for name in ("bench", "outcome", "privacy"))


def attack(
    words: Words = None,
    attacks: Annotated[str, typer.Option("--attacks", help="comma-separated; default: all")] = "",
    defences: Annotated[
        str, typer.Option("--defences", help="rules of aggregation, comma-separated; default: the usual ones")
    ] = "",
    share: Annotated[float, typer.Option("--share", help="share of the clients that are malicious")] = 0.2,
    seeds: Annotated[str, typer.Option("--seeds", help="comma-separated; default: the one of the settings")] = "",
    privacy: Annotated[
        bool, typer.Option("--privacy", help="attack clients' data by what they send instead, without and with noise")
    ] = False,
    out: Out = None,
) -> None:
    """Attack a simulated federation by some of its clients, under several rules of aggregation."""
    preset, given = split(words)
    folder = out or Path("runs") / "attacks"
    if privacy:
        if attacks or defences or seeds:
            raise UserError(
                "--privacy tries all its attacks on one run: --attacks, --defences and --seeds do not apply"
            )
        found = leaks.execute(leaks.prepare(preset, given, folder), console)
        _show(leaks.table(found), folder / "leaks.md")
        return
    plan = bench.prepare(preset, given, names(attacks), names(defences), share, numbers("--seeds", seeds), folder)
    cells = bench.execute(plan, console)
    _show(outcome.table(cells), folder / "attacks.md")


def _show(table: str, file: Path) -> None:
    for text in (table, f"the table is in {file}"):
        console.print(text, soft_wrap=True, highlight=False, markup=False)
