"""What runs and comparisons have found, as tables: JSON, CSV, Markdown, and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table as Rich
from rich.text import Text

from .. import files, methods
from . import record
from . import sheets as S
from .api import Result
from .cells import count, mean_of, over_seeds, points, rounds, score, size
from .protocols import UNSEEN, accuracies
from .sheets import Sheet
from .shown import PROTOCOLS, SHOWN, USUAL, Asked, across, beside, measured
from .statistics import Column, difference, main_column, on_unseen, one_model

Table = dict[str, Any]
Places = Mapping[str, tuple[str, str]]  # label -> its row and column, in a table with columns
# Below every table of a comparison, for people; the second and third where it has more than one accuracy.
CAPTION = "As aggregated: the models as the server sends them, on test data; ±: sample deviation over seeds."
MODELS = "models: one for all clients, to be compared by global; own, one per client, to be compared by local."
WHOLE = (
    "worst: the worst client; global: all clients' test data; F1: macro, of the same data; val: local on validation "
    "data; trained: after local training."
)
APART = "References, to measure the others by, stand apart and are not ranked."
CEILING = "to ceiling: points of local accuracy to the centralised reference."
WORDS = "ahead, behind: the interval excludes zero. Each holds for its row alone, and for the column that it names."
ONE_SEED = "There is one seed: the intervals are over clients only, and say nothing of other seeds."
ONE_SEED_UNSEEN = "There is one seed: the intervals are over clients or test images, and say nothing of other seeds."
OPTIMISERS = (
    "Optimisers differ: a method's default is that of its paper. For one optimiser in all rows: method.optimizer=adam "
    "method.lr=0.001; to tune every row: --tune 12."
)
REPORT = "Which number to report: docs/concepts.md, What to report."
TITLE = "accuracy in %, of the last round; local: mean over clients"

# Columns of a comparison that are left out where they say this of every method.
_ALIKE = {
    **{
        head: {"-"}
        for head in ("local F1", "global", "global F1", "val", "trained", "common", "newcomers", "to ceiling")
    },
    **{"seeds": {"1"}, "adapt": {"0"}},
}
# Of a narrow terminal, in this order.
_FIRST_OUT = ("global F1", "local F1", "worst", "val", "trained", "seeds", "models")
# Settings of the optimiser: these, and every other learning rate.
_OPTIMISER = ("optimizer", "lr", "momentum", "weight_decay", "cosine_rounds", "epochs", "batch_size")
# Below the numbers of a run.
_MEANING = (
    "local: mean over clients, on their own test data; std, worst: over clients; global: on all clients' test data;",
    "F1: macro, of the same data; val: local on validation data.",
    "To report: aggregated, last, over several seeds (compare --seeds 0,1,2); why: docs/concepts.md, What to report.",
)

_FURTHER: tuple[Column, ...] = ("global", "trained", "newcomers")  # other differences than those of the main column
_AGAINST = ("against", *(f"{column}_against" for column in _FURTHER))
_UNSEEN = "protocols_against"  # on data that nobody has trained on, by column


def table(
    results: Mapping[str, Sequence[Result]],
    places: Places | None = None,
    scale: str = "",
    against: str = "",
    asked: Asked | None = None,
) -> list[Table]:
    """One row per label, references last: mean over the seeds, and their standard deviation where there are several.
    `scale`: what a small scale has to say of itself. `against`: the row whose difference to each other is computed."""
    asked = asked or Asked()
    results = asked.seen(results)
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
                **asked.about(label),
                **({"scale": scale} if scale else {}),
                **({"reference": "ceiling" if kind.centralised else "other"} if kind else {}),
                "models": "one" if main_column(numbers) == "global" else "own",
                "dataset": numbers[0]["dataset"]["name"],
                "rounds": numbers[0]["rounds"],
                "seeds": len(runs),
                "clients": {"local": _clients(last), "after_local": _clients(after)},
                "local": over_seeds(last, "local", "mean"),
                "worst": over_seeds(last, "local", "worst"),
                "global": over_seeds(last, "global"),
                "macro_f1": over_seeds(last, "macro_f1"),
                "global_macro_f1": over_seeds(last, "global_macro_f1"),
                "val": over_seeds(last, "val"),
                "after_local": over_seeds(after, "local", "mean"),
                "common": over_seeds(common, "local", "mean"),
                "newcomers": over_seeds(newcomers, "local", "mean"),
                **measured(numbers),
                "bytes": mean_of([e["up"] + e["down"] for e in each]),
                "parameters_up": mean_of([e["parameters_up"] for e in each]),
                "passes": mean_of([n["passes"]["train"] for n in numbers]),
                "adapt_passes": mean_of([n["passes"]["adapt_last"] for n in numbers]),
                "seconds": mean_of([n["seconds"]["train"] + n["seconds"]["evaluate"] for n in numbers]),
                "settings": _optimiser(numbers[0].get("config", {}).get("method", {})),
            }
        )
    _to_ceiling(found)
    if against:
        _compare(found, results, against)
    return sorted(found, key=lambda row: "reference" in row)


def _to_ceiling(found: Sequence[Table]) -> None:
    """Adds to each row how far it is from the best centralised one of its column."""
    for row in found:
        ceilings = [other["local"] for other in found if other.get("reference") == "ceiling" and _alike(row, other)]
        known = [local["mean"] for local in ceilings if local]
        if known and row["local"]:
            row["to_ceiling"] = row["local"]["mean"] - max(known)


def _compare(found: Sequence[Table], results: Mapping[str, Sequence[Result]], against: str) -> None:
    """Adds to each row its difference to the row of this name in its column."""
    for row in found:
        base = next((o["label"] for o in found if name(o) == against and o is not row and _alike(row, o)), None)
        if base is not None:
            ours, theirs = ([run.numbers for run in results[label]] for label in (row["label"], base))
            paired = difference(ours, theirs)
            row["against"] = {"row": base, **(paired.complete() if paired else {"word": "cannot be paired"})}
            mixed = one_model(ours[0]) != one_model(theirs[0])  # own models win on own data, one model on all data
            for column in _FURTHER if mixed else _FURTHER[1:]:
                if also := difference(ours, theirs, column):
                    row[f"{column}_against"] = {"row": base, **also.complete()}
            tested = {column: on_unseen(ours, theirs, column) for column in row.get(PROTOCOLS, ())}
            if unseen := {column: {"row": base, **one.complete()} for column, one in tested.items() if one}:
                row[_UNSEEN] = unseen
            if UNSEEN in unseen:  # the same accuracies, without what the choice of images adds
                row.pop("newcomers_against", None)


def name(row: Table) -> str:
    """Of a row, without that of its column."""
    return str(row.get("row", row["label"]))


def _optimiser(settings: Table) -> Table:
    return {key: value for key, value in settings.items() if key in _OPTIMISER or key.endswith("_lr")}


def _alike(row: Table, other: Table) -> bool:
    return (row.get("column"), row["dataset"]) == (other.get("column"), other["dataset"])


def _last(metrics: Mapping[str, Any], *stages: str) -> Table | None:
    """The last round of the first of these stages that the run has."""
    return next((metrics[stage]["last"] for stage in stages if stage in metrics), None)


def _clients(found: Sequence[Mapping[str, Any] | None]) -> Table | None:
    """How many clients a number is the mean of, and of how many; of several seeds, where they were fewest."""
    known = [(m["clients"], m["of"]) for m in found if m and "of" in m]
    return dict(zip(("n", "of"), min(known), strict=True)) if known else None


HEADERS = (
    *("method", "models", "seeds", "local", "worst", "local F1", "global", "global F1", "val"),
    *("trained", "common", "newcomers", "to ceiling"),
)
_SCORES = ("local", "worst", "macro_f1", "global", "global_macro_f1", "val", "after_local", "common", "newcomers")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row's accuracies for people, in per cent."""
    scores = (score(row, key) for key in _SCORES)
    label = f"{row['label']} (no update used)" if row.get("unused") else row["label"]
    return (label, row["models"], str(row["seeds"]), *scores, points(row.get("to_ceiling")))


