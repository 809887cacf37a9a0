"""Keeps the numbers of a comparison, without checkpoints: its table, one line per run in results.jsonl, and date and
commit in kept.json.

python scripts/keep_results.py runs/NAME experiments/PAPER/NAME --replace /my/data=cifar10

A line has the run's `label` and `seed`, its `result` (result.json) and its `rounds` (rounds.jsonl without the scores of
single clients; those of the last round are in the result). With --brief a line has no rounds.

With --update the comparison has some rows of one that is kept already: they take the place of those of the same label,
or, if none of their seeds is kept, are added as further seeds; kept.json says which commit made them. With --add as
well, labels that are not kept yet become further rows. Views of the comparison are kept with its rows.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from promptfed.runs import tables
from promptfed.runs.comparison import read
from promptfed.runs.rows import Row
from promptfed.runs.sheets import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="the folder of a finished comparison")
    parser.add_argument("kept", type=Path, help="the folder to write")
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW", help="in everything written")
    parser.add_argument("--brief", action="store_true", help="without rounds")
    parser.add_argument("--commit", help="of the code that made the runs, if it is not this")
    parser.add_argument("--update", action="store_true", help="replace these rows in what is kept, or add seeds")
    parser.add_argument("--add", action="store_true", help="with --update: also add rows that are not kept yet")
    given = parser.parse_args()
    replace = dict(pair.split("=", 1) for pair in given.replace)
    keep(given.comparison, given.kept, replace, given.brief, given.commit, given.update, given.add)


def keep(
    comparison: Path,
    kept: Path,
    replace: Mapping[str, str],
    brief: bool = False,
    made_by: str | None = None,
    update: bool = False,
    add: bool = False,
) -> None:
    about = {"date": str(date.today()), "commit": made_by or commit(), "brief": brief}
    rows = json.loads((comparison / "table.json").read_text())
    labels = [row["label"] for row in rows]
    found = {label: [json.dumps(run) + "\n" for run in runs(comparison, label, brief)] for label in labels}
    if update:
        views = [row for row in rows if "view" in row]
        texts, about = updated(kept, {label: lines for label, lines in found.items() if lines}, about, add, views)
    else:
        texts = {name: (comparison / name).read_text() for name in ("table.md", "table.json")}
        texts["results.jsonl"] = "".join(line for lines in found.values() for line in lines)
    for name, text in texts.items():
        for old, new in replace.items():
            text = text.replace(old, new)
        path = re.search(r'"(/[^"]*)"', text)
        if path:
            raise SystemExit(f"{name} would hold the path {path[1]} of this machine: add --replace {path[1]}=NAME")
        texts[name] = text
    kept.mkdir(parents=True, exist_ok=True)
    for name, text in {**texts, "kept.json": json.dumps(about) + "\n"}.items():
        (kept / name).write_text(text)


def updated(
    kept: Path, found: Mapping[str, list[str]], about: dict[str, Any], add: bool, views: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """What is kept, with other lines for these labels, and its table made anew."""
    lines: dict[str, list[str]] = {}
    for line in (kept / "results.jsonl").read_text().splitlines(keepends=True):
        lines.setdefault(json.loads(line)["label"], []).append(line)
    unknown = found.keys() - lines.keys()
    if unknown and not add:
        raise SystemExit(f"{kept} has no row {', '.join(sorted(unknown))} to update; --add adds it")
    lines |= {label: [] for label in found if label in unknown}
    made = {}
    for label, new in found.items():
        before, now = ([json.loads(line)["seed"] for line in each] for each in (lines[label], new))
        further = bool(before) and not set(before) & set(now)
        lines[label] = [*lines[label], *new] if further else new
        made |= {f"seed {seed}" if further else label: [about["date"], about["commit"]] for seed in now}
    whole = "".join(line for label in lines for line in lines[label])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "results.jsonl").write_text(whole)
        table = json.loads((kept / "table.json").read_text())
        there = {row["label"] for row in table}
        (folder / "table.json").write_text(json.dumps([*table, *(row for row in views if row["label"] not in there)]))
        rows = read(folder).table
    first = json.loads((kept / "kept.json").read_text())
    texts = {
        "results.jsonl": whole,
        "table.json": json.dumps(rows, indent=1) + "\n",
        "table.md": markdown(tables.sheets(rows), tables.scales(rows), tables.notes(rows)),
    }
    return texts, {**first, "later": {**first.get("later", {}), **made}}


def commit() -> str | None:
    """Of the code, where it is a git repository."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def runs(comparison: Path, label: str, brief: bool) -> list[dict[str, Any]]:
    """The finished runs of a row, by seed."""
    found = []
    for file in comparison.glob(f"{Row(label, {}, ()).slug}-seed*/result.json"):
        result = json.loads(file.read_text())
        lines = (file.parent / "rounds.jsonl").read_text().splitlines() if not brief else []
        rounds = [{name: _summary(value) for name, value in json.loads(line).items()} for line in lines]
        found.append({"label": label, "seed": result["seed"], "result": result, "rounds": rounds})
    return sorted(found, key=lambda run: run["seed"])


def _summary(value: Any) -> Any:
    """An evaluation of a round without its clients' scores; any other value as it is."""
    if not (isinstance(value, dict) and "summary" in value):
        return value
    return {name: part for name, part in value.items() if name != "clients"}


if __name__ == "__main__":
    main()
