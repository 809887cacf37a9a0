"""The live table of a search."""

import io

from rich.console import Console
from rich.table import Table

from promptfed.search.board import Board


def table() -> Table:
    made = Table()
    made.add_column("row")
    made.add_row("the table")
    return made


def test_a_terminal_shows_the_table_and_a_file_the_events_and_then_the_table() -> None:
    for terminal in (True, False):
        text = io.StringIO()
        with Board(Console(file=text, force_terminal=terminal), table) as board:
            board.say("an event")
            before = text.getvalue()
        assert ("the table" in before) is terminal
        assert ("an event" in before) is not terminal
        assert "the table" in text.getvalue()


def test_without_a_console_nothing_is_shown() -> None:
    with Board(None, table) as board:
        board.say("an event")