def sheets(rows: Sequence[Table]) -> list[Sheet]:
    """A comparison for people: its accuracies, also on unseen data, the differences to a row, and what they cost."""
    show = rows[0].get("show", ())
    wide = [Sheet(SHOWN[key][1], *_placed(rows, key)) for key in show or USUAL if across(rows, key)]
    more = beside(rows, (key for key in show if key not in _SCORES))
    lines = [(*cells(row), *(column[i + 1] for column in more)) for i, row in enumerate(rows)]
    heads = (*HEADERS, *(column[0] for column in more))
    whole = Sheet(TITLE, heads, lines, sum("reference" in row for row in rows)).without(_ALIKE)
    return [*wide, whole, *generalisation(rows), *differences(rows), cost(rows)]


def generalisation(rows: Sequence[Table]) -> list[Sheet]:
    """Accuracies on what nobody has trained on; none where no protocol was asked for."""
    columns = beside(rows, [PROTOCOLS])
    lines = [(row["label"], *(column[i + 1] for column in columns)) for i, row in enumerate(rows)]
    heads = ("method", *(column[0] for column in columns))
    return [Sheet(SHOWN[PROTOCOLS][1], heads, lines, sum("reference" in row for row in rows))] if columns else []


def _placed(rows: Sequence[Table], key: str) -> tuple[tuple[str, ...], list[tuple[str, ...]], int]:
    heads, *lines = across(rows, key)
    return heads, lines, len({row["row"] for row in rows if "reference" in row and "column" in row})


