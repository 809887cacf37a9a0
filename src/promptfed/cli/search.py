"""The commands that search on validation data: tune and choose."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import lazy
from .common import Out, Words, console, interruptible, names, numbers, split
from .runs import Mini, Only, folder_for

if TYPE_CHECKING:
    from ..search import choose as choosing
    from ..search import tune as tuning
else:
    choosing, tuning = map(lazy.Module, ("search.choose", "search.tune"))


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
    only: Only = None,
    out: Out = None,
    mini: Mini = False,
) -> None:
    """Tune every row of a comparison on validation data; the same command again continues with what is not done."""
    preset, given = split(words)
    source = tuning.Source(preset, given, names(methods), numbers("--seeds", seeds), mini)
    folder = out or folder_for(preset, mini) / "tuning"
    plan = tuning.prepare(source, trials=trials, space=space or (), out=folder, only=only or ())
    with interruptible(" ".join(["promptfed tune", *sys.argv[2:]])):
        found = tuning.execute(plan, console)
    scale = " --mini" if mini else ""
    console.print(f"chosen settings are in {found.file}; next:", soft_wrap=True, highlight=False)
    console.print(f"  promptfed compare {found.file}{scale}", soft_wrap=True, highlight=False)


def choose(
    words: Words = None,
    methods: Annotated[
        str, typer.Option("--methods", help="candidates, comma-separated; default: some that fit the backbone")
    ] = "",
    minutes: Annotated[float, typer.Option("--minutes", help="the budget")] = 10.0,
    out: Out = None,
) -> None:
    """Find the method and learning rates that suit a federation, on validation data and within some minutes."""
    preset, given = split(words)
    folder = out or _fresh("choice")
    plan = choosing.prepare(preset, given, methods=names(methods), minutes=minutes, out=folder)
    console.print(plan.sentence(), soft_wrap=True, highlight=False, markup=False)
    try:
        found = choosing.execute(plan, console)
    except KeyboardInterrupt:
        console.print(f"\nstopped; nothing is chosen, the runs so far are in {folder}", soft_wrap=True)
        raise typer.Exit(lazy.INTERRUPTED) from None
    console.print(choosing.ranking(found))
    for sentence in (*found.sentences(), f"next: promptfed run {found.file}"):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    if found.stopped:
        raise typer.Exit(lazy.INTERRUPTED)


def _fresh(name: str) -> Path:
    """A folder of its own below runs/."""
    paths = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())
