"""User errors, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


_SHORT = 4  # letters
_KINDS = ("int", "float", "str", "bool")


class UserError(ValueError):
    """Bad input: the message names the setting, the value and what is allowed. Shown without a traceback."""


class Unsuited(UserError):
    """A method that cannot serve the protocol that is asked for: a comparison leaves it out."""


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean "fedavg"?' or an empty string."""
    likely = sorted(((-_alike(word, other), other) for other in known), key=lambda pair: pair[0])
    least = 0.6 if len(word) > _SHORT else 0.5  # one wrong letter of two is half of the word
    return f'; did you mean "{likely[0][1]}"?' if likely and likely[0][0] <= -least else ""


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
    """The first complaint of a validation, with the setting's name, its value and what is wrong with it. Of a setting
    of several kinds, what each of them allows."""
    each = error.errors(include_url=False)
    first = each[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):  # raised by a validator of ours: a sentence already
        return cause
    where, value = _setting(first["loc"]), first["input"]
    name = ".".join([*([section] if section else []), *map(str, where)])
    if first["type"] == "missing" and isinstance(where[-1], int):
        return UserError(f"{name.rpartition('.')[0]} = {value!r} has too few values")
    if first["type"] == "extra_forbidden":
        return UserError(f"{name} is not a setting")
    told = [_complaint(one["msg"]) for one in each if _setting(one["loc"]) == where and one["input"] is value]
    what = " or ".join(dict.fromkeys([told[0], *(one.removeprefix("should be ") for one in told[1:])]))
    return UserError(f"{name} = {value!r} {what}" if name else what)


def _setting(loc: Sequence[int | str]) -> list[int | str]:
    """The path of a setting, without the kinds that it may be of."""
    return [part for part in loc if isinstance(part, int) or (part.isidentifier() and part not in _KINDS)]


def _complaint(message: str) -> str:
    message = message.removeprefix("Value error, ").removeprefix("Input ").split(", unable to parse")[0]
    return message.replace("a valid tuple", "a list")
