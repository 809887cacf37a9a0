"""What several commands share: the terminal, words of settings, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import UserError
from . import lazy

if TYPE_CHECKING:
    from ..runs import config as C
else:
    C = lazy.Module("runs.config")

console = Console(markup=False, emoji=False)  # paths and names may have brackets

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.toml|PRESET] [key=value ...]", help="a file or preset, then settings"),
]
Out = Annotated[Path | None, typer.Option("--out", help="the folder to write into (default: one below runs/)")]


def split(words: list[str] | None) -> tuple[str | None, dict[str, Any]]:
    """The file or preset, if the first word is one; and the settings."""
    words = list(words or [])
    preset = words.pop(0) if words and "=" not in words[0] else None
    return preset, C.parse_assignments(words)


def numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in names(text)]
    except ValueError:
        raise UserError(f'{option} = "{text}" must be whole numbers, separated by commas') from None


def names(text: str) -> list[str]:
    """a, b -> ["a", "b"]"""
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def interruptible(again: str) -> Iterator[None]:
    """Ctrl-C in a run: tells the command that goes on with it."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"\nstopped; all completed rounds are kept. Go on with:\n  {again}", soft_wrap=True)
        raise typer.Exit(lazy.INTERRUPTED) from None
