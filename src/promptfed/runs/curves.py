"""Accuracy by round: whether the rows of a comparison were still learning when they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group

from ..errors import UserError
from .api import Result
from .cells import over_seeds, percent
from .sheets import Sheet, flat
from .tables import Fitted, Table

_WIDEST = 8  # rounds in a table for people
# A stage and a metric of its evaluations, and what it is called.
_SHOWN = (
    ("aggregated", ("local", "mean"), "local accuracy in %, mean over clients"),
    ("aggregated", ("global",), "accuracy on all clients' test data in %"),
    ("after_local_all", ("local", "mean"), "local accuracy in % after local training of all clients"),
)


def by_round(results: Mapping[str, Sequence[Result]], rows: Sequence[Table]) -> list[Sheet]:
    """Mean and deviation over seeds at evaluated rounds, in the order of the table's rows: a sheet for each accuracy
    that was recorded."""
    found = []
    ordered = {row["label"]: "reference" in row for row in rows if row["label"] in results}
    for stage, path, title in _SHOWN:
        each = {label: _row([_evaluated(run, stage) for run in results[label]], path) for label in ordered}
        at = _some(sorted({round for row in each.values() for round in row}))
        lines = [(label, *(percent(row.get(round)) for round in at)) for label, row in each.items() if row]
        apart = sum(ordered[label] for label, row in each.items() if row)
        heads = ("method", *(f"round {round}" for round in at))
        found += [Sheet(f"{title}, by round", heads, lines, apart)] if at else []
    if not found:
        raise UserError("--rounds: the rounds of these runs were not kept, only their results")
    return found


def shown(sheets: Sequence[Sheet]) -> Group:
    """In the terminal."""
    return Group(*(Fitted(sheet) for sheet in sheets))


def records(results: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """For programs: a record per row, seed, evaluated round and stage, with accuracies as fractions."""
    stages = dict.fromkeys(stage for stage, _, _ in _SHOWN)
    return [
        {"label": label, "seed": run.numbers["seed"], "round": round, "stage": stage, **flat(summary)}
        for label, runs in results.items()
        for run in runs
        for stage in stages
        for round, summary in _evaluated(run, stage).items()
    ]


def _evaluated(run: Result, stage: str) -> dict[int, Mapping[str, Any]]:
    return {line["round"]: line[stage]["summary"] for line in run.rounds if stage in line}


def _row(runs: Sequence[Mapping[int, Mapping[str, Any]]], path: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Of one metric, at each round that all runs have: with fewer seeds, a mean would be of something else."""
    common = set.intersection(*(set(run) for run in runs))
    each = ((round, over_seeds([run[round] for run in runs], *path)) for round in sorted(common))
    return {round: found for round, found in each if found}


def _some(rounds: Sequence[int]) -> Sequence[int]:
    """As many as a table has room for, evenly spread; the last one always."""
    step = -(-len(rounds) // _WIDEST) or 1
    return rounds[::-1][::step][::-1]
