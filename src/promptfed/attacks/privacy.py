"""What an observer of clients' updates, such as the server, learns about their data: with and without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ..aggregation.base import change_of, seen
from ..analysis.labels import EACH, balanced, cosine, inferred
from ..analysis.opened import Opened, unprompted
from ..clients.frozen import normalisation
from ..errors import UserError
from ..models import CLIP
from ..models.vit import ViT
from ..params import Params
from ..phases import Update
from ..runs import api, build
from ..runs import config as C
from . import membership, outcome, update_inversion
from .bench import HERE, check_free, source
from .clients import Malicious
from .embedding_inversion import invert

FILES = "leaks"  # what the tables are called
_UNEQUAL = {"partition": {"name": "dirichlet", "alpha": 0.3, "clients": 10}}  # equal labels have nothing to leak
_NOISE = {"privacy": {"clip": 0.05, "noise": 4.0}}
_SAMPLES = 16  # whose updates are inverted


@dataclass(frozen=True)
class Leak:
    """One number of one attack."""

    attack: str
    number: str
    value: float
    guess: float  # the same number without the update
    low: float | None = None  # the 95 % interval of the value, where there is one
    high: float | None = None
    noise: float = 0.0  # privacy.noise
    epsilon: float | None = None  # what is guaranteed; None: nothing


@dataclass(frozen=True)
class Plan:
    configs: tuple[C.Config, ...]  # without and with noise
    out: Path


def prepare(preset: str | None, given: Mapping[str, Any], out: Path) -> Plan:
    """Checks everything before the first run. Without settings, PromptFL on the embedded federation."""
    base = C.merge(source(preset), {} if preset else _UNEQUAL, given, HERE)
    noised = C.make(C.merge(_NOISE, base))
    clear = C.make({**noised.complete(), "privacy": {}})  # noise changes defaults, such as method.standardise
    if not noised.privacy.noise:
        raise UserError("privacy.noise = 0 protects nothing: --privacy compares a run without noise to one with it")
    check_free(out, FILES)
    return Plan((clear, noised), out)


def execute(plan: Plan, console: Console) -> list[Leak]:
    leaks = []
    for config in plan.configs:
        for leak in _leaks(config, plan.out / f"noise-{config.privacy.noise:g}"):
            console.print(sentence(leak), highlight=False)
            leaks.append(leak)
    about = {"method": plan.configs[0].method.name, "dataset": plan.configs[0].dataset.name}
    outcome.write(plan.out, FILES, leaks, about, {".md": table(leaks)})
    return leaks


class _Overheard(Malicious):
    """Remembers the updates of the last round, as they were sent."""

    last: Sequence[Update] = ()

    def forged(self, updates: Sequence[Update], round: int) -> list[Update]:
        self.last = [update for update in updates if not update.error]
        return list(updates)


def _leaks(config: C.Config, folder: Path) -> list[Leak]:
    heard: list[_Overheard] = []

    def engine(parts: build.Parts, path: Path) -> _Overheard:
        heard.append(_Overheard(build.clients(parts, path), parts, ()))
        return heard[0]

    stated = api.execute(api.RunPlan(config, folder), engine=engine).numbers.get("privacy", {})
    with closing(Opened(folder)) as run:
        draws = config.seed, config.rounds
        known = {update.client: revealed(run.parts, update, draws) for update in heard[0].last}
        found = [*_membership(run, known), *_labels(run, known), *_inversion(run)]
    return [replace(leak, noise=config.privacy.noise, epsilon=stated.get("epsilon")) for leak in found]


def revealed(parts: build.Parts, update: Update, draws: tuple[int, int]) -> Params:
    """The parameters that an update tells: what was sent to the client, and its change. What is private keeps its
    initial value."""
    method, init = parts.method, parts.init
    still, down = change_of(method, init, update, draws).still, seen(update, draws).down
    moved = {name: down[name] + (p - still[name]) for name, p in update.up.items() if name in down}
    return method.start(init, {**down, **moved}, {}, {})


def _membership(run: Opened, known: Mapping[int, Params]) -> list[Leak]:
    if not known:
        return []
    sent = membership.interval([membership.losses(run, client, params) for client, params in known.items()])
    shared = membership.interval([membership.losses(run, client, run.own(client)[1]) for client in known])
    return [
        Leak("membership, by a client's update", "AUC", sent[0], 0.5, *sent[1:]),
        Leak("membership, by the aggregated model", "AUC", shared[0], 0.5, *shared[1:]),
    ]


def _labels(run: Opened, known: Mapping[int, Params]) -> list[Leak]:
    """As the analysis `leakage`, of the updates that were really sent."""
    index = balanced(run, EACH)
    samples, labels = run.host.samples(index), run.federation.dataset.labels[index]
    counts = run.federation.label_counts("train")
    tuning = unprompted(run.method.tuning)
    near = [
        cosine(inferred(run.probabilities(run.work(client), params, samples, tuning), labels), counts[client])
        for client, params in known.items()
    ]
    blind = [cosine(np.ones(counts.shape[1]), counts[client]) for client in known]
    return [Leak("label distribution, by a client's update", "cosine", float(np.mean(near)), float(np.mean(blind)))]


def _inversion(run: Opened) -> list[Leak]:
    parts = run.parts
    index = np.concatenate([site.train for site in parts.federation.sites])[
        :: max(1, len(run.federation.dataset) // 64)
    ]
    index, noise = index[:_SAMPLES], parts.config.privacy
    found = update_inversion.recover(parts, run.params(0), index, noise if noise.on else None)
    rows: list[Leak] = [
        Leak("label of an update by one sample", "right", found.labels, 1 / run.model.classes),
        Leak("image of an update by one sample", "squared error", found.error, found.random),
    ]
    tower = run.model.image_tower if isinstance(run.model, CLIP) else None
    if isinstance(tower, ViT) and not noise.on:  # DP2FL, which sends embeddings, has no privacy.noise
        mean, std = normalisation(run.model, run.federation.dataset, parts.device)
        pixels = torch.from_numpy(run.federation.dataset.images[index]).to(parts.device).float()
        hidden = tower.embed(run.model.weights, (pixels - mean) / std)
        error = (invert(tower, run.model.weights, hidden) * std + mean - pixels).square().mean() / 255**2
        rows.append(Leak("image of a patch embedding (DP2FL)", "squared error", float(error), found.random))
    return rows


def sentence(leak: Leak) -> str:
    noise = f"noise {leak.noise:g}" if leak.noise else "without noise"
    return f"{leak.attack}, {noise}: {leak.number} {_value(leak)} (by guessing {leak.guess:.3g})"


def _value(leak: Leak) -> str:
    interval = "" if leak.low is None else f" [{leak.low:.3f}, {leak.high:.3f}]"
    return f"{leak.value:.3g}{interval}" if leak.value < 0.001 else f"{leak.value:.3f}{interval}"


def table(leaks: Sequence[Leak]) -> str:
    """As Markdown: a column without noise, one with it."""
    columns = {(leak.noise, leak.epsilon): None for leak in leaks}
    heads = [f"noise {noise:g}, epsilon {epsilon:.3g}" if epsilon else "without noise" for noise, epsilon in columns]
    lines = [f"| attack | number | by guessing | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for attack in dict.fromkeys(leak.attack for leak in leaks):
        own = {leak.noise: leak for leak in leaks if leak.attack == attack}
        first = next(iter(own.values()))
        cells = [_value(own[noise]) if noise in own else "–" for noise, _ in columns]
        lines.append(f"| {attack} | {first.number} | {first.guess:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
