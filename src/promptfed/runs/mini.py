"""The small scale of a file: the settings of its [mini] table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from .. import methods as M
from ..data import PARTITIONS
from ..errors import UserError, nearest
from . import config as C

Table = dict[str, Any]


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
    """The tables' settings with those of the mini scale over them. Settings given in addition win where both say
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
        own, known = set(M.fields(name)), method_settings()
    else:
        own = set(PARTITIONS[name].model_fields) if name in PARTITIONS else set()
        known = frozenset(key for kind in PARTITIONS.values() for key in kind.model_fields)
    always = {"name", "seed", "file"} if section == "partition" else {"name"}
    for key in settings:
        if key not in known | own | always:
            raise UserError(f"mini.{section}.{key} is not a setting of any {section}{nearest(key, known)}")
    return {key: value for key, value in settings.items() if key in own | always}


@cache
def method_settings() -> frozenset[str]:
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
