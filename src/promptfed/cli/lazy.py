"""Modules that are imported when they are first asked for: torch alone takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from . import interrupts


def names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, of name -> module or module:name, relative to the package."""

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, its = places[name].partition(":")
        found = getattr(import_module(module, package), its or name)
        setattr(sys.modules[package], name, found)
        return found

    return find


class Module:
    """A module of promptfed, for the command line: not every command needs it."""

    def __init__(self, name: str) -> None:
        self._name = f"promptfed.{name}"

    def __getattr__(self, name: str) -> Any:
        with interrupts.at_once():
            module = import_module(self._name)
        return getattr(module, name)
