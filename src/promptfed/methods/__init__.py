"""Federated methods, one file per method; registry.py finds them by name."""

from .registry import (
    ALIASES,
    FINE_TUNED,
    METHODS,
    PAPERS,
    PROMPTS,
    TUNINGS,
    Recipe,
    backbones,
    create,
    everything,
    fields,
    parse,
    peel,
    settings,
    tunes,
)

__all__ = [
    "ALIASES",
    "FINE_TUNED",
    "METHODS",
    "PAPERS",
    "PROMPTS",
    "TUNINGS",
    "Recipe",
    "backbones",
    "create",
    "everything",
    "fields",
    "parse",
    "peel",
    "settings",
    "tunes",
]
