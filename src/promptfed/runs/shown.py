"""What a comparison file may ask of its tables: the numbers that they have (compare.show), and rows with another model
of runs that are there already (compare.views)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError, unknown
from . import record
from .api import Result
from .cells import mean_of, over_seeds, percent, points, score
from .protocols import UNSEEN, accuracies
from .rows import Row

Numbers = Mapping[str, Any]  # result.json of a run
PROTOCOLS = "protocols"
TEN = f"mean_of_last_{record.LAST}"
# By the key in table.json: the head of a column, and what the title of a table with columns says.
SHOWN = {
    "local": ("local", "accuracy in %, local: mean over clients"),
    "worst": ("worst", "accuracy in %, worst client"),
    "global": ("global", "accuracy in %, all clients' test data"),
    "macro_f1": ("local F1", "macro F1 in %, mean over clients"),
    "global_macro_f1": ("global F1", "macro F1 in %, all clients' test data"),
    "weighted": ("weighted", "accuracy in %, mean over all clients' test samples"),
    "spread": ("spread", "standard deviation over clients of their accuracies in %"),
    "local_of_last_10": ("local, last 10", "accuracy in %, local: mean over clients and the last ten rounds"),
    "worst_of_last_10": ("worst, last 10", "accuracy in %, worst client, mean of the last ten rounds"),
    "global_of_last_10": ("global, last 10", "accuracy in %, all clients' test data, mean of the last ten rounds"),
    "domains": ("", "accuracy in %, by domain or site"),
    "common": ("common", "accuracy in %, the model that clients have in common"),
    "diff": ("diff", "points from the clients' own models to the one in common"),
    "newcomers": ("newcomers", "accuracy in %, clients that came later"),
    "clustering": ("clustering", "clustering accuracy in %"),
    UNSEEN: ("unseen", "accuracy in %, the domain that is left out of training; mean: over domains"),
    PROTOCOLS: ("", "accuracy in % of the final models on what nobody has trained on"),
    "parameters_up": ("parameters", "parameters that a client sends per round"),
}
USUAL = ("local", "worst", "global", "macro_f1")  # of tables with columns


@dataclass(frozen=True)
class View:
    """A row that shows the models of another stage of a row's runs."""

    label: str
    of: str  # the label of that row
    stage: str
    place: tuple[str, str] = ("", "")  # where a table with columns has it

    def results(self, runs: Iterable[Result]) -> list[Result]:
        """Those runs that have the stage, as if it were what the server sends."""
        found = []
        for run in runs:
            numbers, stage = run.numbers, self.stage
            if stage in numbers["metrics"]:
                metrics, clients = ({"aggregated": numbers[part][stage]} for part in ("metrics", "clients"))
                found.append(replace(run, numbers={**numbers, "metrics": metrics, "clients": clients}))
        return found


@dataclass(frozen=True)
class Asked:
    show: tuple[str, ...] = ()
    views: tuple[View, ...] = ()

    def seen(self, results: Mapping[str, Sequence[Result]]) -> dict[str, Sequence[Result]]:
        """The results by label, with those of views."""
        views = {view.label: view.results(results[view.of]) for view in self.views if view.of in results}
        return {**results, **{label: runs for label, runs in views.items() if runs}}

    def about(self, label: str) -> dict[str, Any]:
        """What a row of table.json says of it."""
        views = [{"of": view.of, "stage": view.stage} for view in self.views if view.label == label]
        return {**({"view": views[0]} if views else {}), **({"show": list(self.show)} if self.show else {})}

    @classmethod
    def told(cls, rows: Sequence[Mapping[str, Any]]) -> Asked:
        """Read back from the rows of table.json."""
        show = tuple(rows[0].get("show", ())) if rows else ()
        return cls(show, tuple(View(row["label"], **row["view"]) for row in rows if "view" in row))


def wanted(spec: Mapping[str, Any], rows: Sequence[Row]) -> Asked:
    """What a [compare] table asks for, given the rows that are run."""
    show = spec.get("show", [])
    if not isinstance(show, list):
        raise UserError(f"compare.show = {show!r} must be a list (allowed in it: {', '.join(SHOWN)})")
    for key in show:
        if key not in SHOWN:
            raise unknown("compare.show", str(key), SHOWN)
    views = []
    for table in spec.get("views", ()):  # of rows that are not run now there is nothing to see
        if set(table) != {"label", "of", "stage"}:
            raise UserError(f"compare.views: each needs label, of and stage, and nothing else; got {', '.join(table)}")
        if table["stage"] not in record.STAGES:
            raise unknown("compare.views: stage", str(table["stage"]), record.STAGES)
        names = [row.get("label") for row in spec.get("rows", ())]
        if table["of"] not in names:
            raise unknown("compare.views: of", str(table["of"]), [name for name in names if name])
        for row in rows:
            name, column = row.place if row.place[1] else (row.label, "")
            if name == table["of"]:
                label = f"{table['label']}, {column}" if column else table["label"]
                views.append(View(label, row.label, table["stage"], (table["label"], column) if column else ("", "")))
    if twice := {view.label for view in views} & {row.label for row in rows}:
        raise UserError(f'compare.views: "{min(twice)}" is the label of a row already')
    return Asked(tuple(show), tuple(views))


