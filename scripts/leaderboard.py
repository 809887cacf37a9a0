"""Writes docs/leaderboard.md from recorded comparisons: all methods, grouped by what they tune.

python scripts/leaderboard.py [experiments/leaderboard/NAME ...] [--out docs/leaderboard.md]

A folder is that of a comparison, or what scripts/keep_results.py has kept of one; by default all that are kept in
experiments/leaderboard. Each has a section (in a comparison with columns, one per column) with a table per protocol.
Domains that are left out in turn share a table.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from promptfed import files
from promptfed.errors import UserError
from promptfed.method import Method
from promptfed.methods import ALIASES, METHODS, create
from promptfed.methods.overview import REFERENCES, family
from promptfed.runs import comparison, tables
from promptfed.runs.cells import count, mean_of, percent, size
from promptfed.runs.protocols import PROTOCOLS, UNSEEN, Protocol, wanted
from promptfed.runs.sheets import Sheet, markdown
from promptfed.tuning import Family

ROOT = Path(__file__).parents[1]
KEPT = sorted(file.parent for file in (ROOT / "experiments" / "leaderboard").glob("*/results.jsonl"))
PAGE = ROOT / "docs" / "leaderboard.md"
HEAD = """# Leaderboard

Methods of the catalogue on the same federations, grouped by what they tune. In a group, methods with one model for all
clients come first, ranked by global accuracy, then those with a model per client, ranked by local accuracy.
`make leaderboard` makes this page from the results in `experiments/leaderboard`; the files there say how to make them.
They also say which rows got more trials than the others, after first results: `fedvpt-d` and `centralised` on
Office-Caltech10. `fedprox` has its default weight (mu = 0.0001), with which it equals FedAvg on most boards; the own
models of `flexlora` are one mean, cut to each client's rank; a large ± is a seed that diverged at the rate which the
search had found with another (`fedsa-lora` on Office-Caltech10).

On what nobody has trained on, methods are ranked by the number of the protocol (H for base to novel, the mean of
domains that are left out in turn), with rates chosen on validation data of the clients and classes that train.

