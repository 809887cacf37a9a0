"""What runs and comparisons have found, as tables: JSON, CSV, Markdown, and in the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table as Rich
from rich.text import Text

from .. import files, methods
from . import record
from .api import Result

Table = dict[str, Any]
Places = Mapping[str, tuple[str, str]]  # label -> its row and column, in a table with columns
# Below every table of a comparison, for people; the second where it has more than one accuracy.
CAPTION = "As aggregated: the models as the server sends them, on test data; ±: sample deviation over seeds."
WHOLE = "worst: the worst client; global: all clients' test data; trained: after local training."
APART = "References, to measure the others by; to ceiling: points of local accuracy to the centralised one"
REPORT = "Which number to report: docs/concepts.md, What to report."
# What such a table is told of, with the words for it.
ACROSS = {"local": "local: mean over clients", "worst": "worst client", "global": "all clients' test data"}

# Columns of a comparison that are left out where they say this of every method, for a narrow terminal.
_ALIKE = {"seeds": {"1"}, "adapt": {"0"}, "common": {"-"}, "newcomers": {"-"}, "to ceiling": {"-"}}
# Below the numbers of a run.
_MEANING = (
    "local: mean over clients, on their own test data; std, worst: over clients; global: on all clients' test data.",
    "To report: aggregated, last, over several seeds (compare --seeds 0,1,2); why: docs/concepts.md, What to report.",
)


def table(results: Mapping[str, Sequence[Result]], places: Places | None = None, scale: str = "") -> list[Table]:
    """One row per label, references last: mean over the seeds, and their standard deviation where there are several.
    `scale`: what a small scale has to say of itself."""
    found = []
    for label, runs in results.items():
        row, column = (places or {}).get(label, ("", ""))
        numbers = [run.numbers for run in runs]
        last, after, common, newcomers = (
            [_last(n["metrics"], *stages) for n in numbers]
            for stages in (("aggregated",), ("after_local_all", "after_local"), ("common",), ("newcomers_aggregated",))
        )
        each = [n["communication"]["per_client_and_round"] for n in numbers]
        kind = methods.reference(numbers[0].get("method", ""))
        found.append(
            {
                "label": label,
                **({"unused": True} if any(record.unused(n) for n in numbers) else {}),
                **({"row": row, "column": column} if column else {}),
                **({"scale": scale} if scale else {}),
                **({"reference": "ceiling" if kind.centralised else "other"} if kind else {}),
                "dataset": numbers[0]["dataset"]["name"],
                "rounds": numbers[0]["rounds"],
                "seeds": len(runs),
                "clients": {"local": _clients(last), "after_local": _clients(after)},
                "local": _over_seeds(last, "local", "mean"),
                "worst": _over_seeds(last, "local", "worst"),
                "global": _over_seeds(last, "global"),
                "macro_f1": _over_seeds(last, "macro_f1"),
                "after_local": _over_seeds(after, "local", "mean"),
                "common": _over_seeds(common, "local", "mean"),
                "newcomers": _over_seeds(newcomers, "local", "mean"),
                "bytes": _mean([e["up"] + e["down"] for e in each]),
                "parameters_up": _mean([e["parameters_up"] for e in each]),
                "passes": _mean([n["passes"]["train"] for n in numbers]),
                "adapt_passes": _mean([n["passes"]["adapt_last"] for n in numbers]),
                "seconds": _mean([n["seconds"]["train"] + n["seconds"]["evaluate"] for n in numbers]),
            }
        )
    _to_ceiling(found)
    return sorted(found, key=lambda row: "reference" in row)


def _to_ceiling(found: Sequence[Table]) -> None:
    """Adds to each row how far it is from the best centralised one of its column."""
    for row in found:
        ceilings = [other["local"] for other in found if other.get("reference") == "ceiling" and _alike(row, other)]
        known = [local["mean"] for local in ceilings if local]
        if known and row["local"]:
            row["to_ceiling"] = row["local"]["mean"] - max(known)


def _alike(row: Table, other: Table) -> bool:
    return (row.get("column"), row["dataset"]) == (other.get("column"), other["dataset"])


def _last(metrics: Mapping[str, Any], *stages: str) -> Table | None:
    """The last round of the first of these stages that the run has."""
    return next((metrics[stage]["last"] for stage in stages if stage in metrics), None)


def _clients(found: Sequence[Mapping[str, Any] | None]) -> Table | None:
    """How many clients a number is the mean of, and of how many; of several seeds, where they were fewest."""
    known = [(m["clients"], m["of"]) for m in found if m and "of" in m]
    return dict(zip(("n", "of"), min(known), strict=True)) if known else None


def in_percent(value: float | None) -> float:
    """NaN for None."""
    return 100 * value if value is not None else math.nan


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of the values that are not NaN; (NaN, 0) of none, (value, 0) of one."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, 0.0
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _over_seeds(found: Iterable[Table | None], *path: str) -> Table | None:
    """Of the metric at this path, in the runs that have it."""
    values: list[Any] = [reduce(getitem, path, m) for m in found if m]
    known = [value for value in values if value is not None]
    mean, std = spread(known)
    return {"mean": mean, "std": std if len(known) > 1 else None} if known else None


HEADERS = (
    *("method", "seeds", "local", "worst", "global", "F1", "trained", "common", "newcomers"),
    *("to ceiling", "bytes", "passes", "adapt"),
)


def cells(row: Mapping[str, Any], plain: bool = False) -> tuple[str, ...]:
    """A row for people: accuracies in per cent. `plain`: without a word of clients that are not in them."""
    keys = ("local", "worst", "global", "macro_f1", "after_local", "common", "newcomers")
    scores = [percent(row[key]) if plain else score(row, key) for key in keys]
    cost = (size(row["bytes"]), count(row["passes"]), count(row["adapt_passes"]))
    label = f"{row['label']} (no update used)" if row.get("unused") else row["label"]
    return (label, str(row["seeds"]), *scores, points(row.get("to_ceiling")), *cost)


def score(row: Mapping[str, Any], key: str) -> str:
    """With the number of clients where it is not the mean of all."""
    counted = row["clients"].get(key)
    part = f" ({of(counted)})" if counted and counted["n"] < counted["of"] else ""
    return percent(row[key]) + part


def of(counted: Mapping[str, Any] | None) -> str:
    return f"{counted['n']} of {counted['of']}" if counted else "-"


def percent(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "-"
    wide = "" if spread["std"] is None else f" ±{100 * spread['std']:.1f}"
    return f"{100 * spread['mean']:.1f}{wide}"


def points(difference: float | None) -> str:
    """0.031 -> +3.1"""
    return "-" if difference is None else f"{100 * difference:+.1f}"


def across(found: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, ...]]:
    """One accuracy as a paper prints it: heads, then a line for each method with its columns beside each other. Empty
    where the comparison has no columns."""
    placed = [row for row in found if "column" in row]
    columns, rows = (list(dict.fromkeys(row[part] for row in placed)) for part in ("column", "row"))
    held = {(row["row"], row["column"]): score(row, key) for row in placed}
    lines = [(row, *(held.get((row, column), "-") for column in columns)) for row in rows]
    return [("method", *columns), *lines] if columns else []


def size(n: float) -> str:
    """1234567 -> 1.2 MB"""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def count(n: float) -> str:
    """672000 -> 672 k"""
    if n >= 1e6:
        return f"{n / 1e6:.2f} M"
    return f"{n / 1e3:.0f} k" if n >= 1e3 else f"{n:.0f}"


def rounds(n: int) -> str:
    return f"{n} round{'s' if n != 1 else ''}"


def save(
    results: Mapping[str, Sequence[Result]], out: Path, places: Places | None = None, scale: str = ""
) -> list[Table]:
    """table.json, table.csv and table.md."""
    found = table(results, places, scale)
    files.write(out / "table.json", (json.dumps(found, indent=1) + "\n").encode())
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow((*HEADERS, "reference", "clients", "clients trained", "dataset", "rounds"))
    for row in found:
        counted = (of(row["clients"][key]) for key in ("local", "after_local"))
        writer.writerow((*cells(row, plain=True), row.get("reference", "-"), *counted, row["dataset"], row["rounds"]))
    files.write(out / "table.csv", text.getvalue().encode())
    wide = [f"Accuracy in %, {words}:\n\n{markdown(across(found, key))}\n" for key, words in ACROSS.items() if places]
    head = f"{scale[0].upper()}{scale[1:]}.\n\n" if scale else ""
    ranked, apart = ([cells(row) for row in found if ("reference" in row) is kind] for kind in (False, True))
    whole = "Accuracy in %, local: mean over clients:\n\n" + markdown([HEADERS, *ranked])
    whole += f"\n{APART}:\n\n" + markdown([HEADERS, *apart]) if apart else ""
    files.write(out / "table.md", "".join([head, *wide, whole, f"\n{CAPTION}\n{WHOLE} {REPORT}\n"]).encode())
    return found


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The first line holds the heads."""
    rule = ("---",) + ("---:",) * (len(lines[0]) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


# ---- in the terminal


def comparison(rows: Sequence[dict[str, Any]]) -> Group:
    """The table of a comparison, as a paper prints it where it has columns. Title and caption are as wide as the
    terminal, not as the table."""
    scale = [rows[0]["scale"]] if "scale" in rows[0] else []
    title = ["accuracy in %, of the last round; local: mean over clients", *scale]
    wide = across(rows, "local")
    (heads, *lines), width = (wide, 22) if wide else ([HEADERS, *map(cells, rows)], 14)
    told = [i for i, head in enumerate(heads) if wide or {line[i] for line in lines} - _ALIKE.get(head, set())]
    shown = Rich(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for i in told:
        least = min(width, max(len(line[0]) for line in lines)) if i == 0 else None
        fold = i == 0 or bool(wide)
        shown.add_column(heads[i], justify="right" if i else "left", min_width=least, overflow="fold", no_wrap=not fold)
    apart = {row["row" if wide else "label"] for row in rows if "reference" in row}
    for line, after in zip(lines, [*lines[1:], lines[-1]], strict=True):
        shown.add_row(*(line[i] for i in told), end_section=line[0] not in apart and after[0] in apart)
    below = [CAPTION, *([] if wide else [WHOLE]), *([f"{APART}."] if apart else []), REPORT]
    return Group(Text("\n".join(title)), shown, Text("\n".join(below)))


def outcome(numbers: dict[str, Any]) -> Group:
    """The numbers of one run."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    shown = Rich()
    for header in ("", "round", "clients", "local", "std", "worst", "global", "macro F1"):
        shown.add_column(header, justify="left" if not header else "right")
    for stage, found in numbers["metrics"].items():
        for name, m in found.items():
            at = m.get("rounds") or [m["round"]]
            when = "-".join(dict.fromkeys((str(at[0]), str(at[-1]))))
            who = f"{round(m['clients'], 1):g}" + (f" of {m['of']}" if "of" in m else "")
            scores = (m["local"]["mean"], m["local"]["std"], m["local"]["worst"], m["global"], m["macro_f1"])
            row = (when, who, *(percent(value) for value in scores))
            shown.add_row(f"{stage}, {name}".replace("_", " "), *row)
    each = numbers["communication"]["per_client_and_round"]
    title = f"{numbers['method']}, seed {numbers['seed']}, {rounds(numbers['rounds'])}"
    cost = (
        f"per client and round: {size(each['up'])} up, {size(each['down'])} down; "
        f"{numbers['passes']['train']:,} sample passes; "
        f"{numbers['seconds']['train'] + numbers['seconds']['evaluate']:.0f} s"
    )
    return Group(Text(title), shown, Text("\n".join((cost, *_MEANING))))
