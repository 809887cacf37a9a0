"""A run's configuration: TOML, typed, validated, and written back complete."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, Field, ValidationError, model_validator

from .. import aggregation, methods
from ..aggregation import Aggregation
from ..data import PARTITIONS, DatasetConfig
from ..errors import Unsuited, UserError, nearest, one_sentence
from ..privacy import Privacy, check
from ..secure import Secure
from ..secure import check as check_secure
from . import protocols
from .sections import (
    DEFAULT_METHOD,
    FILE,
    Backbone,
    Consortium,
    Engine,
    Evaluation,
    Join,
    MethodSection,
    PartitionSection,
    Section,
)

Table = dict[str, Any]
_PRESETS = resources.files("promptfed.runs.presets")


class Config(Section):
    rounds: int = Field(20, ge=1, description="communication rounds")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    seed: int = Field(0, ge=0, description="all randomness comes from it")
    method: MethodSection = Field(default_factory=MethodSection)
    dataset: DatasetConfig = Field(default_factory=lambda: DatasetConfig())
    partition: PartitionSection = Field(default_factory=PartitionSection)
    backbone: Backbone = Field(default_factory=lambda: Backbone())
    eval: Evaluation = Field(default_factory=lambda: Evaluation())
    join: Join = Field(default_factory=lambda: Join())
    engine: Engine = Field(default_factory=lambda: Engine())
    privacy: Privacy = Field(default_factory=lambda: Privacy())
    aggregation: Aggregation = Field(default_factory=lambda: Aggregation())
    secure: Secure = Field(default_factory=lambda: Secure())
    consortium: Consortium | None = Field(None, description="none: all images are here")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.consortium and self.dataset.size is None:
            raise UserError("dataset.size must be set: the sites of a consortium agree on the size of their images")
        if self.consortium and self.eval.pooled != "never":
            raise UserError(
                f'eval.pooled = "{self.eval.pooled}" needs all clients\' test data; a site of a consortium has '
                "only its own (allowed: never)"
            )
        if self.method.method.centralised and (self.consortium or self.engine.name == "flower"):
            raise UserError(
                f'method.name = "{self.method.name}": training data would have to leave their sites, which Flower '
                'connects; engine.name = "local" simulates it'
            )
        if self.privacy.on:
            check(self.method.method, self.method.name)
        aggregation.check(self.aggregation, self.method.method, self.method.name, self.fraction)
        if self.privacy.together and not self.secure.aggregation:
            raise UserError(
                "privacy.together = true needs secure.aggregation = true: the server sees each update otherwise, with "
                "less noise than it needs"
            )
        if self.secure.aggregation:
            check_secure(self.method.method, self.method.name, self.aggregation.name)
        if self.eval.drift and (self.privacy.on or self.secure.aggregation):
            setting = "privacy.clip" if self.privacy.on else "secure.aggregation"
            raise UserError(f"eval.drift = true tells how far clients' parameters move, which {setting} cannot cover")
        if self.join.round > self.rounds:
            raise UserError(f"join.round = {self.join.round} is later than the last of rounds = {self.rounds}")
        if self.join.round and not self.join.clients:
            raise UserError(f"join.round = {self.join.round} needs join.clients: who joins then")
        if self.join.clients and not self.join.round and not self.method.method.serves:
            raise Unsuited(
                f'join.round = 0: "{self.method.name}" has no model for a client that never trains; '
                f"let it join in a round from 1 to {self.rounds}"
            )
        self._check_protocols()
        return self

    def _check_protocols(self) -> None:
        wanted = protocols.wanted(self.eval.model_dump())
        for setting, protocol in wanted.items():
            if self.consortium:
                raise UserError(f"{setting} needs all images in one place; the sites of a consortium hold their own")
            if why := protocol.why_not(self.method.method):
                raise Unsuited(f'{setting}: "{self.method.name}" cannot serve {protocol.name}: {why}')
        if self.eval.limit and not self.eval.datasets:
            raise UserError(f"eval.limit = {self.eval.limit} needs eval.datasets: the datasets whose images it limits")
        left = self.eval.leave_out
        if left and self.partition.name != "domain":
            raise UserError(
                f'eval.leave_out = "{left}" needs partition.name = "domain", not "{self.partition.name}": it is the '
                "clients of a domain that are left out"
            )
        if left and self.join.clients:
            raise UserError(
                f'eval.leave_out = "{left}" and join.clients = {self.join.clients} cannot both be given: both say who '
                "does not train"
            )
        if left == protocols.EACH:
            raise UserError(
                f'eval.leave_out = "{left}" is one run per domain: promptfed compare --methods {self.method.name} ... '
                "(allowed in a run: the name of a domain)"
            )

    @property
    def split_seed(self) -> int:
        return self.seed if self.partition.seed is None else self.partition.seed

    def complete(self) -> Table:
        """All settings, with the ones that were left to their defaults."""
        table = self.model_dump(mode="json", exclude=None if self.consortium else {"consortium"})
        method = json.loads(json.dumps(self.method.complete()))  # lists in place of tuples
        return {**table, "method": method, "partition": self.partition.complete()}


SECTIONS: dict[str, type[BaseModel]] = {
    key: kind
    for key, field in Config.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))  # of one that may be None, what it is else
    if isinstance(kind, type) and issubclass(kind, BaseModel)
}


def make(*tables: Mapping[str, Any]) -> Config:
    """A Config from tables, later ones over earlier ones. A section may be given by its name alone."""
    try:
        merged = merge(*tables)
        name = merged.get("method", {}).get("name", DEFAULT_METHOD)
        return Config.model_validate(_unstandardised(fitted(merged, [name])))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            raise _not_a_setting(".".join(map(str, first["loc"]))) from None
        raise one_sentence(error) from None


def fitted(table: Table, compared: Iterable[str]) -> Table:
    """Settings that name no backbone, with one that fits the method and the others it is compared with; for embedded
    pre-trained ones, data they know unless others are named."""
    name = table.get("method", {}).get("name", DEFAULT_METHOD)
    if "name" in table.get("backbone", {}) or not isinstance(name, str):
        return table
    kinds = {other: methods.backbones(methods.create(other)) for other in {name, *compared}}
    named = protocols.needs_names(table.get("eval", {}))
    if set(kinds.values()) == {"any"} and not named:
        return table
    backbone = "clip-mini" if named or kinds[name].startswith("CLIP") else "vit-mini"
    return merge({"backbone": {"name": backbone}, "dataset": {"name": "shapes"}}, table)


def _unstandardised(table: Table) -> Table:
    """Sums of features are sent without noise or masks: where there is privacy or secure aggregation, heads do without
    unless they are asked for."""
    method = table.get("method", {})
    private = table.get("privacy", {}).get("clip") or table.get("secure", {}).get("aggregation")
    if not private or not isinstance(method.get("name"), str) or "standardise" not in methods.fields(method["name"]):
        return table
    return {**table, "method": {"standardise": False, **method}}


def _not_a_setting(key: str) -> UserError:
    allowed = SECTIONS.get(key.partition(".")[0], Config).model_fields
    nested = [f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.model_fields]
    similar = nearest(key, [*Config.model_fields, *nested])
    return UserError(f"{key} is not a setting{similar} (allowed: {', '.join(sorted(allowed))})")


def merge(*tables: Mapping[str, Any]) -> Table:
    """Later tables over earlier ones. A method or partition of another name takes over the settings it has too."""
    merged: Table = {}
    for table in tables:
        for key, value in table.items():
            if key not in SECTIONS:
                merged[key] = value
                continue
            value, old = _table(key, value), merged.get(key, {})
            name = value.get("name", old.get("name"))
            if name != old.get("name") and isinstance(name, str) and key in ("method", "partition"):
                own = settings_of(key, name)
                old = {setting: given for setting, given in old.items() if setting in own}
            merged[key] = {**old, **value}
    return merged


def settings_of(section: str, name: str) -> set[str]:
    """Those of a method or a partition."""
    if section == "method":
        return set(methods.fields(name))
    if name == FILE:
        return {"seed", "file"}
    return {*PARTITIONS[name].model_fields, "seed"} if name in PARTITIONS else set()


def parse_assignments(words: Iterable[str]) -> Table:
    """["rounds=5", "method.mu=0.1"] -> {"rounds": 5, "method": {"mu": 0.1}}"""
    pairs = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f'"{word}" is not of the form key=value')
        pairs.append((key, _value(text)))
    return undot(pairs)


def undot(pairs: Iterable[tuple[str, Any]]) -> Table:
    """[("eval.every", 5), ("method", "fedavg")] -> {"eval": {"every": 5}, "method": {"name": "fedavg"}}"""
    table: Table = {}
    for key, value in pairs:
        section, dot, rest = key.partition(".")
        if dot and section not in SECTIONS:
            raise _not_a_setting(key)
        if dot:
            table.setdefault(section, {})[rest] = value
        elif section in SECTIONS:
            table.setdefault(section, {}).update(_table(section, value))
        else:
            table[key] = value
    return table


def _table(section: str, value: Any) -> Mapping[str, Any]:
    """A section may be given by its name alone."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping):
        raise UserError(f"{section} = {value!r} must be a name or a table of settings")
    return value


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        names = re.fullmatch(r"\[([^][(){}\"',]+(?:,[^][(){}\"',]+)*)\]", text)  # whose quotes the shell has removed
        return [_value(name.strip()) for name in names[1].split(",")] if names else text


def read(source: str | Path) -> Table:
    """The tables of a TOML file, or of a preset by its name."""
    path = Path(source)
    if path.suffix != ".toml" and not path.is_file():
        known = presets()
        if str(source) not in known:
            if str(source).split("+")[0] in {**methods.METHODS, **methods.ALIASES}:
                raise UserError(f'"{source}" is a method, not a preset: method={source}')
            raise UserError(
                f'"{source}" is neither a file nor a preset{nearest(str(source), known)} (presets: {", ".join(known)})'
            )
        return tomllib.loads(_PRESETS.joinpath(f"{source}.toml").read_text())
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f'config file "{path}" cannot be read: {error.strerror}') from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f'config file "{path}" is not valid TOML: {error}') from None


def presets() -> list[str]:
    names = (item.name for item in _PRESETS.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def preset_about(name: str) -> str:
    """A preset's first comment."""
    lines = _PRESETS.joinpath(f"{name}.toml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))


def dump(table: Mapping[str, Any]) -> str:
    """TOML. A setting that is None is left out: TOML has no null."""
    return tomli_w.dumps(_without_none(table))


def _without_none(table: Mapping[str, Any]) -> Table:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
