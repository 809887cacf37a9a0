"""choose(): which method, with which learning rates, suits a federation, in a budget of minutes.

The candidates run a race on validation data (race.py); this module has what is given, and what is told of the end.

DIR/METHOD-xFACTOR/   each candidate: an ordinary run, without its heavy files
DIR/choice.json       the ranking
DIR/chosen.toml       the winner, for promptfed run
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Rich

from .. import files
from .. import methods as M
from ..errors import UserError
from ..models import CLIP, Model, ViT
from ..runs import api, build, dryrun
from ..runs import config as C
from ..runs.rows import check_taken
from ..runs.sections import separated
from . import space as S
from . import workers
from .board import Board, percent
from .race import ALIKE, EARLIER, Race, Ranked
from .workers import Pool

RANKING, CHOSEN, LOG = "choice.json", "chosen.toml", "workers.log"
# Different ideas, cheap ones first: nothing trained, a head, no federation, a shared prompt, private heads, low-rank
# updates, prompts of groups, personal prompts that the server makes.
_FOR_CLIP = ("zero-shot", "class-mean", "promptfl", "local+promptfl", "tpfl", "fedprox+maple")
_FOR_VIT = ("class-mean", "head-tune", "local+head", "fedvpt", "fedper+vpt", "flexlora", "sgpt", "pfedpg")
_FROM_SCRATCH = ("local", "fedavg", "fedper", "fedavg+ft", "pfedpt")


@dataclass(frozen=True)
class Chosen:
    """What choose() has found. `file` is for run()."""

    file: Path
    ranking: list[Ranked]  # the first one is chosen
    left_out: dict[str, str]  # method -> why
    rounds: int  # of a whole run
    seconds: float
    stopped: bool = False  # by Ctrl-C, before the race was over

    def sentences(self) -> list[str]:
        """The choice, in words."""
        first, *others = self.ranking
        best = f"{first.method} ({S.words(first.rates)})" if first.rates else first.method
        after = f"after {first.rounds} of {self.rounds} rounds"
        said = [f"chosen: {best}, validation accuracy {percent(first.val)} {after}"]
        if self.stopped:
            said.insert(0, f"Stopped after {self.seconds / 60:.1f} min: the ranking is that of an unfinished race.")
        if first.edge:
            said.append(f"Its learning rate is the {first.edge} of {first.tried} tried: a further one may be better.")
        if any(one.tried > 1 for one in self.ranking):
            most = max(one.tried for one in self.ranking)
            said.append(
                f"Accuracies are the best of up to {most} learning rates on the same validation data, one seed."
            )
        ahead = [one.method for one in others if one.word == EARLIER]
        if ahead:
            said.append(f"After fewer rounds {', '.join(ahead)} had been ahead of it.")
        alike = [one.method for one in others if one.behind is None or one.word == ALIKE]
        if alike:
            said.append(
                f"The validation data cannot tell it from {', '.join(alike)}: more clients, data or time might."
            )
        said += [f"left out: {method}: {why}" for method, why in self.left_out.items()]
        return said


@dataclass(frozen=True)
class ChoosePlan:
    config: C.Config
    candidates: dict[str, C.Config]
    left_out: dict[str, str]
    minutes: float
    folder: Path
    pretrained: bool = True

    def sentence(self) -> str:
        """What is tried, and what is not."""
        said = f"candidates on {self.config.backbone.name}: {', '.join(self.candidates)}"
        if self.pretrained:
            return said
        return f"{said}; all weights from scratch: set backbone.name to a pre-trained model to try prompts and heads"


def prepare(
    preset: str | Path | None,
    settings: Mapping[str, Any],
    *,
    methods: Sequence[str] = (),
    minutes: float = 10.0,
    out: Path,
) -> ChoosePlan:
    """Reads and checks everything before the first round."""
    if not isinstance(minutes, int | float) or not 0 < minutes < inf:
        raise UserError(f"--minutes = {str(minutes).removesuffix('.0')} must be greater than 0, and finite")
    if out.exists() and any(out.iterdir()):
        raise UserError(f'--out = "{out}" is not empty; choose another --out')
    source = C.read(preset) if preset else {}
    file, given = api.without_compare(source), C.undot(settings.items())
    if "name" in given.get("method", {}):
        raise UserError(f'method.name = "{given["method"]["name"]}" is what is chosen: name candidates with --methods')
    # Settings of a method are for those candidates that have them, and protocols depend on the method.
    bare = [{key: value for key, value in table.items() if key not in ("method", "eval")} for table in (file, given)]
    wanted = list(dict.fromkeys(separated(methods)))
    first = C.merge(*bare, {"method": {"name": wanted[0]}} if wanted else {})
    config = C.make(C.fitted(first, wanted))
    model = dryrun.sketch(config, dryrun.placeholder(config.dataset, config.backbone.name))
    usual = _usual(model)
    wanted = wanted or list(usual)
    check_taken([given], {key for name in wanted for key in M.fields(name)})
    fitting, left_out = {}, {}
    for name in wanted:
        try:
            fitting[name] = C.make(C.fitted(C.merge(file, given, {"method": {"name": name}}), wanted))
            if fitting[name].method.method.uses_validation:
                raise UserError(f'"{name}" uses validation data in training, and candidates are ranked on these')
            build.initial(fitting[name], model)
        except RuntimeError:  # it looks at values, which a sketch has not: the run will tell
            continue
        except UserError as error:
            if methods:
                raise
            fitting.pop(name, None)
            left_out[name] = str(error)
    if not fitting:
        raise UserError(f'backbone.name = "{config.backbone.name}": no candidate fits it; name some with --methods')
    config = next((one for one in fitting.values() if not one.method.method.reference), next(iter(fitting.values())))
    return ChoosePlan(config, fitting, left_out, minutes, out, bool(methods) or usual != _FROM_SCRATCH)


def _usual(model: Model) -> tuple[str, ...]:
    """The candidates for a backbone. Prompts and heads alone are of no use in one that is not pre-trained."""
    if isinstance(model, CLIP):
        return _FOR_CLIP
    return _FOR_VIT if isinstance(model, ViT) and model.preprocess else _FROM_SCRATCH


def execute(plan: ChoosePlan, console: Console | None = None) -> Chosen:
    """Ctrl-C ends the race where it is."""
    begun = time.monotonic()
    workers.check(plan.config)
    plan.folder.mkdir(parents=True, exist_ok=True)
    stopped = False
    with Pool(plan.config.engine.device, plan.folder / LOG) as pool:
        race = Race(plan.candidates, plan.config.rounds, 60 * plan.minutes, plan.folder, pool, begun)
        with Board(console, race.table) as board:
            race.board = board
            try:
                race.run()
            except KeyboardInterrupt:
                tried = {arm.name for arm in race.arms if arm.vals}
                if not tried:
                    raise
                stopped = True
                for name in plan.candidates:
                    if name not in tried:
                        race.left_out.setdefault(name, "its first round was not completed")
    ranking = race.ranking()
    first = next(arm for arm in race.arms if arm.name == ranking[0].method and arm.rates == ranking[0].rates)
    given = plan.config.complete()
    winner = {**first.config.complete(), "eval": given["eval"], "engine": given["engine"], "rounds": given["rounds"]}
    files.write(plan.folder / CHOSEN, C.dump(winner).encode())
    left_out = {**plan.left_out, **race.left_out}
    found = Chosen(
        plan.folder / CHOSEN, ranking, left_out, plan.config.rounds, time.monotonic() - begun, stopped=stopped
    )
    files.write(plan.folder / RANKING, (json.dumps(_complete(found), indent=1) + "\n").encode())
    for arm in race.arms:
        workers.trim(arm.folder)
    return found


def choose(
    preset: str | Path | None = None,
    *,
    methods: Sequence[str] = (),
    minutes: float = 10.0,
    out: str | Path,
    **settings: Any,
) -> Chosen:
    """Finds the method that suits a federation best, with its learning rates, on validation data and within a budget of
    minutes; writes a file for run(). By default the candidates are methods that fit the backbone.

    choose(minutes=10, out="runs/choice", dataset="photos/", partition="domain", backbone="vit-mini")
    """
    found = execute(prepare(preset, settings, methods=methods, minutes=minutes, out=Path(out)))
    if found.stopped:  # what there is has been written
        raise KeyboardInterrupt
    return found


def _complete(found: Chosen) -> dict[str, Any]:
    """choice.json"""
    rows = [
        {"method": one.method, "rates": one.rates, "rounds": one.rounds, "val": one.val}
        | ({"leader_minus_this": one.behind.complete(), "word": one.word} if one.behind else {})
        for one in found.ranking
    ]
    return {
        "ranking": rows,
        "left_out": found.left_out,
        "rounds": found.rounds,
        "seconds": found.seconds,
        "stopped": found.stopped,
    }


def ranking(found: Chosen) -> Rich:
    """For the terminal."""
    title = "validation accuracy; behind the leader: paired over clients, with a 95 % interval"
    shown = Rich(title=title, title_justify="left")
    for header in ("method", "with", "rounds", "validation", "behind the leader", ""):
        shown.add_column(header, justify="left" if header in ("method", "with", "") else "right", overflow="fold")
    for one in found.ranking:
        d = one.behind
        gap = f"{100 * d.mean:.1f} ({100 * d.low:.1f} to {100 * d.high:.1f})" if d else "-"
        shown.add_row(one.method, S.words(one.rates), str(one.rounds), percent(one.val), gap, one.word)
    return shown
