"""Writes docs/leaderboard.md from recorded comparisons: all methods, grouped by what they tune.

python scripts/leaderboard.py [experiments/leaderboard/NAME ...] [--out docs/leaderboard.md]

A folder is that of a comparison, or what scripts/keep_results.py has kept of one; by default all that are kept in
experiments/leaderboard. Each has a section (in a comparison with columns, one per column) with a table per protocol.
Domains that are left out in turn share a table.
"""

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from evidence import shown

from promptfed import files
from promptfed.data.catalogue import CATALOGUE
from promptfed.errors import UserError
from promptfed.method import Method
from promptfed.methods import ALIASES, METHODS, create
from promptfed.methods.overview import REFERENCES, family
from promptfed.models import BACKBONES, resize
from promptfed.runs import comparison, tables
from promptfed.runs.cells import count, mean_of, percent, size
from promptfed.runs.protocols import PROTOCOLS, UNSEEN, Protocol, wanted
from promptfed.runs.sheets import Sheet, markdown
from promptfed.runs.shown import Asked
from promptfed.runs.statistics import Column, Difference, Numbers, difference, on_unseen
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
RANKED = {"one": "global", "own": "local"}  # by the kind of models
# What rows are compared with: the first of these methods that a board has.
BASES = {"one": ("class-mean",), "own": ("local+head", "local")}
BASES_UNSEEN = ("class-mean", "zero-shot")
MEAN = "mean"  # over domains that are left out in turn
GLANCE = ("federation", "models, column", "highest rows", "ahead of the reference", "references, in the same column")
HIGHEST = 3  # rows that are named at a glance
SCORES = ("accuracy", "macro_f1", "global_accuracy")  # that follow from predictions on test data


class Entry(NamedTuple):
    """A row of a comparison."""

    row: tables.Table  # of table.json
    method: Method
    numbers: Numbers  # of its first run
    runs: Sequence[Numbers]

    @property
    def config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.numbers["config"]
        return found

    @property
    def label(self) -> str:
        """As the comparison has it; with what is tuned where that is not what the method brings."""
        name = tables.name(self.row)
        return self.config["method"]["name"] if name in (*METHODS, *ALIASES) else name

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
        found = self.score(key or RANKED[self.row["models"]])
        return own, -found["mean"] if found else 0.0

    def score(self, key: str) -> Any:
        """Over seeds, on what nobody has trained on or on the clients' test data."""
        return self.row[key] if key in USUAL else self.unseen.get(key)


@dataclass(frozen=True)
class Board:
    """A column of a comparison, or all of one without columns."""

    rows: Sequence[Entry]
    column: str
    made: str  # when, and by which code
    splits: Sequence[Numbers]  # a run of each split: several if domains are left out in turn

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

    @property
    def kinds(self) -> Mapping[str, Column]:
        """The column that ranks, by what it ranks."""
        return {"all": self.by} if self.by else RANKED

    def kind(self, one: Entry) -> str:
        return "all" if self.by else one.row["models"]

    def base(self, kind: str) -> Entry | None:
        """The row that the others of a kind are compared with."""
        held = {one.config["method"]["name"]: one for one in reversed(self.rows)}
        return next((held[name] for name in BASES.get(kind, BASES_UNSEEN) if name in held), None)

    @cached_property
    def differences(self) -> Mapping[str, Difference | None]:
        """Of each row to the reference of its kind, by label; None where it cannot be computed."""
        return {one.row["label"]: self._difference(one) for one in self.rows}

    def _difference(self, one: Entry) -> Difference | None:
        base, column = self.base(self.kind(one)), self.kinds[self.kind(one)]
        if base is None or base is one:
            return None
        if column in (*USUAL, NEWCOMERS, MEAN):
            return difference(one.runs, base.runs, NEWCOMERS if column == MEAN else column)
        return on_unseen(one.runs, base.runs, column)

    def ranked(self, kind: str) -> list[Entry]:
        """The methods of a kind, whatever they tune, without references."""
        column, base = self.kinds[kind], self.base(kind)
        able = [one for one in self.rows if self.kind(one) == kind and one.score(column)]
        able.sort(key=lambda one: -one.score(column)["mean"])
        return [one for one in able if not one.method.reference and one is not base]

    def words(self, kind: str) -> Counter[str]:
        """What the intervals of these allow to say, and how often."""
        found = (self.differences[one.row["label"]] for one in self.ranked(kind))
        return Counter(each.word for each in found if each)


def page(folders: Sequence[Path]) -> str:
    found = [board for folder in folders for board in boards(folder)]
    if not found:
        return HEAD + EMPTY
    seen, unseen = ([board for board in found if bool(board.by) is new] for new in (False, True))
    glance = [
        Sheet(f"At a glance{about}", GLANCE, lines)
        for about, some in (("", seen), (", on what nobody has trained on", unseen))
        if (lines := [line for board in some for line in overview(board)])
    ]
    sections = "".join(f"\n{section(board)}" for board in (*seen, *unseen))
    return f"{HEAD}\n{reading(found)}\n{markdown(glance)}{sections}"


