"""The commands that search on validation data: tune and choose."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import lazy
from .common import Out, Words, console, interruptible, names, numbers, split
from .runs import Mini, folder_for

if TYPE_CHECKING:
    from ..search import tune as tuning
else:
    tuning = lazy.Module("search.tune")


def tune(
    words: Words = None,
    methods: Annotated[
        str, typer.Option("--methods", help="comma-separated; default: the file's [[compare.rows]]")
    ] = "",
    seeds: Annotated[
        str, typer.Option("--seeds", help="of the comparison, comma-separated; trials have the first one")
    ] = "",
    trials: Annotated[int, typer.Option("--trials", help="runs per row, the same number for every row")] = 12,
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space",
            help="a setting and its values: method.lr=0.001..0.1 or method.epochs=1|5; may be given several times "
            "(default: the learning rates of each row's method, from a tenth to ten times their values)",
        ),
    ] = None,
    out: Out = None,
    mini: Mini = False,
) -> None:
    """Tune every row of a comparison on validation data; the same command again continues with what is not done."""
    preset, given = split(words)
    source = tuning.Source(preset, given, names(methods), numbers("--seeds", seeds), mini)
    folder = out or folder_for(preset, mini) / "tuning"
    plan = tuning.prepare(source, trials=trials, space=space or (), out=folder)
    with interruptible(" ".join(["promptfed tune", *sys.argv[2:]])):
        found = tuning.execute(plan, console)
    scale = " --mini" if mini else ""
    console.print(f"chosen settings are in {found.file}; next:", soft_wrap=True, highlight=False)
    console.print(f"  promptfed compare {found.file}{scale}", soft_wrap=True, highlight=False)