def differences(rows: Sequence[Table]) -> list[Sheet]:
    """To the row that the comparison is against; none where there is no such row."""
    compared = [row for row in rows if "against" in row]
    each = [(row, row[key]) for key in _AGAINST for row in compared if key in row]
    unseen = dict.fromkeys(column for row in compared for column in row.get(_UNSEEN, ()))
    each += [(row, row[_UNSEEN][column]) for column in unseen for row in compared if column in row.get(_UNSEEN, ())]
    each.sort(key=lambda one: "reference" in one[0])
    lines = []
    for row, found in each:
        if "mean" in found:
            ends = f"[{points(found['low'])}, {points(found['high'])}]"
            told = (found["column"], points(found["mean"]), ends, found["word"], found["seeds"], found["clients"])
        else:
            told = ("-", "-", "-", found["word"], "-", "-")
        lines.append((row["label"], *map(str, told)))
    names = {row["label"]: name(row) for row in rows}
    bases = dict.fromkeys(names.get(row["against"]["row"], row["against"]["row"]) for row in compared)
    over = "clients" if all(row["against"].get("seeds", 1) == 1 for row in compared) else "seeds and clients"
    protocols = any(PROTOCOLS in row for row in rows)
    seen = ", on data of the kind that was trained on" if protocols and not unseen else ""
    over += "; novel classes, other datasets and an unseen domain: also over test images" if unseen else ""
    title = f"differences to {' / '.join(bases)} in points{seen}, paired by seed and client; bootstrap over {over}"
    heads = ("method", "column", "difference", "95 % interval", "", "seeds", "clients")
    return [Sheet(title, heads, lines, sum("reference" in row for row, _ in each))] if lines else []


def cost(rows: Sequence[Table]) -> Sheet:
    """Bytes and passes; and the settings of the optimiser that are not the same in every row."""
    differ = differing(rows)
    lines = [
        (
            *(row["label"], size(row["bytes"]), count(row["passes"]), count(row["adapt_passes"])),
            *(str(row["settings"].get(key, "-")) if row["passes"] else "-" for key in differ),
        )
        for row in rows
    ]
    title = "bytes per client and round, sample passes" + (", and settings that differ" if differ else "")
    heads = ("method", "bytes", "passes", "adapt", *differ)
    return Sheet(title, heads, lines, sum("reference" in row for row in rows)).without(_ALIKE)


def differing(rows: Sequence[Table]) -> list[str]:
    """Settings of the optimiser that are not the same in every row."""
    ranked = [row["settings"] for row in rows if "reference" not in row]
    keys = dict.fromkeys(key for settings in ranked for key in settings)
    return [key for key in keys if len({str(settings.get(key)) for settings in ranked}) > 1]


def notes(rows: Sequence[Table], whole: bool = True) -> list[str]:
    """What is to be known of the numbers, below the tables. `whole`: they have more than one accuracy."""
    all_ = [one for row in rows for one in (row.get("against", {}), *row.get(_UNSEEN, {}).values())]
    paired = [one for one in all_ if "mean" in one]
    told = {
        CAPTION: True,
        MODELS: whole,
        WHOLE: whole,
        APART: any("reference" in row for row in rows),
        CEILING: whole and any("to_ceiling" in row for row in rows),
        WORDS: bool(paired),
        OPTIMISERS: whole and "optimizer" in differing(rows) and "tuned" not in rows[0].get("scale", ""),
        ONE_SEED_UNSEEN if any(_UNSEEN in row for row in rows) else ONE_SEED: bool(paired)
        and all(found["seeds"] == 1 for found in paired),
        REPORT: True,
    }
    return [text for text, said in told.items() if said]


def scales(rows: Sequence[Table]) -> list[str]:
    """What the scale of a comparison has to say of itself."""
    return [rows[0]["scale"]] if "scale" in rows[0] else []


def records(rows: Iterable[Table]) -> list[Table]:
    """For programs: one level of names, accuracies as fractions, counts as whole numbers."""
    whole = ("bytes", "parameters_up", "passes", "adapt_passes")
    told = ({key: value for key, value in row.items() if key not in ("show", "view")} for row in rows)
    return [S.flat({**row, **{key: round(row[key]) for key in whole}}) for row in told]


