"""Protocols: which models are scored on which data, and which methods can serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..method import Method
from ..methods.overview import names_classes


@dataclass(frozen=True)
class Protocol:
    name: str
    setting: str  # that asks for it; empty: every evaluation has it
    columns: str  # of tables
    about: str
    unable: Callable[[Method], str] | None = None  # why a method cannot serve it, or empty; None: every method can


def _no_model(method: Method) -> str:
    return "" if method.serves else "it has no model for a client that never trains"


def _no_names(method: Method) -> str:
    return "" if names_classes(method) else "it has values for each class, and cannot name one that it has not seen"


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
    )
}


def served(method: Method) -> list[str]:
    """The protocols that need something of a method, and that it can serve."""
    return [name for name, one in PROTOCOLS.items() if one.unable and not one.unable(method)]