def reading(found: Sequence[Board]) -> str:
    """What the intervals allow to say."""
    words = sum((board.words(kind) for board in found for kind in board.kinds), Counter[str]())
    text = f"""Differences are in points, to a simple reference that the head of their column names, with a 95 %
    interval over seeds and clients (over domains where these are left out in turn), and over test images where the
    same ones score all models. Bold: the interval excludes zero; ¹: one seed, of other seeds it says nothing.
    Of {words.total()} such differences of methods, {words["ahead"]} are above zero (ahead) and {words["behind"]} below
    (behind); for the others these data do not tell whether the method or its reference is more accurate. Each interval
    holds for its row alone: if no method differed from its reference, about one in forty would still seem ahead, and
    the highest of many rows are highest in part by luck. Ranks of rows whose intervals overlap mean nothing."""
    return textwrap.fill(" ".join(text.split()), 120) + "\n"


def overview(board: Board) -> Iterator[tuple[str, ...]]:
    """The highest rows of each kind, whatever they tune, beside references in the same column."""
    for kind, column in board.kinds.items():
        base, rows, words = board.base(kind), board.ranked(kind), board.words(kind)
        references = [one for one in board.entries if one.method.reference or one is base]
        references.sort(key=lambda one: one is not base)
        told = "-"
        if base and words:
            told = f"{words['ahead']} of {words.total()} rows ahead of `{base.label}`, {words['behind']} behind"
        yield board.title, f"{kind}, {column}", named(rows[:HIGHEST], column), told, named(references, column)


def named(entries: Iterable[Entry], column: Column) -> str:
    return ", ".join(f"{one.label} {percent(one.score(column))}" for one in entries if one.score(column)) or "-"


def boards(folder: Path) -> Iterator[Board]:
    compared = comparison.read(folder)
    results = Asked.told(compared.table).seen(compared)
    entries = []
    for row in compared.table:
        runs = [run.numbers for run in results[row["label"]]]
        if "config" not in runs[0]:
            raise UserError(f'"{folder}": the results of "{row["label"]}" do not say their settings')
        entries.append(Entry(row, create(runs[0]["config"]["method"]["name"]), runs[0], runs))
    if all(one.config["eval"]["leave_out"] == one.row.get("column") for one in entries):
        names = dict.fromkeys(one.label for one in entries)
        columns = [[one for one in entries if one.label == name] for name in names]
        splits = [one.numbers for one in max(columns, key=len)]
        yield Board([of_all_domains(each) for each in columns], "", date(folder), splits)
        return
    for column in dict.fromkeys(row.get("column", "") for row in compared.table):
        found = [one for one in entries if one.row.get("column", "") == column]
        yield Board(found, column, date(folder), [found[0].numbers])


def of_all_domains(columns: Sequence[Entry]) -> Entry:
    """A row where each column leaves out another domain: its accuracy on each of them, after their mean."""
    domains = {one.row["column"]: one.row["protocols"][UNSEEN] for one in columns}
    mean = {"mean": mean_of([each["mean"] for each in domains.values()]), "std": None}
    first, row = columns[0], {**columns[0].row, "column": "", "protocols": {MEAN: mean, **domains}}
    by_seed = [{run["seed"]: run for run in one.runs} for one in columns]
    seeds = [seed for seed in by_seed[0] if all(seed in runs for runs in by_seed)]
    return first._replace(row=row, runs=[joined([runs[seed] for runs in by_seed]) for seed in seeds])


def joined(runs: Sequence[Numbers]) -> Numbers:
    """Runs that leave out a domain each as one, where each domain is a client that never trains."""
    scored = [
        {"client": run["config"]["eval"]["leave_out"], "n_test": found["images"], "accuracy": found["accuracies"][0]}
        for run in runs
        if (found := run["protocols"].get("scored", {}).get(UNSEEN))
    ]
    seen = [row for run in runs for row in run["clients"]["aggregated"]]
    return {**runs[0], "clients": {"aggregated": seen, "newcomers_aggregated": scored}}


def section(board: Board) -> str:
    about = "Protocols personal, worst and global"
    if board.by:
        about = f"Protocol{'s' * (len(board.asked) > 1)} {' and '.join(protocol.name for protocol in board.asked)}"
    entries = board.entries
    notes = [*settings(entries), board.made, *naming(entries), *equal(entries), *unable(board.asked)]
    table = markdown([Sheet(about, *lines(board))])
    return f"## {board.title}\n\n{images(board)}\n\n{table}" + "".join(f"- {note}\n" for note in notes)