# ---- numbers


def measured(runs: Sequence[Numbers]) -> dict[str, Any]:
    """Numbers of a row besides the usual ones, over its seeds: those that its runs have."""
    last, ten = ([run["metrics"]["aggregated"].get(kind) for run in runs] for kind in ("last", TEN))
    domains, unseen = [_by_domain(run) for run in runs], [accuracies(run) for run in runs]
    found = {
        "weighted": over_seeds(last, "local", "weighted"),
        "spread": over_seeds(last, "local", "std"),
        "local_of_last_10": over_seeds(ten, "local", "mean"),
        "worst_of_last_10": over_seeds(ten, "local", "worst"),
        "global_of_last_10": over_seeds(ten, "global"),
        "clustering": over_seeds(last, "clustering"),
        "diff": over_seeds([_to_common(run) for run in runs], "diff"),
        "domains": {name: over_seeds(domains, name) for name in dict.fromkeys(n for each in domains for n in each)},
        UNSEEN: over_seeds(unseen, UNSEEN),
        PROTOCOLS: {head: over_seeds(unseen, head) for head in dict.fromkeys(n for each in unseen for n in each)},
    }
    return {key: value for key, value in found.items() if value}


def _to_common(run: Numbers) -> dict[str, float]:
    """How far the model in common is ahead of the clients' own, if there is one."""
    if "common" not in run["metrics"]:
        return {}
    own, common = (run["metrics"][stage]["last"]["local"]["mean"] for stage in ("aggregated", "common"))
    return {} if own is None or common is None else {"diff": common - own}


def _by_domain(run: Numbers) -> dict[str, float]:
    """The mean accuracy of each domain's clients where the split is by domain; of each site where sites are given."""
    if run.get("config", {}).get("partition", {}).get("name") not in ("domain", "sites"):
        return {}
    names = {site["client"]: site["name"] for site in run["sites"]}
    held: dict[str, list[float]] = defaultdict(list)
    for row in run["clients"]["aggregated"]:
        if row["accuracy"] is not None:
            name = names[row["client"]]
            base = name.rpartition("-")[0]  # of several clients: domain-0, domain-1, ...
            held[base if f"{base}-0" in names.values() else name].append(row["accuracy"])
    return {name: mean_of(accuracies) for name, accuracies in held.items()}


# ---- as text


def cells(row: Mapping[str, Any], key: str) -> dict[str, str]:
    """A number of a row as text; by domain where it has several."""
    if key in ("domains", PROTOCOLS):
        return {name: percent(accuracy) for name, accuracy in row.get(key, {}).items()}
    if key == "parameters_up":
        return {"": f"{round(row[key]):,}"}
    if key == "diff":
        return {"": points(row[key]["mean"] if key in row else None)}
    return {"": score(row, key) if row.get(key) else "-"}


def across(found: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, ...]]:
    """One number as a paper prints it: heads, then a line for each method with its columns beside each other. Empty
    where the comparison has no columns, or none with this number."""
    placed = [row for row in found if "column" in row]
    columns, rows = (list(dict.fromkeys(row[part] for row in placed)) for part in ("column", "row"))
    held = {(row["row"], row["column"]): cells(row, key) for row in placed}
    heads = [
        (column, part)
        for column in columns
        for part in dict.fromkeys(part for (_, at), texts in held.items() if at == column for part in texts)
    ]
    lines = [(row, *(held.get((row, column), {}).get(part, "-") for column, part in heads)) for row in rows]
    titles = [f"{column}: {part}" if part else column for column, part in heads]
    if key == UNSEEN:
        titles, lines = [*titles, "mean"], [(*line, _over_columns(placed, line[0])) for line in lines]
    return [("method", *titles), *lines] if heads else []


def _over_columns(placed: Sequence[Mapping[str, Any]], row: str) -> str:
    """The mean over the domains that are left out, if all of them are done."""
    known = [one[UNSEEN]["mean"] for one in placed if one["row"] == row and one.get(UNSEEN)]
    done = len(known) == len({one["column"] for one in placed})
    return percent({"mean": mean_of(known), "std": None}) if done else "-"


def beside(found: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> list[tuple[str, ...]]:
    """Columns of a table without columns of its own: a head, and a cell for each row."""
    made = []
    for key in keys:
        each = [cells(row, key) for row in found]
        for part in dict.fromkeys(part for texts in each for part in texts):
            made.append((part or SHOWN[key][0], *(texts.get(part, "-") for texts in each)))
    return made
