"""Protocols: which models are scored on which data, and which methods can serve them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..method import Method
from ..methods.overview import names_classes


@dataclass(frozen=True)
class Protocol:
    name: str
    setting: str  # that asks for it; empty: every evaluation has it
    columns: str  # of tables
    about: str
    unable: Callable[[Method], str] | None = None  # why a method cannot serve it, or empty; None: every method can

    def why_not(self, method: Method) -> str:
        return self.unable(method) if self.unable else ""


def _no_model(method: Method) -> str:
    return "" if method.serves else "it has no model for a client that never trains"


def _no_names(method: Method) -> str:
    return "" if names_classes(method) else "it has values for each class, and cannot name one that it has not seen"


UNSEEN = "unseen"  # the column of a domain that is left out
HARMONIC = "H"  # of base and novel
PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("personal", "", "local", "each client's model on its own test data; mean over clients"),
        Protocol("worst", "", "worst", "the same, of the client with the lowest accuracy"),
        Protocol(
            "global", "eval.pooled", "global", "each client's model, or the one of all, on all clients' test data"
        ),
        Protocol(
            "newcomers",
            "join.clients",
            "newcomers",
            "clients that come later, or with join.round = 0 never train; those that train need no special method",
            _no_model,
        ),
        Protocol(
            "unseen-domain",
            "eval.leave_out",
            UNSEEN,
            "with partition.name = domain, images of a domain whose clients do not train; each: a column per domain",
            _no_model,
        ),
        Protocol(
            "base-to-novel",
            "eval.novel",
            "base, novel, H",
            "on a CLIP, images of classes that nobody trains on, told apart by their names; base: all clients' test "
            "data; H: harmonic mean of both",
            _no_names,
        ),
        Protocol(
            "cross-dataset",
            "eval.datasets",
            "the dataset's name",
            "on a CLIP, the images of other datasets, told apart by the names of their own classes",
            _no_names,
        ),
    )
}
EACH = "each"  # eval.leave_out of a comparison with a column per domain
_SECTION = "eval."


def wanted(evaluation: Mapping[str, Any]) -> dict[str, Protocol]:
    """The protocols that an [eval] section asks for, by their setting."""
    asked = {one.setting: one for one in PROTOCOLS.values() if one.unable and one.setting.startswith(_SECTION)}
    return {setting: one for setting, one in asked.items() if evaluation.get(setting.removeprefix(_SECTION))}


def needs_names(evaluation: Mapping[str, Any]) -> bool:
    """Whether a protocol that is asked for needs a backbone which classifies by names."""
    return any(one.unable is _no_names for one in wanted(evaluation).values())


def served(method: Method) -> list[str]:
    """The protocols that need something of a method, and that it can serve."""
    return [name for name, one in PROTOCOLS.items() if one.unable and not one.why_not(method)]


def column(dataset: str) -> str:
    """Of another dataset."""
    return Path(dataset).name


def accuracies(numbers: Mapping[str, Any]) -> dict[str, float | None]:
    """What a result.json has found on data that nobody has trained on, by column."""
    found = numbers.get("protocols", {})
    pair, domain = found.get("base_to_novel"), found.get("unseen_domain")
    return {
        **({"base": pair["base"], "novel": pair["novel"], HARMONIC: pair["harmonic"]} if pair else {}),
        **({UNSEEN: domain["accuracy"]} if domain else {}),
        **{column(name): accuracy for name, accuracy in found.get("cross_dataset", {}).items()},
    }
