"""Several methods and seeds on the same partition, in one table.

Each row is a configuration of its own: the common settings with the row's own over them. Every (row, seed) is an
ordinary run in a folder of its own, so an interrupted comparison goes on where it stopped, and the same command started
twice shares the work: each process takes the runs that nobody else holds.

A table of several columns (datasets, splits, backbones) has [[compare.columns]]: settings under those of the rows, each
row with each column. A file may have a small scale besides: [mini] holds settings that go over everything, and so does
`mini` in a column or a row, over those; mini = false leaves it out there. Of [mini.method] and [mini.partition] each
run takes what it has.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import config as C
from . import methods as M
from . import tables
from .api import Result, execute, without_compare
from .data import PARTITIONS
from .errors import UserError, nearest
from .record import Busy, View

Table = dict[str, Any]


@dataclass(frozen=True)
class Row:
    label: str
    settings: Table
    seeds: tuple[int, ...]
    column: Table = field(default_factory=dict)  # over the file's settings, under those that are given
    mini: tuple[Table, ...] = ()  # over everything, each over the ones before it
    place: tuple[str, str] = ("", "")  # where a table with columns has it: the labels of its row and column

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


@dataclass(frozen=True)
class Job:
    row: Row
    seed: int
    config: C.Config
    folder: Path


def rows(
    spec: Mapping[str, Any],
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    mini: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The rows of a [compare] table, or one for each method named; in every column. `mini`: the file's [mini]."""
    for key in spec:
        if key not in ("seeds", "rows", "columns"):
            raise UserError(f"compare.{key} is not a setting (allowed: seeds, rows, columns)")
    over = {key: value for key, value in (mini or {}).items() if key != "seeds"}
    default = _seeds(seeds or (spec if mini is None else mini).get("seeds", (0,)))
    columns = [_part(table, "columns") for table in spec.get("columns", ())] or [_Part("", {}, {}, None)]
    named = [_Part(name, {"method": {"name": name}}, {}, None) for name in methods]
    found = []
    for row in named or [_part(table, "rows") for table in spec.get("rows", ())]:
        for column in columns:
            if mini is not None and (row.mini is None or column.mini is None):
                continue
            own = default if mini is not None or row.seeds is None else _seeds(seeds or row.seeds)
            scale = () if mini is None else (C.undot(over.items()), column.mini or {}, row.mini or {})
            label = f"{row.label}, {column.label}" if column.label else row.label
            place = (row.label, column.label) if column.label else ("", "")
            found.append(Row(label, row.settings, own, column.settings, scale, place))
    if not found:
        raise UserError("compare: name the methods to compare, with --methods or as [[compare.rows]] in the file")
    slugs = [row.slug for row in found]
    for one in found:
        if slugs.count(one.slug) > 1:
            raise UserError(f'compare: each row needs a label of its own, and "{one.label}" is there twice')
    return found


class _Part(NamedTuple):
    """A row or a column as a file has it."""

    label: str
    settings: Table
    mini: Table | None  # None: not at the small scale
    seeds: Any


def _part(table: Mapping[str, Any], kind: str) -> _Part:
    settings = C.undot((key, value) for key, value in table.items() if key not in ("label", "seeds", "mini"))
    label = table.get("label") or (settings.get("method", {}).get("name") if kind == "rows" else None)
    if not label:
        raise UserError(f"compare.{kind}: each needs a label" + " or the name of a method" * (kind == "rows"))
    mini = table.get("mini", {})
    if not isinstance(mini, Mapping) and mini is not False:
        raise UserError(f'compare.{kind}: mini = {mini!r} of "{label}" must be a table of settings, or false')
    return _Part(label, settings, C.undot(mini.items()) if mini is not False else None, table.get("seeds"))


