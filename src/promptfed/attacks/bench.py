"""Every attack against every rule of aggregation, as runs of one configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .. import files
from ..clients.base import Clients
from ..errors import UserError, unknown
from ..runs import api, build
from ..runs import config as C
from ..seeding import rng
from .clients import Attacked
from .label_flip import flipped
from .untargeted import UNTARGETED

NONE, LABEL_FLIP = "none", "label-flip"
ATTACKS = (*UNTARGETED, LABEL_FLIP)
DEFENCES = ("mean", "norm-bound", "median", "trimmed-mean", "multi-krum", "geometric-median")
_USUAL: dict[str, Any] = {
    "method": {"name": "promptfl", "context": 4, "epochs": 1, "lr": 0.05, "momentum": 0.9},
    "backbone": "clip-mini",
    "dataset": {"name": "shapes", "limit": 800},
    "partition": {"name": "iid", "clients": 10},
    "rounds": 5,
    "eval": {"every": 5, "after_local": "none"},
}


@dataclass(frozen=True)
class Bench:
    configs: dict[str, C.Config]  # by defence
    attacks: tuple[str, ...]  # without an attack first
    share: float
    out: Path


def prepare(
    preset: str | None,
    given: Mapping[str, Any],
    attacks: Sequence[str],
    defences: Sequence[str],
    share: float,
    out: Path,
) -> Bench:
    """Checks everything before the first run. Without settings, PromptFL on the embedded federation."""
    for attack in attacks:
        if attack not in ATTACKS:
            raise unknown("--attacks", attack, ATTACKS)
    if not 0 < share < 0.5:
        raise UserError(f"--share = {share:g} must be above 0 and below 0.5")
    source = api.without_compare(C.read(preset)) if preset else _USUAL
    own = {"engine": {"workers": 1}}  # flipped labels are in this process only
    configs = {
        defence: C.make(source, {"aggregation": {"malicious": share}}, given, own, {"aggregation": {"name": defence}})
        for defence in defences or DEFENCES
    }
    if any(config.secure.aggregation for config in configs.values()):
        raise UserError("secure.aggregation = true hides the updates that attacks are made of (allowed: false)")
    if (out / "attacks.json").exists():
        raise UserError(f'--out = "{out}" holds a bench already: choose another')
    return Bench(configs, (NONE, *(attacks or ATTACKS)), share, out)


def execute(bench: Bench, console: Console) -> dict[str, dict[str, float]]:
    """-> mean test accuracy of honest clients, by attack and defence"""
    found: dict[str, dict[str, float]] = {}
    for attack in bench.attacks:
        found[attack] = {}
        for defence, config in bench.configs.items():
            found[attack][defence] = _accuracy(config, attack, bench.share, bench.out / f"{attack}-{defence}")
            console.print(f"{attack} against {defence}: {found[attack][defence]:.1%}", highlight=False)
    numbers = {"share": bench.share, "method": next(iter(bench.configs.values())).method.name, "accuracy": found}
    files.write(bench.out / "attacks.md", table(found).encode())
    files.write(bench.out / "attacks.json", (json.dumps(numbers, indent=1) + "\n").encode())
    return found


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Accuracy in per cent as Markdown, and in brackets what an attack costs under the same defence."""
    defences = list(found[NONE])
    lines = [f"| attack | {' | '.join(defences)} |", "|---" * (len(defences) + 1) + "|"]
    for attack, by in found.items():
        lost = {d: f" ({100 * (by[d] - found[NONE][d]):+.1f})" if attack != NONE else "" for d in by}
        cells = [f"{100 * by[d]:.1f}{lost[d]}" for d in by]
        lines.append(f"| {attack} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def malicious(clients: int, share: float, seed: int) -> list[int]:
    """Which clients are, at least one."""
    count = max(1, int(share * clients + 1e-9))
    return sorted(rng(seed, "malicious").choice(clients, count, replace=False).tolist())


def _accuracy(config: C.Config, attack: str, share: float, folder: Path) -> float:
    bad: list[int] = []

    def engine(parts: build.Parts, path: Path) -> Clients:
        bad[:] = malicious(len(parts.federation.sites), share, config.seed)
        if attack == LABEL_FLIP:
            parts = replace(parts, federation=flipped(parts.federation, bad))
        clients = build.clients(parts, path)
        if attack not in UNTARGETED:
            return clients
        return Attacked(clients, parts.method, parts.init, UNTARGETED[attack], bad, config.seed)

    numbers = api.execute(api.RunPlan(config, folder), engine=engine).numbers
    rows = numbers["clients"]["aggregated"]
    honest = [row["accuracy"] for row in rows if row["client"] not in bad and row["accuracy"] is not None]
    return float(np.mean(honest))
