"""What is searched: settings, each with a range or a list of values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import methods as M
from ..errors import UserError, nearest
from ..runs import config as C

# All else changes the data, the evaluation or the guarantee, which are the same for every trial.
_SEARCHED = ("rounds", "fraction", "method", "backbone")
_DECADES = 10.0  # the default space of a rate: from a tenth of its value to ten times it


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    log: bool
    whole: bool = False

    def at(self, share: float) -> float:
        """The value at this share of the way from low to high."""
        if self.log:
            return self.rounded(math.exp(math.log(self.low) + share * math.log(self.high / self.low)))
        return self.rounded(self.low + share * (self.high - self.low))

    def suggest(self, trial: Any, key: str) -> float:
        """What an Optuna trial tries."""
        if self.whole:
            return self.rounded(trial.suggest_int(key, int(self.low), int(self.high), log=self.log))
        return self.rounded(trial.suggest_float(key, self.low, self.high, log=self.log))

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def ends(self) -> tuple[Any, ...]:
        return self.rounded(self.low), self.rounded(self.high)

    def rounded(self, value: float) -> float:
        """To four digits, so that what is written down is what was tried."""
        return round(value) if self.whole else float(f"{value:.4g}")

    def __str__(self) -> str:
        return f"{self.low:.4g}..{self.high:.4g}" + (" (log)" if self.log else "")


@dataclass(frozen=True)
class Choice:
    values: tuple[str, ...]  # as written on a command line

    def at(self, share: float) -> str:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def suggest(self, trial: Any, key: str) -> str:
        return str(trial.suggest_categorical(key, self.values))

    def rounded(self, value: Any) -> str:
        return str(value)

    def holds(self, value: Any) -> bool:
        return value in self.values

    def ends(self) -> tuple[Any, ...]:
        return self.values

    def __str__(self) -> str:
        return "|".join(self.values)


Space = dict[str, Range | Choice]


def parse(words: Sequence[str]) -> Space:
    """["method.lr=0.001..0.1", "method.epochs=1|5"] -> a range on a log scale, and two choices"""
    found: Space = {}
    for word in words:
        key, _, text = word.partition("=")
        if ".." not in text and "|" not in text:
            raise UserError(f'--space = "{word}" must be of the form setting=low..high or setting=a|b|c')
        if key in found:
            raise UserError(f"--space names {key} twice")
        if key.partition(".")[0] not in _SEARCHED and key in known():
            raise UserError(
                f"--space: {key} must be the same for every trial (allowed: rounds, fraction, method.*, backbone.*)"
            )
        found[key] = _range(word, key, text) if ".." in text else Choice(tuple(text.split("|")))
    return found


def known() -> set[str]:
    """All settings but those of methods and partitions."""
    return {f"{section}.{name}" for section, kind in C.SECTIONS.items() for name in kind.model_fields} | set(
        C.Config.model_fields
    )


def _range(word: str, key: str, text: str) -> Range:
    ends = text.split("..")
    try:
        low, high = map(float, ends)
    except ValueError:
        raise UserError(f'--space = "{word}" must have two numbers, as in 0.001..0.1') from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f'--space = "{word}" must go from a number to a greater one')
    if is_rate(key) and low <= 0:
        raise UserError(f'--space = "{word}" must begin above 0: a learning rate is searched on a log scale')
    whole = all(end.strip().lstrip("+-").isdigit() for end in ends)
    return Range(low, high, low > 0 and (is_rate(key) or (not whole and high >= 10 * low)), whole and not is_rate(key))


def is_rate(key: str) -> bool:
    """Learning rates are called lr, or something_lr."""
    name = key.rpartition(".")[2]
    return name == "lr" or name.endswith("_lr")


def rates(config: C.Config) -> dict[str, float]:
    """The learning rates of a configuration's method; none where nothing is trained."""
    if not config.method.method.schedule(1):
        return {}
    own = config.method.complete()
    return {f"method.{key}": value for key, value in own.items() if is_rate(key) and isinstance(value, float)}


def of_rates(config: C.Config) -> Space:
    """The default: each learning rate from a tenth of its value to ten times it."""
    return {key: Range(value / _DECADES, value * _DECADES, log=True) for key, value in rates(config).items()}


def of_row(given: Space, config: C.Config) -> Space:
    """What is searched for one row: what is given, as far as its method has it, or its rates."""
    if not given:
        return of_rates(config)
    trained = bool(config.method.method.schedule(1))
    return {key: values for key, values in given.items() if trained and applies(key, config)}


def applies(key: str, config: C.Config) -> bool:
    section, _, name = key.partition(".")
    return section != "method" or name == "name" or name in M.fields(config.method.name)


def check(given: Space, configs: Iterable[C.Config]) -> None:
    """Refuses a setting that no row has, and values that are not allowed."""
    configs = list(configs)
    for key, values in given.items():
        rows = [config for config in configs if applies(key, config)]
        if not rows:
            own = {f"method.{name}" for config in configs for name in M.fields(config.method.name)}
            raise UserError(
                f"--space: {key} is not a setting of any method that is compared{nearest(key, own)} "
                f"(allowed: {', '.join(sorted(own))})"
            )
        for config in rows:
            for value in values.ends():
                overlaid(config, {key: value})


def table(values: Mapping[str, Any]) -> C.Table:
    """{"method.lr": 0.1} -> {"method": {"lr": 0.1}}"""
    return C.parse_assignments(f"{key}={value}" for key, value in values.items())


def overlaid(config: C.Config, *values: Mapping[str, Any]) -> C.Config:
    """A configuration with other values of some settings."""
    return C.make(config.complete(), *map(table, values))


def words(values: Mapping[str, Any]) -> str:
    """{"method.lr": 0.1} -> lr = 0.1"""
    return ", ".join(f"{key.removeprefix('method.')} = {value}" for key, value in values.items())
