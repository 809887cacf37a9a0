"""The rows of a comparison, and the runs that they stand for.

Settings go over each other in this order: the file's, those of a column, given ones, those of the row; at the small
scale also [mini] and the `mini` of column and row (mini = false leaves it out), of which each run takes what its method
and partition have.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import methods as M
from .. import models
from ..data import load
from ..errors import Unsuited, UserError, nearest, unknown
from ..method import Method
from . import config as C
from . import protocols
from .api import class_name, method_settings, shrunk

Table = dict[str, Any]

# Keys of a row or column that are not settings of its runs.
BESIDE = ("label", "seeds", "mini", "columns", "claim", "ours", "by", "against")


@dataclass(frozen=True)
class Row:
    label: str
    settings: Table
    seeds: tuple[int, ...]
    column: Table = field(default_factory=dict)  # over the file's settings, under those that are given
    mini: tuple[Table, ...] = ()  # over everything, each over the ones before it
    place: tuple[str, str] = ("", "")  # where a table with columns has it: the labels of its row and column
    tuned: Table | None = None  # chosen on validation data, over everything

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
    methods: Sequence[str | type[Method]] = (),
    seeds: Sequence[int] = (),
    mini: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The rows of a [compare] table, or one for each method named; in every column. `mini`: the file's [mini]."""
    for key in spec:
        if key not in ("seeds", "rows", "columns", "tuned", "show", "views"):
            raise UserError(f"compare.{key} is not a setting (allowed: seeds, rows, columns, show, views, tuned)")
    tuned = _tuned(spec, mini is not None)
    over = {key: value for key, value in (mini or {}).items() if key != "seeds"}
    default = _seeds(seeds or (spec if mini is None else mini).get("seeds", (0,)))
    columns = [_part(table, "columns") for table in spec.get("columns", ())] or [_Part("", {}, {}, None)]
    _check_columns(spec, {column.label for column in columns})
    found = []
    of_methods = [_of_method(method) for method in completed(methods)]
    for row in of_methods or [_part(table, "rows") for table in spec.get("rows", ())]:
        for column in columns:
            if row.columns and column.label not in row.columns:
                continue
            if mini is not None and (row.mini is None or column.mini is None):
                continue
            own = default if mini is not None or row.seeds is None else _seeds(seeds or row.seeds)
            scale = () if mini is None else (C.undot(over.items()), column.mini or {}, row.mini or {})
            label = f"{row.label}, {column.label}" if column.label else row.label
            place = (row.label, column.label) if column.label else ("", "")
            found.append(Row(label, row.settings, own, column.settings, scale, place, tuned.get(label)))
    if not found:
        raise UserError("compare: name the methods to compare, with --methods or as [[compare.rows]] in the file")
    first: dict[str, str] = {}  # folder -> label
    for each in found:
        if each.slug in first:
            both = f'"{each.label}" is there twice'
            if first[each.slug] != each.label:
                two = f'"{first[each.slug]}" and "{each.label}"'
                both = f"{two} have the same letters and digits, which name their folders"
            raise UserError(f"compare: each row needs a label of its own, and {both}")
        first[each.slug] = each.label
    return found


def shaped(spec: Any) -> Mapping[str, Any]:
    """A file's [compare], if it has tables where they belong."""
    if not isinstance(spec, Mapping):
        raise UserError("compare must be one table of settings: [compare], in single brackets")
    for key in ("rows", "columns", "views"):
        tables = spec.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
            raise UserError(f"compare.{key} must be a list of tables: [[compare.{key}]], in double brackets")
        for label in (table.get("label", "") for table in tables):
            if not isinstance(label, str):
                raise UserError(f"compare.{key}: label = {label!r} must be text, in quotes")
    tuned = spec.get("tuned", {"trials": 0})
    chosen = tuned.get("rows", {}) if isinstance(tuned, Mapping) and "trials" in tuned else None
    if not isinstance(chosen, Mapping) or not all(isinstance(settings, Mapping) for settings in chosen.values()):
        raise UserError(f"compare.tuned = {tuned!r} must be a table with trials and rows, as promptfed tune writes it")
    return spec