Accuracy in % on test data, of the models as the server sends them after the last round; ±: sample deviation over seeds,
as in all tables, none with one seed; who holds which images stays the same. local: mean over clients, each on its own
test data; worst: the worst client; global: all clients' test data; newcomers: local of clients that never trained;
bytes: per client and round, both ways; passes: training samples drawn in all. Every file has one epoch per round, but a
method that trains its parts one after the other draws more: `pfedpt` twice as many, `fedrep` six times (its head first,
for five epochs). `fedavg, 2 epochs` and `fedavg, 6 epochs` draw as many.
"""
EMPTY = "\nThere are no results yet.\n"
NEWCOMERS = "newcomers"
USUAL = ("local", "worst", "global")
GROUPS = [*Family, REFERENCES]


class Entry(NamedTuple):
    """A row of a comparison."""

    row: tables.Table  # of table.json
    method: Method
    numbers: Mapping[str, Any]  # of its first run

    @property
    def config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.numbers["config"]
        return found

    @property
    def label(self) -> str:
        """As the comparison has it; with what is tuned where that is not what the method brings."""
        shown = tables.name(self.row)
        return self.config["method"]["name"] if shown in (*METHODS, *ALIASES) else shown

    @property
    def group(self) -> str:
        return REFERENCES if self.method.reference else family(self.method)

    @property
    def unseen(self) -> Mapping[str, Any]:
        """Its numbers on what nobody has trained on, or else at clients that never train, by column."""
        late = self.row.get("newcomers")
        return self.row.get("protocols") or ({NEWCOMERS: late} if late else {})

    def rank(self, key: str | None) -> tuple[bool, float]:
        """The kind of model, then from the best on: by a column of `unseen`, or by the one that suits the kind."""
        own = self.row["models"] == "own"
        found = self.unseen.get(key) if key else self.row["local" if own else "global"]
        return own, -found["mean"] if found else 0.0


class Board(NamedTuple):
    """A column of a comparison, or all of one without columns."""

    rows: Sequence[Entry]
    column: str
    made: str  # when, and by which code

    @property
    def title(self) -> str:
        about = self.column or ", ".join(protocol.name for protocol in self.asked)
        return f"{title(self.rows[0])}{f': {about}' if about else ''}"

    @property
    def asked(self) -> Sequence[Protocol]:
        """What its runs are tested on besides their own data."""
        config = self.rows[0].config
        return [*wanted(config["eval"]).values(), *[PROTOCOLS[NEWCOMERS]] * bool(config["join"]["clients"])]

    @property
    def heads(self) -> list[str]:
        """Columns of `Entry.unseen`."""
        return list(dict.fromkeys(head for one in self.rows for head in one.unseen))

    @property
    def by(self) -> str | None:
        """The column that ranks; None: local or global accuracy."""
        return next((head for head in ("H", *self.heads) if head in self.heads), None)

    @property
    def entries(self) -> list[Entry]:
        """In groups, ranked."""
        return sorted(self.rows, key=lambda one: (GROUPS.index(one.group), *one.rank(self.by)))


def page(folders: Sequence[Path]) -> str:
    found = [board for folder in folders for board in boards(folder)]
    if not found:
        return HEAD + EMPTY
    seen, unseen = ([board for board in found if bool(board.by) is new] for new in (False, True))
    glance = [sheet for sheet in (overview(seen), overview_of_unseen(unseen)) if sheet.lines]
    return HEAD + "\n" + markdown(glance) + "".join(f"\n{section(board)}" for board in (*seen, *unseen))


def overview(found: Sequence[Board]) -> Sheet:
    """The first of each kind on every board, whatever they tune, beside the references."""
    lines = []
    for board in found:
        ranked = sorted((one for one in board.rows if not one.method.reference), key=lambda one: one.rank(None))
        cells = [board.title]
        for models, key in (("one", "global"), ("own", "local")):
            first = next((one for one in ranked if one.row["models"] == models and one.row[key]), None)
            cells.append(f"{first.label} {percent(first.row[key])}" if first else "-")
        cells.append(named(board.entries, lambda one: one.row["local"], references=True))
        lines.append(tuple(cells))
    heads = ("federation", "first of one model for all, global", "first of own models, local", "references, local")
    return Sheet("At a glance", heads, lines)


def overview_of_unseen(found: Sequence[Board]) -> Sheet:
    """The first three of every board, whatever they tune, beside the references."""
    lines = []
    for board in found:

        def score(one: Entry, by: str = board.by or "") -> Any:
            return one.unseen.get(by)

        able = [one for one in board.rows if score(one)]
        able.sort(key=lambda one: -score(one)["mean"])
        first = [one for one in able if not one.method.reference][:3]
        lines.append((board.title, board.by or "", named(first, score), named(able, score, references=True)))
    heads = ("federation", "ranked by", "first three", "references")
    return Sheet("At a glance, on what nobody has trained on", heads, lines)


def named(entries: Sequence[Entry], score: Callable[[Entry], Any], references: bool = False) -> str:
    chosen = (one for one in entries if bool(one.method.reference) is references)
    return ", ".join(f"{one.label} {percent(score(one))}" for one in chosen) or "-"


def boards(folder: Path) -> Iterator[Board]:
    compared = comparison.read(folder)
    first = {label: runs[0].numbers for label, runs in compared.items()}
    entries = []
    for row in compared.table:
        numbers = first.get(row.get("view", {}).get("of", row["label"]), {})
        if "config" not in numbers:
            raise UserError(f'"{folder}": the results of "{row["label"]}" do not say their settings')
        entries.append(Entry(row, create(numbers["config"]["method"]["name"]), numbers))
    if all(one.config["eval"]["leave_out"] == one.row.get("column") for one in entries):
        names = dict.fromkeys(one.label for one in entries)
        found = [of_all_domains([one for one in entries if one.label == name]) for name in names]
        yield Board(found, "", date(folder))
        return
    for column in dict.fromkeys(row.get("column", "") for row in compared.table):
        found = [one for one in entries if one.row.get("column", "") == column]
        yield Board(found, column, date(folder))


def of_all_domains(columns: Sequence[Entry]) -> Entry:
    """A row where each column leaves out another domain: its accuracy on each of them, after their mean."""
    domains = {one.row["column"]: one.row["protocols"][UNSEEN] for one in columns}
    mean = {"mean": mean_of([each["mean"] for each in domains.values()]), "std": None}
    first = columns[0]
    return first._replace(row={**first.row, "column": "", "protocols": {"mean": mean, **domains}})


def section(board: Board) -> str:
    entries = board.entries
    if board.by:
        asked = " and ".join(protocol.name for protocol in board.asked)
        sheet = Sheet(
            f"Protocol{'s' * (len(board.asked) > 1)} {asked}", *lines(entries, board.heads, lambda one: one.unseen)
        )
    else:
        sheet = Sheet("Protocols personal, worst and global", *lines(entries, USUAL, lambda one: one.row))
    notes = [*settings(entries), board.made, *unable(board.asked)]
    return f"## {board.title}\n\n" + markdown([sheet]) + "".join(f"- {note}\n" for note in notes)


def title(entry: Entry) -> str:
    partition = entry.config["partition"]
    alpha = f" (alpha {partition['alpha']:g})" if "alpha" in partition else ""
    return f"{entry.row['dataset']}, {partition['name']}{alpha}, {len(entry.numbers['sites'])} clients"


def lines(
    entries: Sequence[Entry], keys: Sequence[str], numbers: Callable[[Entry], Mapping[str, Any]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads, and a line for each group and each row in it."""
    heads, found, group = ("method", "models", "seeds", *keys, "bytes", "passes"), [], ""
    for one in entries:
        if one.group != group:
            group = one.group
            found.append((f"*{group}*", *[""] * (len(heads) - 1)))
        row = one.row
        scores = (percent(numbers(one).get(key)) for key in keys)
        label = one.label + " (no update used)" * bool(row.get("unused"))
        found.append((label, row["models"], str(row["seeds"]), *scores, size(row["bytes"]), count(row["passes"])))
    return heads, found