def _seeds(values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or not values or not all(isinstance(seed, int) for seed in values):
        raise UserError(f"compare.seeds = {values!r} must be a list of whole numbers")
    if len(set(values)) < len(values):
        raise UserError(f"compare.seeds = {list(values)} must be different numbers")
    return tuple(values)


def plan(common: Sequence[Mapping[str, Any]], rows: Sequence[Row], out: Path) -> list[Job]:
    """All runs, validated before the first one starts: every row with its first seed, then the second seeds.

    Of the common settings the first table is the file's, over which columns go; the others are given besides."""
    # All else is checked with the rows, whose methods and columns it belongs to.
    base = C.make(*({key: table[key] for key in ("seed", "partition") if key in table} for table in common))
    split = base.seed if base.partition.seed is None else base.partition.seed
    jobs = []
    for turn in range(max(len(row.seeds) for row in rows)):
        for row in rows:
            if turn < len(row.seeds):
                seed = row.seeds[turn]
                settings = {
                    **row.settings,
                    "seed": seed,
                    "partition": {"seed": split, **row.settings.get("partition", {})},
                }
                tables = [*common[:1], row.column, *common[1:], settings]
                config = C.make(shrunk(tables, row.mini, common[1:]) if row.mini else merged(tables))
                jobs.append(Job(row, seed, config, out / f"{row.slug}-seed{seed}"))
    return jobs


def small_scale(source: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> Table:
    """The settings of one run at the small scale of its file; `tables`: the file's settings and what is given."""
    mini = small(source[0] if source else {}, True) or {}
    return shrunk(tables, [C.undot((key, v) for key, v in mini.items() if key != "seeds")], tables[1:])


def merged(tables: Iterable[Mapping[str, Any]]) -> Table:
    made: Table = {}
    for table in tables:
        made = C.merge(made, table)
    return made


def shrunk(
    tables: Iterable[Mapping[str, Any]], mini: Iterable[Mapping[str, Any]], given: Iterable[Mapping[str, Any]] = ()
) -> Table:
    """The tables' settings with those of the mini scale over them. What is given besides wins where both say
    something."""
    made, over = merged(tables), merged(given)
    for table in mini:
        for key, value in table.items():
            if key not in C.SECTIONS:
                made[key] = over.get(key, value)
                continue
            section = {k: over.get(key, {}).get(k, v) for k, v in C.undot([(key, value)])[key].items()}
            made = C.merge(made, {key: {"name": section["name"]}} if "name" in section else {})
            made = C.merge(made, {key: _applicable(key, section, made.get(key, {}))})
    return made


def _applicable(section: str, settings: Table, old: Mapping[str, Any]) -> Table:
    """Those of the settings that this method or partition has. Nobody has the others: a mistake."""
    if section not in ("method", "partition"):
        return settings
    name = old.get("name") or C.SECTIONS[section].model_fields["name"].default
    if section == "method":
        own, known = set(M.fields(name)), _method_settings()
    else:
        own = set(PARTITIONS[name].model_fields) if name in PARTITIONS else set()
        known = frozenset(key for kind in PARTITIONS.values() for key in kind.model_fields)
    always = {"name", "seed", "file"} if section == "partition" else {"name"}
    for key in settings:
        if key not in known | own | always:
            raise UserError(f"mini.{section}.{key} is not a setting of any {section}{nearest(key, known)}")
    return {key: value for key, value in settings.items() if key in own | always}


@cache
def _method_settings() -> frozenset[str]:
    """Of any method and plug-in."""
    kinds = [*M.PROMPTS.values(), *(kind for kind, _ in M.TUNINGS.values())]
    named = {key for name in (*M.METHODS, *M.ALIASES) for key in M.fields(name)}
    return frozenset(named | {key for kind in kinds for key in kind.model_fields})


def small(source: Mapping[str, Any], wanted: bool) -> Table | None:
    """A file's [mini], if it is wanted."""
    if not wanted:
        return None
    mini = source.get("mini")
    if not isinstance(mini, Mapping) or not mini:
        raise UserError("--mini needs a file with a [mini] table, the settings of its small scale")
    return dict(mini)


def take(job: Job, view: View | None = None) -> Result | None:
    """The job's result, made if it is not there yet. None if another process is making it."""
    done = finished(job)
    if done:
        return done
    resume = (job.folder / "config.toml").exists()
    if resume:
        _same(job)
    try:
        return execute(job.config, job.folder, resume, view=view)
    except Busy:
        return None


def compare(
    preset: str | Path | None = None,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    out: str | Path,
    mini: bool = False,
    **settings: Any,
) -> dict[str, list[Result]]:
    """Runs several methods and seeds on one partition; -> results by label, and tables in `out`. `mini`: at the small
    scale that the file has besides.

    compare(methods=["pfedpt", "fedavg", "local"], seeds=[0, 1, 2], out="runs/mine", dataset="cifar10", rounds=50)
    """
    source = C.read(preset) if preset else {}
    common = [without_compare(source), C.undot(settings.items())]
    found = rows(source.get("compare", {}), methods, seeds, small(source, mini))
    jobs = plan(common, found, Path(out))
    for job in jobs:
        take(job)
    results = collect(jobs)
    tables.save(results, Path(out), places(found))
    return results


def places(rows: Iterable[Row]) -> dict[str, tuple[str, str]]:
    """Where a table with columns has each label; empty if it has none."""
    return {row.label: row.place for row in rows if row.place[1]}


def collect(jobs: Sequence[Job]) -> dict[str, list[Result]]:
    """What is done, by this process or another; a warning names what is not."""
    results: dict[str, list[Result]] = {}
    missing = []
    for job in jobs:
        done = finished(job)
        if done:
            results.setdefault(job.row.label, []).append(done)
        else:
            missing.append(job.folder.name)
    if missing:
        warnings.warn(f"not in the table, still held by another process: {', '.join(missing)}", stacklevel=2)
    return results


def finished(job: Job) -> Result | None:
    file = job.folder / "result.json"
    if not file.exists():
        return None
    _same(job)
    return Result(job.folder, json.loads(file.read_text()))


def _same(job: Job) -> None:
    """A folder of the same name but another configuration is somebody else's result."""
    saved = C.make(C.read(job.folder / "config.toml")).complete()
    for key, value in job.config.complete().items():
        if key != "engine" and saved[key] != value:
            raise UserError(f'--out: "{job.folder}" holds a run with another {key}; choose another --out')
