"""Tables of results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..runs.tables import APART, CAPTION, HEADERS, REPORT, WHOLE, across, cells, rounds, size

# Columns of a comparison that are left out where they say this of every method, for a narrow terminal.
_ALIKE = {"seeds": {"1"}, "adapt": {"0"}, "common": {"-"}, "newcomers": {"-"}, "to ceiling": {"-"}}
# Below the numbers of a run.
_MEANING = (
    "local: mean over clients, on their own test data; std, worst: over clients; global: on all clients' test data.",
    "To report: aggregated, last, over several seeds (compare --seeds 0,1,2); why: docs/concepts.md, What to report.",
)


def comparison(rows: Sequence[dict[str, Any]]) -> Group:
    """The table of a comparison, as a paper prints it where it has columns. Title and caption are as wide as the
    terminal, not as the table."""
    scale = [rows[0]["scale"]] if "scale" in rows[0] else []
    title = ["accuracy in %, of the last round; local: mean over clients", *scale]
    wide = across(rows, "local")
    (heads, *lines), width = (wide, 22) if wide else ([HEADERS, *map(cells, rows)], 14)
    told = [i for i, head in enumerate(heads) if wide or {line[i] for line in lines} - _ALIKE.get(head, set())]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for i in told:
        least = min(width, max(len(line[0]) for line in lines)) if i == 0 else None
        fold = i == 0 or bool(wide)
        table.add_column(heads[i], justify="right" if i else "left", min_width=least, overflow="fold", no_wrap=not fold)
    apart = {row["row" if wide else "label"] for row in rows if "reference" in row}
    for line, after in zip(lines, [*lines[1:], lines[-1]], strict=True):
        table.add_row(*(line[i] for i in told), end_section=line[0] not in apart and after[0] in apart)
    below = [CAPTION, *([] if wide else [WHOLE]), *([f"{APART}."] if apart else []), REPORT]
    return Group(Text("\n".join(title)), table, Text("\n".join(below)))


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