def settings(entries: Sequence[Entry]) -> Iterator[str]:
    """On which models, for how long, and with which budget of tuning."""
    used = (one.config["backbone"] for one in entries)
    backbones = dict.fromkeys(each["name"] + ", its image tower" * (each["part"] == "image") for each in used)
    rounds = sorted({one.row["rounds"] for one in entries if one.row["passes"]})
    yield f"Backbones: {'; '.join(backbones)}. Rounds: {', '.join(map(str, rounds))}."
    told = tables.scales([entries[0].row])
    yield f"{told[0][:1].upper()}{told[0][1:]}." if told else "Nothing was tuned: settings are those of the file."


def date(folder: Path) -> str:
    file = folder / "kept.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    said = f"Results of {kept.get('date', 'an unknown date')}, commit {kept.get('commit') or 'unknown'}"
    later: dict[str, list[str]] = {}
    for label, (day, commit) in kept.get("later", {}).items():
        later.setdefault(f"of {day}, commit {commit or 'unknown'}", []).append(label)
    return "; ".join([said, *(f"{made}: {', '.join(labels)}" for made, labels in later.items())]) + "."


def unable(protocols: Sequence[Protocol]) -> Iterator[str]:
    """Which methods of the catalogue cannot serve protocols, by the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in (*METHODS, *ALIASES):
        reasons: dict[str, list[str]] = {}
        for protocol in protocols:
            reasons.setdefault(protocol.why_not(create(name)), []).append(protocol.name)
        for why, unserved in reasons.items():
            found.setdefault((why, " and ".join(unserved)), []).append(name)
    for (why, asked), names in found.items():
        if why:
            yield f"A method cannot serve {asked} if {why}: {', '.join(names)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=KEPT, help="of comparisons")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    given = parser.parse_args()
    try:
        files.write(given.out, page(given.folders).encode())
    except UserError as error:
        raise SystemExit(f"leaderboard: {error}") from None


if __name__ == "__main__":
    main()