def title(entry: Entry) -> str:
    partition, side = entry.config["partition"], pixels(entry.config)
    alpha = f" (alpha {partition['alpha']:g})" if "alpha" in partition else ""
    at = f" at {side} px" if side else ""
    return f"{entry.row['dataset']}{at}, {partition['name']}{alpha}, {len(entry.numbers['sites'])} clients"


def pixels(config: Mapping[str, Any]) -> int | None:
    """Pixels of an image, in each direction, where the settings tell."""
    side: int | None = config["dataset"]["size"]
    backbone, entry = config["backbone"]["name"], CATALOGUE.get(config["dataset"]["name"])
    if side or not entry or backbone not in BACKBONES:
        return side
    published = resize(backbone)
    return published.size[0] if published else entry.size


def images(board: Board) -> str:
    """How many there are, in all and at a client; a span where splits differ."""
    trained, late = (
        [[site for site in run["sites"] if (site["client"] in run["newcomers"]) is new] for run in board.splits]
        for new in (False, True)
    )
    train, val = (span(sum(site[key] or 0 for site in sites) for sites in trained) for key in ("n_train", "n_val"))
    side = pixels(board.rows[0].config)
    of = f" of {side} x {side} pixels" if side else ""
    text = f"Images{of}: {train} to train on, {val} for validation, {tests(trained)}."
    if any(late):
        text += f" Clients that never train: {tests(late)}."
    scored = board.splits[0].get("protocols", {}).get("scored", {})
    new = [f"{found['images']} of {name}" for name, found in scored.items() if name not in ("base", UNSEEN)]
    return text + (f" Also tested on: {', '.join(new)}." if new else "")


def tests(splits: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """How many test images clients have together, and the smallest and the largest test set."""
    counts = [[site["n_test"] or 0 for site in sites] for sites in splits]
    return f"{span(map(sum, counts))} to test on ({span(n for each in counts for n in each)} per client)"


def span(counts: Iterable[int]) -> str:
    ends = sorted(counts)
    return " to ".join(dict.fromkeys(map(str, (ends[0], ends[-1]))))


def lines(board: Board) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads, and a line for each group and each row in it."""
    keys = board.heads if board.by else USUAL
    heads, found, group = ("method", "models", "seeds", *keys, minus(board), "bytes", "passes"), [], ""
    for one in board.entries:
        if one.group != group:
            group = one.group
            found.append((f"*{group}*", *[""] * (len(heads) - 1)))
        row, scores = one.row, (percent(one.score(key)) for key in keys)
        label = one.label + " (no update used)" * bool(row.get("unused"))
        costs = (size(row["bytes"]), count(row["passes"]))
        found.append((label, row["models"], str(row["seeds"]), *scores, apart(board, one), *costs))
    return heads, found


def minus(board: Board) -> str:
    """The head of the column of differences: which reference, and by which accuracy."""
    bases = {kind: board.base(kind) for kind in board.kinds}
    told = ((kind, f"{board.kinds[kind]} minus `{base.label}`") for kind, base in bases.items() if base)
    return "; ".join(text if board.by else f"{kind}: {text}" for kind, text in told) or "difference"


def apart(board: Board, one: Entry) -> str:
    """Its difference, as a cell."""
    found = board.differences[one.row["label"]]
    return "reference" if one is board.base(board.kind(one)) else shown(found) if found else "-"


def naming(entries: Sequence[Entry]) -> Iterator[str]:
    """The names of rows where the page says what is tuned besides."""
    names = {one.label: tables.name(one.row) for one in entries}
    added = dict.fromkeys(label.removeprefix(name) for label, name in names.items() if label != name)
    whole = [label for label, name in names.items() if label == name and label.endswith(tuple(added))]
    if added:
        rules = ", ".join(f"`X{end}` is `X`" for end in added)
        but = f", but `{'`, `'.join(whole)}` {'have' if len(whole) > 1 else 'has'} the name shown" if whole else ""
        yield f"In files and `--against`, {rules}{but}."


def equal(entries: Sequence[Entry]) -> Iterator[str]:
    """Rows whose models made equally good predictions at every client and seed."""
    found: dict[str, list[str]] = {}
    for one in (one for one in entries if one.runs):
        scores = json.dumps([predicted(run) for run in sorted(one.runs, key=lambda run: run["seed"])])
        found.setdefault(scores, []).append(one.label)
    groups = "; ".join(", ".join(labels) for labels in found.values() if len(labels) > 1)
    if groups:
        yield f"Equal in every prediction-level number on test data, of all clients and seeds: {groups}."


def predicted(run: Numbers) -> list[Any]:
    """What follows from a run's predictions on test data."""
    stages = {stage: run["clients"].get(stage, ()) for stage in ("aggregated", "newcomers_aggregated")}
    scores = {stage: [[row.get(key) for key in SCORES] for row in rows] for stage, rows in stages.items()}
    return [run["seed"], scores, run.get("protocols")]


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
