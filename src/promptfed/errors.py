"""User errors, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """Bad input: the message names the setting, the value and what is allowed. Shown without a traceback."""


class Unsuited(UserError):
    """A method that cannot serve the protocol that is asked for: a comparison leaves it out."""


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean "fedavg"?' or an empty string."""
    likely = sorted(((-_alike(word, other), other) for other in known), key=lambda pair: pair[0])
    return f'; did you mean "{likely[0][1]}"?' if likely and likely[0][0] <= -0.5 else ""


def _alike(word: str, other: str) -> float:
    """0 to 1: the share of letters in common, in their order and in any, so that two swapped ones cost little."""
    word, other = word.lower(), other.lower()
    in_order = SequenceMatcher(None, word, other).ratio()
    in_any = SequenceMatcher(None, sorted(word), sorted(other)).ratio()
    return (in_order + in_any) / 2


def unknown(setting: str, value: str, known: Iterable[str]) -> UserError:
    """The error for a value that is not one of the known ones."""
    known = sorted(known)
    return UserError(f'{setting} = "{value}" is unknown{nearest(value, known)} (allowed: {", ".join(known)})')


def one_sentence(error: ValidationError, section: str = "") -> UserError:
    """The first complaint of a validation, with the setting's name, its value and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):  # raised by a validator of ours: a sentence already
        return cause
    where = ".".join([*([section] if section else []), *(str(part) for part in first["loc"])])
    what = first["msg"].removeprefix("Value error, ").removeprefix("Input ").split(", unable to parse")[0]
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        return UserError(f"{where.rpartition('.')[0]} = {first['input']!r} has too few values")
    if first["type"] == "extra_forbidden":
        return UserError(f"{where} is not a setting")
    return UserError(f"{where} = {first['input']!r} {what}" if where else what)