def save(
    results: Mapping[str, Sequence[Result]],
    out: Path,
    places: Places | None = None,
    scale: str = "",
    against: str = "",
    asked: Asked | None = None,
) -> list[Table]:
    """table.json, table.csv and table.md."""
    found = table(results, places, scale, against, asked)
    files.write(out / "table.json", (json.dumps(found, indent=1) + "\n").encode())
    files.write(out / "table.csv", S.csv_of(records(found)).encode())
    files.write(out / "table.md", S.markdown(sheets(found), scales(found), notes(found)).encode())
    return found


# ---- in the terminal


@dataclass(frozen=True)
class Fitted:
    """A sheet that leaves columns out where the terminal is too narrow for all."""

    sheet: Sheet
    width: int = 14  # of the labels, at least
    fold: bool = False  # any column

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sheet, gone = self.sheet, []
        for head in _FIRST_OUT:
            if self._needs(sheet) > options.max_width and head in sheet.heads:
                sheet = sheet.only([i for i, other in enumerate(sheet.heads) if other != head])
                gone.append(head)
        shown = Rich(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
        for i, head in enumerate(sheet.heads):
            least = self._label(sheet) if i == 0 else None
            side: Literal["left", "right"] = "right" if i and head else "left"
            shown.add_column(head, justify=side, min_width=least, overflow="fold", no_wrap=bool(i) and not self.fold)
        for part in sheet.parts:
            for line in part:
                shown.add_row(*line, end_section=line is part[-1])
        yield Text(sheet.title)
        yield shown
        if gone:
            yield Text(f"not shown for lack of width, see table.md: {', '.join(gone)}\n")

    def _label(self, sheet: Sheet) -> int:
        return min(self.width, max(len(line[0]) for line in sheet.lines))

    def _needs(self, sheet: Sheet) -> int:
        columns = list(zip(sheet.heads, *sheet.lines, strict=True))[1:]
        return self._label(sheet) + sum(1 + max(map(len, column)) for column in columns)


def comparison(rows: Sequence[Table]) -> Group:
    """The tables of a comparison; where it has columns, as a paper prints it. Title and caption are as wide as the
    terminal, not as the table."""
    each = sheets(rows)
    wide = "column" in rows[0]
    shown = sum(bool(across(rows, key)) for key in rows[0].get("show", ()))
    first = replace(each[0], title="\n".join([each[0].title if shown else TITLE, *scales(rows)]))
    more = [*each[1:shown], *differences(rows)] if wide else each[1:]
    caption = Text("\n".join(notes(rows, whole=not wide)))
    return Group(Fitted(first, 22 if wide else 14, fold=wide), *(Fitted(sheet) for sheet in more), caption)


def outcome(numbers: dict[str, Any]) -> Group:
    """The numbers of one run."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    shown = Rich()
    for header in ("", "round", "clients", "local", "std", "worst", "local F1", "global", "global F1", "val"):
        shown.add_column(header, justify="left" if not header else "right")
    for stage, found in numbers["metrics"].items():
        for name, m in found.items():
            at = m.get("rounds") or [m["round"]]
            when = "-".join(dict.fromkeys((str(at[0]), str(at[-1]))))
            who = f"{round(m['clients'], 1):g}" + (f" of {m['of']}" if "of" in m else "")
            local = (m["local"]["mean"], m["local"]["std"], m["local"]["worst"], m["macro_f1"])
            scores = (*local, m["global"], m.get("global_macro_f1"), m["val"])
            row = (when, who, *(percent(value) for value in scores))
            shown.add_row(f"{stage}, {name}".replace("_", " "), *row)
    each = numbers["communication"]["per_client_and_round"]
    title = f"{numbers['method']}, seed {numbers['seed']}, {rounds(numbers['rounds'])}"
    spent = max(sum(numbers["seconds"].values()), 1e-9)
    cost = (
        f"per client and round: {size(each['up'])} up, {size(each['down'])} down; "
        f"{numbers['passes']['train']:,} sample passes; "
        f"{spent:.0f} s, {numbers['seconds']['evaluate'] / spent:.0%} of it evaluation"
    )
    told = [
        f"{key.replace('_', ' ')} {value:.3g}" for key, value in numbers.get("server", {}).items() if value is not None
    ]
    tested = ", ".join(f"{head} {percent(value)}" for head, value in accuracies(numbers).items())
    unseen = [f"on what nobody has trained on: {tested}"] if tested else []
    server = [f"on the server: {', '.join(told)}"] if told else []
    return Group(Text(title), shown, Text("\n".join((*unseen, cost, *server, *_MEANING))))
