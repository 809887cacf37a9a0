"""The command that attacks a simulated federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import lazy
from .common import Out, Words, console, names, split

if TYPE_CHECKING:
    from ..attacks import bench
else:
    bench = lazy.Module("attacks.bench")


def attack(
    words: Words = None,
    attacks: Annotated[str, typer.Option("--attacks", help="comma-separated; default: all")] = "",
    defences: Annotated[
        str, typer.Option("--defences", help="rules of aggregation, comma-separated; default: the usual ones")
    ] = "",
    share: Annotated[float, typer.Option("--share", help="share of the clients that are malicious")] = 0.2,
    out: Out = None,
) -> None:
    """Attack a simulated federation by some of its clients, under several rules of aggregation."""
    preset, given = split(words)
    folder = out or Path("runs") / "attacks"
    plan = bench.prepare(preset, given, names(attacks), names(defences), share, folder)
    found = bench.execute(plan, console)
    console.print(bench.table(found), soft_wrap=True, highlight=False, markup=False)
    console.print(f"the table is in {folder / 'attacks.md'}", soft_wrap=True, highlight=False)
