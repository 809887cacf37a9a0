"""What is seen of work under way: drawn anew on a terminal and in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Event, RLock, Thread

from rich.console import Console, RenderableType
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table

from .. import steps
from ..steps import Step

QUIET = 30.0  # seconds after which a line says that work goes on
FIRST = 2.0  # and at the beginning, where a mistake in the settings would be the only thing to say
BAR = 24  # characters


def duration(seconds: float) -> str:
    """75 -> 1:15"""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Steps:
    """The steps under way."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def add(self, step: Step) -> None:
        self._steps = [*(one for one in self._steps if one is not step), step]

    @property
    def active(self) -> list[Step]:
        return [step for step in self._steps if step.active]

    def line(self) -> str:
        """decoding shapes: 512 of 1,600 images, 0:05 left"""
        return ", ".join(f"{step.what}: {', '.join(_progress(step))}" for step in self.active)

    def __rich__(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2, 0, 0))
        for step in self.active:
            rows.add_row(f"  {step.what}", ProgressBar(step.total, step.count(), width=BAR), ", ".join(_progress(step)))
        return rows


def _progress(step: Step) -> list[str]:
    left = step.left()
    return [f"{step.count():,} of {step.total:,} images", *([] if left is None else [f"{duration(left)} left"])]


class Shown:
    """Keeps something on the console. Where it cannot be drawn anew, `line` is printed whenever nothing else was for a
    while."""

    def __init__(self, console: Console, drawn: RenderableType, line: Callable[[], str]) -> None:
        self._console, self._drawn, self._line = console, drawn, line
        able = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
        self._screen = Screen(drawn, console=console, refresh_per_second=4) if able else None
        self._due = 0.0  # when a line is needed
        self._stopped = Event()
        self._lock = RLock()

    def start(self) -> None:
        if self._screen:
            self._screen.start(refresh=True)  # at once: the work may be over before the next drawing
        else:
            self._due = time.monotonic() + min(FIRST, QUIET)
            Thread(target=self._go_on, daemon=True).start()

    def stop(self, wipe: bool = False) -> None:
        with self._lock:
            self._stopped.set()
        if self._screen:
            self._screen.transient = wipe
            self._screen.stop()

    def say(self, text: str) -> None:
        """A line, unless it is drawn anyway."""
        with self._lock:
            if text and not self._screen and not self._stopped.is_set():
                self._due = time.monotonic() + QUIET
                write(self._console, text)

    def _go_on(self) -> None:
        while not self._stopped.wait(max(0.01, self._due - time.monotonic())):
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + QUIET
                self.say(self._line())


@contextmanager
def bars(console: Console) -> Iterator[None]:
    """Shows steps outside of a run, each while it goes on."""
    open_: dict[Step, Shown] = {}

    def on_step(step: Step) -> None:
        if step in open_:
            open_.pop(step).stop(wipe=True)
        elif step.active:
            held = Steps()
            held.add(step)
            open_[step] = Shown(console, held, held.line)
            open_[step].start()
            open_[step].say(held.line())

    with steps.listening(on_step):
        yield


def write(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
