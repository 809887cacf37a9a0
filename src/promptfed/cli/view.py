"""What a person sees in the terminal while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from ..runs.progress import Status
from ..runs.tables import CAPTION, HEADERS, REPORT, WHOLE, across, cells, rounds, size
from ..server import Line


class Live(Status):
    """A run in the terminal: how far it is, its accuracy, who failed and who is slow. Elsewhere one line per round."""

    def __init__(self, console: Console, label: str, rounds: int, every: int = 1) -> None:
        super().__init__(label, rounds, every)
        self._console = console
        self._screen = Screen(self, console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Live:
        if self._screen:
            self._screen.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended = True
        if self._screen:
            self._screen.transient = not self.done  # nothing is left to see of a run that was done before
            self._screen.stop()

    def end(self, line: Line) -> None:
        super().end(line)
        if not self._screen:
            self._console.print(self.line(), soft_wrap=True, highlight=False, markup=False)


def comparison(rows: Sequence[dict[str, Any]]) -> Group:
    """The table of a comparison with what must be known of its numbers. Title and caption are as wide as the terminal,
    not as the table."""
    scale = [rows[0]["scale"]] if "scale" in rows[0] else []
    title = ["accuracy in %, of the last round; local: mean over clients", *scale]
    caption = f"{CAPTION}\n{REPORT}" if across(rows, "local") else f"{CAPTION}\n{WHOLE}\n{REPORT}"
    return Group(Text("\n".join(title)), _comparison(rows), Text(caption))


def _comparison(rows: Sequence[dict[str, Any]]) -> Table:
    """As a paper prints it where the comparison has columns. Else columns that say the same of every method are left
    out, so that the table fits a narrow terminal."""
    wide = across(rows, "local")
    if wide:
        made = Table(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
        made.add_column(wide[0][0], min_width=min(22, max(len(line[0]) for line in wide)), overflow="fold")
        for header in wide[0][1:]:
            made.add_column(header, justify="right", overflow="fold")
        for cell in wide[1:]:
            made.add_row(*cell)
        return made
    lines = [cells(row) for row in rows]
    alike = {"seeds": {"1"}, "adapt": {"0"}, "common": {"-"}, "newcomers": {"-"}}
    told = [i for i, header in enumerate(HEADERS) if {line[i] for line in lines} - alike.get(header, set())]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column(HEADERS[0], min_width=min(14, max(len(line[0]) for line in lines)), overflow="fold")
    for i in told[1:]:
        table.add_column(HEADERS[i], justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[i] for i in told))
    return table


def outcome(numbers: dict[str, Any]) -> Group:
    """The numbers of one run."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    table = Table()
    for header in ("", "round", "clients", "local", "std", "worst", "global", "macro F1"):
        table.add_column(header, justify="left" if not header else "right")
    for stage, found in numbers["metrics"].items():
        for name, m in found.items():
            when = "-".join(str(r) for r in dict.fromkeys((m["rounds"][0], m["rounds"][-1]))) if "rounds" in m else None
            who = f"{round(m['clients'], 1):g}" + (f" of {m['of']}" if "of" in m else "")
            scores = (m["local"]["mean"], m["local"]["std"], m["local"]["worst"], m["global"], m["macro_f1"])
            shown = (when or str(m["round"]), who, *(percent(value) for value in scores))
            table.add_row(f"{stage}, {name}".replace("_", " "), *shown)
    each = numbers["communication"]["per_client_and_round"]
    title = f"{numbers['method']}, seed {numbers['seed']}, {rounds(numbers['rounds'])}"
    cost = (
        f"per client and round: {size(each['up'])} up, {size(each['down'])} down; "
        f"{numbers['passes']['train']:,} sample passes; "
        f"{numbers['seconds']['train'] + numbers['seconds']['evaluate']:.0f} s"
    )
    return Group(Text(title), table, Text("\n".join((cost, *_MEANING))))


# Below the numbers of a run.
_MEANING = (
    "local: mean over clients, on their own test data; std, worst: over clients; global: on all clients' test data.",
    "To report: aggregated, last, over several seeds (compare --seeds 0,1,2); why: docs/concepts.md, What to report.",
)
