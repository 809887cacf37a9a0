"""A live table in a terminal; elsewhere one line per event, and nothing without a console."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live


class Board:
    def __init__(self, console: Console | None, make: Callable[[], RenderableType]) -> None:
        self._console, self._make = console, make
        self._screen = Live(console=console, auto_refresh=False) if console and console.is_terminal else None

    def __enter__(self) -> Board:
        if self._screen:
            self._screen.start()
            self.draw()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._screen:
            self.draw()
            self._screen.stop()
        elif self._console:
            self._console.print(self._make())

    def draw(self) -> None:
        if self._screen:
            self._screen.update(self._make(), refresh=True)

    def say(self, text: str) -> None:
        """What has happened. In a terminal the table shows it."""
        if self._console and not self._screen:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)
        self.draw()


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
