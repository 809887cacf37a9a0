"""The small scale of a file: the settings of its [mini] table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from .. import methods as M
from ..data import PARTITIONS
from ..errors import UserError, nearest
from . import config as C

Table = dict[str, Any]


def small(source: Mapping[str, Any]) -> Table:
    """A file's [mini]."""
    mini = source.get("mini")
    if not isinstance(mini, Mapping) or not mini:
        raise UserError("--mini needs a file with a [mini] table, the settings of its small scale")
    return dict(mini)


def shrunk(
    tables: Iterable[Mapping[str, Any]], mini: Iterable[Mapping[str, Any]], given: Iterable[Mapping[str, Any]]
) -> Table:
    """The tables' settings with those of the mini scale over them, and those that are given over both."""
    made, over = C.merge(*tables), C.merge(*given)
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
    """Those of the settings that this method or partition has. If none of all has one, it is a mistake."""
    if section not in ("method", "partition"):
        return settings
    always = {"name", "seed", "file"} if section == "partition" else {"name"}
    own = C.settings_of(section, old.get("name") or C.SECTIONS[section].model_fields["name"].default) | always
    known = method_settings() if section == "method" else set().union(*(C.settings_of(section, k) for k in PARTITIONS))
    for key in settings:
        if key not in known | own:
            raise UserError(f"mini.{section}.{key} is not a setting of any {section}{nearest(key, known)}")
    return {key: value for key, value in settings.items() if key in own}


@cache
def method_settings() -> set[str]:
    """Of any method and plug-in."""
    kinds = [*M.PROMPTS.values(), *(kind for kind, _ in M.TUNINGS.values())]
    named = {key for name in (*M.METHODS, *M.ALIASES) for key in M.fields(name)}
    return named | {key for kind in kinds for key in kind.model_fields}
