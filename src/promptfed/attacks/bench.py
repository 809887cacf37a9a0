"""Every attack against every rule of aggregation, as runs of one configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..analysis.opened import Opened
from ..clients.base import Clients
from ..errors import UserError, unknown
from ..methods.dp2fl import Dp2fl
from ..runs import api, build
from ..runs import config as C
from ..seeding import rng
from . import outcome
from .base import Attack
from .false_losses import FalseLosses
from .influence import Weighed
from .label_flip import LabelFlip
from .outcome import NONE, Cell
from .page import page
from .pixel_trigger import PixelTrigger
from .poisoned_validation import PoisonedValidation
from .prompt_backdoor import PromptBackdoor
from .untargeted import UNTARGETED, Untargeted

ATTACKS: dict[str, Callable[[], Attack]] = {
    **{name: partial(Untargeted, forge) for name, forge in UNTARGETED.items()},
    "label-flip": LabelFlip,
    "pixel-trigger": PixelTrigger,
    "prompt-backdoor": PromptBackdoor,
    "false-losses": FalseLosses,
    "poisoned-validation": PoisonedValidation,
}
DEFENCES = ("mean", "norm-bound", "median", "trimmed-mean", "multi-krum", "geometric-median")
USUAL: dict[str, Any] = {
    "method": {"name": "promptfl", "context": 4, "epochs": 1, "lr": 0.05, "momentum": 0.9},
    "backbone": "clip-mini",
    "dataset": {"name": "shapes", "limit": 800},
    "partition": {"name": "iid", "clients": 10},
    "rounds": 5,
    "eval": {"every": 5, "after_local": "none"},
}
FILES = "attacks"  # what the tables are called
HERE = {"engine": {"workers": 1}}  # poisoned data are in this process only


@dataclass(frozen=True)
class Bench:
    configs: dict[tuple[str, int], C.Config]  # by defence and seed
    attacks: tuple[str, ...]
    share: float
    out: Path

    @property
    def about(self) -> dict[str, Any]:
        config = next(iter(self.configs.values()))
        return {"method": config.method.name, "dataset": config.dataset.name, "share": self.share}


def prepare(
    preset: str | None,
    given: Mapping[str, Any],
    attacks: Sequence[str],
    defences: Sequence[str],
    share: float,
    seeds: Sequence[int],
    out: Path,
) -> Bench:
    """Checks everything before the first run. Without settings, PromptFL on the embedded federation."""
    for name in attacks:
        if name not in ATTACKS:
            raise unknown("--attacks", name, ATTACKS)
    if not 0 < share < 0.5:
        raise UserError(f"--share = {share:g} must be above 0 and below 0.5")
    base = C.merge(source(preset), {"aggregation": {"malicious": share}}, given, HERE)
    method = C.make(base, {"aggregation": {"name": "mean"}}).method
    for name in attacks:
        if why := ATTACKS[name]().why_not(method.method):
            raise UserError(f'--attacks = "{name}" cannot be tried on "{method.name}": {why}')
    seeded = [{"seed": seed} for seed in seeds] or [{}]
    rules = [{"aggregation": {"name": defence}} for defence in defences or _taken(base)]
    made = [C.make(base, seed, rule) for seed in seeded for rule in rules]
    check_free(out, FILES)
    tried = attacks or [name for name, attack in ATTACKS.items() if not attack().why_not(method.method)]
    return Bench({(config.aggregation.name, config.seed): config for config in made}, tuple(tried), share, out)


def source(preset: str | None) -> Mapping[str, Any]:
    return api.without_compare(C.read(preset)) if preset else USUAL


def check_free(out: Path, name: str) -> None:
    if (out / f"{name}.json").exists():
        raise UserError(f'--out = "{out}" holds {name}.json already: choose another')


def _taken(base: Mapping[str, Any]) -> list[str]:
    """The usual defences that the method can take."""
    found = []
    for name in DEFENCES:
        try:
            C.make(base, {"aggregation": {"name": name}})
        except UserError:
            continue
        found.append(name)
    return found


def execute(bench: Bench, console: Console) -> list[Cell]:
    cells = []
    for (defence, seed), config in bench.configs.items():
        without = bench.out / f"{NONE}-{defence}-seed{seed}"
        for name in (NONE, *bench.attacks):
            attack = ATTACKS[name]() if name != NONE else Attack()
            folder = bench.out / f"{name}-{defence}-seed{seed}"
            honest, accuracy, weights = _run(config, attack, bench.share, folder)
            hits = [_success(attack, run, honest) for run in (folder, without)]
            cell = Cell(name, defence, seed, accuracy, *hits, *weights)
            console.print(cell.sentence, highlight=False)
            cells.append(cell)
    texts = {".md": outcome.table(cells), ".html": page(cells, bench.about)}
    outcome.write(bench.out, FILES, cells, bench.about, texts)
    return cells


def malicious(clients: int, share: float, seed: int) -> list[int]:
    """Which clients are, at least one."""
    count = max(1, int(share * clients + 1e-9))
    return sorted(rng(seed, "malicious").choice(clients, count, replace=False).tolist())


def _run(
    config: C.Config, attack: Attack, share: float, folder: Path
) -> tuple[list[int], float, tuple[float | None, ...]]:
    """-> honest clients, their mean test accuracy, and under DP2FL what malicious ones weigh"""
    bad: list[int] = []
    weighed: list[Weighed] = []

    def engine(parts: build.Parts, path: Path) -> Clients:
        bad[:] = malicious(len(parts.federation.sites), share, config.seed)
        clients = attack.clients(parts, path, bad)
        if not isinstance(parts.method, Dp2fl):
            return clients
        weighed.append(Weighed(clients, parts, bad))
        return weighed[0]

    rows = api.execute(api.RunPlan(config, folder), engine=engine).numbers["clients"]["aggregated"]
    honest = [row for row in rows if row["client"] not in bad and row["accuracy"] is not None]
    accuracy = float(np.mean([row["accuracy"] for row in honest]))
    return [row["client"] for row in honest], accuracy, weighed[0].weights if weighed else ()


def _success(attack: Attack, folder: Path, clients: Sequence[int]) -> float | None:
    with closing(Opened(folder)) as run:
        return attack.success(run, clients)