def completed(methods: Sequence[str | type[Method]]) -> list[str | type[Method]]:
    """The same with `centralised` completed by what the others tune."""
    others = [method for method in methods if isinstance(method, str) and method != "centralised"]
    return [M.pooled(others) if method == "centralised" else method for method in methods]


def _check_columns(spec: Mapping[str, Any], known: set[str]) -> None:
    for table in spec.get("rows", ()):
        for name in _part(table, "rows").columns:
            if name not in known:
                raise unknown("compare.rows: columns", name, known)


def _tuned(spec: Mapping[str, Any], mini: bool) -> Mapping[str, Table]:
    """The settings that promptfed tune has chosen, by label."""
    tuned = spec.get("tuned", {})
    if tuned and bool(tuned.get("mini")) is not mini:
        raise UserError(
            "compare.tuned: the settings were chosen at the small scale; compare with --mini"
            if tuned.get("mini")
            else "compare.tuned: the settings were chosen at the full scale; compare without --mini"
        )
    found: Mapping[str, Table] = tuned.get("rows", {})
    return found


def budget(spec: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """What a table of these rows has to say of itself if it is tuned. Else empty."""
    if "tuned" not in spec:
        return ""
    trials = spec["tuned"]["trials"]
    named = [(row.place[0] or row.label, row) for row in rows]
    tuned = {name for name, row in named if row.tuned is not None}  # in one column at least
    without = ", ".join(dict.fromkeys(row.label if name in tuned else name for name, row in named if row.tuned is None))
    text = f"tuned: {trials} trial{'s' if trials != 1 else ''} per row on validation data"
    return text + (f"; not tuned: {without}" if without else "")


class _Part(NamedTuple):
    """A row or a column as a file has it."""

    label: str
    settings: Table
    mini: Table | None  # None: not at the small scale
    seeds: Any
    columns: tuple[str, ...] = ()  # of a row: those that it is in; empty: all


def _of_method(method: str | type[Method]) -> _Part:
    if isinstance(method, str):
        return _Part(method, {"method": {"name": method}}, {}, None)
    return _Part(method.__name__, {"method": {"name": class_name(method)}}, {}, None)


def _part(table: Mapping[str, Any], kind: str) -> _Part:
    settings = C.undot((key, value) for key, value in table.items() if key not in BESIDE)
    label = table.get("label") or (settings.get("method", {}).get("name") if kind == "rows" else None)
    if not label:
        raise UserError(f"compare.{kind}: each needs a label" + " or the name of a method" * (kind == "rows"))
    mini = table.get("mini", {})
    if not isinstance(mini, Mapping) and mini is not False:
        raise UserError(f'compare.{kind}: mini = {mini!r} of "{label}" must be a table of settings, or false')
    return _Part(
        label,
        settings,
        C.undot(mini.items()) if mini is not False else None,
        table.get("seeds"),
        _columns(table, label),
    )


def _columns(table: Mapping[str, Any], label: str) -> tuple[str, ...]:
    names = table.get("columns", [])
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UserError(f'compare.rows: columns = {names!r} of "{label}" must be a list of labels of columns')
    return tuple(names)


def _seeds(values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or not values or not all(isinstance(seed, int) for seed in values):
        raise UserError(f"compare.seeds = {values!r} must be a list of whole numbers")
    if len(set(values)) < len(values):
        raise UserError(f"compare.seeds = {list(values)} must be different numbers")
    return tuple(values)


def plan(common: Sequence[Mapping[str, Any]], rows: Sequence[Row], out: Path, others: Iterable[str] = ()) -> list[Job]:
    """All runs, validated before the first one starts: every row with its first seed, then the second seeds.

    Of the common settings the first table is the file's, over which columns go; the others are given. `others`:
    methods that are not compared now, though the file's settings may be meant for them."""
    file, given = common[0], common[1:]
    # All else is checked with the rows, whose methods and columns it belongs to.
    base = C.make(*({key: table[key] for key in ("seed", "partition") if key in table} for table in common))
    jobs = []
    unable: dict[str, Unsuited] = {}
    methods: set[str] = set()
    compared = {row.settings["method"]["name"] for row in rows if "name" in row.settings.get("method", {})}
    for turn in range(max(len(row.seeds) for row in rows)):
        for row in (row for row in rows if turn < len(row.seeds)):
            seed, partition = row.seeds[turn], {"seed": base.split_seed, **row.settings.get("partition", {})}
            tables = [file, row.column, *given, {**row.settings, "seed": seed, "partition": partition}]
            whole = C.merge(*tables)
            scaled = shrunk(tables, row.mini, given) if row.mini else whole
            try:
                config = _once(C.make(C.fitted(scaled, compared), row.tuned or {}))
            except Unsuited as error:
                unable[row.label] = error
                continue
            jobs.append(Job(row, seed, config, out / f"{row.slug}-seed{seed}"))
            methods |= {config.method.name, whole.get("method", {}).get("name", config.method.name)}
    tell_unsuited(unable, {row.label for row in rows})
    taken = {key for name in methods for key in M.fields(name)}
    aside = [*others, *([file["method"]["name"]] if "name" in file.get("method", {}) else [])]
    check_taken([file], taken | {key for name in aside for key in M.fields(name)})
    check_taken(given, taken)
    check_taken((row.column for row in rows), taken | method_settings())  # of some rows, perhaps left out
    return jobs


def trains(config: C.Config) -> bool:
    """Whether its rounds change anything."""
    return bool(config.method.method.schedule(1) or config.join.clients)


def _once(config: C.Config) -> C.Config:
    """What is not trained needs one round, of all clients: columns that differ in training have the same run."""
    return config if trains(config) else C.make(config.complete(), {"rounds": 1, "fraction": 1.0})


def tell_unsuited(unable: Mapping[str, Unsuited], labels: set[str]) -> None:
    """Warns of rows that cannot serve the protocol asked for, and are left out; an error if all are. By label."""
    if unable and set(unable) == labels:
        raise next(iter(unable.values()))
    for words in dict.fromkeys(map(str, unable.values())):  # once for all columns
        warnings.warn(f"left out of the comparison: {words}", stacklevel=2)


def each_domain(spec: Mapping[str, Any], common: Sequence[Table], compared: Sequence[str]) -> Table:
    """A [compare] table with a column per domain where eval.leave_out is "each", which the columns replace."""
    if C.merge(*common).get("eval", {}).get("leave_out") != protocols.EACH:
        return dict(spec)
    if spec.get("columns"):
        raise UserError(f'eval.leave_out = "{protocols.EACH}" makes columns of its own, and compare.columns has others')
    for table in common:
        table.get("eval", {}).pop("leave_out", None)
    images = {key: value for key, value in C.merge(*common).items() if key in ("dataset", "backbone")}
    config = C.make(C.fitted({**images, "method": {"name": compared[0]}} if compared else images, compared))
    data = load(config.dataset, models.resize(config.backbone.name))
    if not data.domains:
        raise UserError(f'eval.leave_out = "{protocols.EACH}": dataset.name = "{data.name}" has no domains')
    return {
        "show": [protocols.UNSEEN, "local"],
        **spec,
        "columns": [{"label": domain, "eval.leave_out": domain} for domain in data.domains],
    }


def check_taken(tables: Iterable[Mapping[str, Any]], known: set[str]) -> None:
    """A row's method takes those of the common settings that it has. What no row takes is a mistake."""
    for key in (key for table in tables for key in table.get("method", {})):
        if key not in known | {"name"}:
            raise UserError(
                f"method.{key} is not a setting of any method that is compared{nearest(key, known)} "
                f"(allowed: {', '.join(sorted(known))})"
            )


def named(spec: Mapping[str, Any]) -> list[str]:
    """The methods of a file's rows."""
    names = (_part(table, "rows").settings.get("method", {}).get("name") for table in spec.get("rows", ()))
    return [name for name in names if name]
