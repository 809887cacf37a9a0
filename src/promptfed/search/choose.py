"""choose(): which method, with which learning rates, suits a federation, in a budget of minutes.

Successive halving on validation data. The first rounds of every candidate tell what its rounds cost; one that could not
complete a third of its run within the whole budget is left out. The others are tried with several learning rates, for a
ninth of the rounds, the best of them for a third, and the best of those for all, as far as the time allows.

DIR/METHOD-xFACTOR/   each candidate: an ordinary run, without its heavy files
DIR/choice.json       the ranking
DIR/chosen.toml       the winner, for promptfed run
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Rich

from .. import files
from .. import methods as M
from ..errors import UserError
from ..models import CLIP, Model, ViT
from ..runs import api, build, dryrun, record, statistics
from ..runs import config as C
from ..runs.rows import check_taken
from ..runs.sections import separated
from . import space as S
from . import workers
from .board import Board, percent
from .workers import Ended, Job, Pool, Round

RANKING, CHOSEN, LOG = "choice.json", "chosen.toml", "workers.log"
# Different ideas, cheap ones first: nothing trained, a head, no federation, a shared prompt, private heads, low-rank
# updates, prompts of groups, personal prompts that the server makes.
_FOR_CLIP = ("zero-shot", "class-mean", "promptfl", "local+promptfl", "tpfl", "fedprox+maple")
_FOR_VIT = ("class-mean", "head-tune", "local+head", "fedvpt", "fedper+vpt", "flexlora", "sgpt", "pfedpg")
_FROM_SCRATCH = ("local", "fedavg", "fedper", "fedavg+ft", "pfedpt")
_FACTORS = (1.0, 3.0, 1 / 3, 10.0, 0.1)  # of all learning rates of a method
_PROBE = 2  # rounds that tell what a round costs: the first one also fills caches
_RUNGS = (9, 3, 1)  # rounds are divided by
_LEAST = 3  # so many times the budget a whole run may take: the race compares what rounds there are time for
_SAFE = 0.85  # of the time that is left may be planned for


@dataclass
class Arm:
    """A candidate with some learning rates."""

    name: str
    factor: float
    config: C.Config
    folder: Path
    vals: dict[int, dict[int, float]] = field(default_factory=dict)  # by round: each client's validation accuracy
    done: int = 0  # rounds
    train: float = 0.0  # seconds of the last round
    evaluate: float = 0.0

    @property
    def rates(self) -> dict[str, float]:
        return S.rates(self.config)

    def value(self, round: int | None = None) -> float:
        """The mean over clients after a round, by default the last one that was evaluated."""
        found = self.vals.get(max(self.vals) if round is None else round)
        return float(np.mean(list(found.values()))) if found else 0.0


@dataclass(frozen=True)
class Ranked:
    """A method with its best learning rates, and its distance to the leader after the last round that both have."""

    method: str
    rates: dict[str, float]
    rounds: int
    val: float
    behind: statistics.Difference | None  # the leader minus this; None: it is the leader, or there is one client
    tried: int = 1  # learning rates
    edge: str = ""  # highest or lowest, if the best one is at an end of those that were tried

    @property
    def word(self) -> str:
        if self.behind is None:
            return ""
        if self.behind.high < 0:
            return "ahead then, given up later"
        return "behind" if self.behind.low > 0 else "cannot be told apart"


@dataclass(frozen=True)
class Chosen:
    """What choose() has found. `file` is for run()."""

    file: Path
    ranking: list[Ranked]  # the first one is chosen
    left_out: dict[str, str]  # method -> why
    rounds: int  # of a whole run
    seconds: float

    def sentences(self) -> list[str]:
        """The choice, in words."""
        first, *others = self.ranking
        best = f"{first.method} ({S.words(first.rates)})" if first.rates else first.method
        after = f"after {first.rounds} of {self.rounds} rounds"
        said = [f"chosen: {best}, validation accuracy {percent(first.val)} {after}"]
        if first.edge:
            said.append(f"Its learning rate is the {first.edge} of {first.tried} tried: a further one may be better.")
        if any(one.tried > 1 for one in self.ranking):
            most = max(one.tried for one in self.ranking)
            said.append(
                f"Accuracies are the best of up to {most} learning rates on the same validation data, one seed."
            )
        alike = [one.method for one in others if one.behind is None or one.word != "behind"]
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
    begun = time.monotonic()
    workers.check(plan.config)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with Pool(plan.config.engine.device, plan.folder / LOG) as pool:
        race = _Race(plan, pool, begun)
        with Board(console, race.table) as board:
            race.board = board
            race.run()
    ranking = race.ranking()
    first = next(arm for arm in race.arms if arm.name == ranking[0].method and arm.rates == ranking[0].rates)
    given = plan.config.complete()
    winner = {**first.config.complete(), "eval": given["eval"], "engine": given["engine"], "rounds": given["rounds"]}
    files.write(plan.folder / CHOSEN, C.dump(winner).encode())
    found = Chosen(plan.folder / CHOSEN, ranking, race.left_out, plan.config.rounds, time.monotonic() - begun)
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
    return execute(prepare(preset, settings, methods=methods, minutes=minutes, out=Path(out)))


class _Race:
    """Successive halving against the clock."""

    def __init__(self, plan: ChoosePlan, pool: Pool, begun: float) -> None:
        self._plan, self._pool, self._until = plan, pool, begun + 60 * plan.minutes
        self.board: Board = Board(None, self.table)
        self.left_out = dict(plan.left_out)
        self.arms = [self._arm(name, 1.0) for name in plan.candidates]
        self._load = (
            60.0 * plan.minutes
        )  # seconds before a run's first round: the least so far, as the first one is slow

    def _arm(self, name: str, factor: float) -> Arm:
        config = self._plan.candidates[name]
        scaled = {key: float(f"{factor * rate:.4g}") for key, rate in S.rates(config).items()}
        folder = self._plan.folder / f"{name.replace(':', '.').replace('/', '-')}-x{factor:.2g}"
        return Arm(name, factor, S.overlaid(config, scaled), folder)

    def _cost(self, arm: Arm, rounds: int) -> float:
        """Expected seconds to go on to this round."""
        return self._load + (rounds - arm.done) * arm.train + arm.evaluate if rounds > arm.done else 0.0

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def run(self) -> None:
        rounds = self._plan.config.rounds
        self._probe()
        for arm in self.arms:
            if not arm.vals:
                begun = (arm.folder / "config.toml").exists()
                why = "its first round did not end in half of the budget" if begun else "its turn did not come"
                self.left_out.setdefault(arm.name, why)
        self.arms = [arm for arm in self.arms if arm.vals] or self.arms
        self._drop_slow()
        rungs = [max(_PROBE, -(-rounds // share)) for share in _RUNGS]
        rungs = sorted({min(rung, rounds) for rung in rungs})
        racing = _ordered(self.arms) + self._variants(rungs[0], self._left() / len(rungs))
        for i, rung in enumerate(rungs):
            if i:
                racing = _best(racing, -(-len(racing) // 3))
            share = self._left() / (len(rungs) - i)
            chosen, to = self._fitting(racing, rung, share)
            if not chosen:
                break
            racing = chosen
            self._train(racing, to, self._left())
            racing = [arm for arm in racing if to in arm.vals] or racing

    def _probe(self) -> None:
        """A round of each candidate, and a second one of the cheap ones: the first also fills caches."""
        budget = self._left()
        self._train(self.arms, 1, budget / 2)
        cheap = [arm for arm in self.arms if arm.vals and self._cost(arm, _PROBE) < budget / 40]
        self._train(cheap, min(_PROBE, self._plan.config.rounds), budget / 8)

    def _drop_slow(self) -> None:
        """Candidates that could not complete a third of their run within the budget, even alone."""
        rounds, budget = -(-self._plan.config.rounds // _LEAST), 60 * self._plan.minutes
        slow = {arm.name: self._load + rounds * arm.train + arm.evaluate if arm.vals else inf for arm in self.arms}
        for name, seconds in slow.items():
            if budget < seconds < inf:
                about = f"{rounds} of its {self._plan.config.rounds} rounds would take about {_minutes(seconds)}"
                self.left_out[name] = f"too slow for the budget of {_minutes(budget)}: {about}"
        kept = [arm for arm in self.arms if slow[arm.name] <= budget]
        if not kept:
            said = "; ".join(f"{method}: {why}" for method, why in self.left_out.items())
            raise UserError(f"--minutes = {self._plan.minutes:g} is too short for every candidate ({said})")
        self.arms = kept

    def _variants(self, rung: int, share: float) -> list[Arm]:
        """Other learning rates of the candidates, cheap candidates first, as many as there is time for; they become
        arms of the race."""
        left = _SAFE * share * self._pool.size - sum(self._cost(arm, rung) for arm in self.arms)
        tunable = sorted((arm for arm in self.arms if arm.rates), key=lambda arm: arm.train)
        made = []
        for factor in _FACTORS[1:]:
            for arm in tunable:
                other = self._arm(arm.name, factor)
                other.train, other.evaluate = arm.train, arm.evaluate
                if (cost := self._cost(other, rung)) <= left:
                    left -= cost
                    made.append(other)
        self.arms += made
        return made

    def _fitting(self, arms: Sequence[Arm], rung: int, share: float) -> tuple[list[Arm], int]:
        """The first of these arms that can be trained up to a rung in so many seconds; if not even two can, two of them
        up to an earlier round. None where not a single round is possible."""
        able = [arm for arm in arms if self._cost(arm, min(rung, arm.done + 1)) <= _SAFE * share]
        first, least = able or list(arms), min(2, len(able or arms))
        while True:
            costs = [self._cost(arm, rung) for arm in first]
            if sum(costs) <= _SAFE * share * self._pool.size and max(costs) <= _SAFE * share:
                return first, rung
            if len(first) > least:
                first = first[:-1]
            elif rung > max(arm.done for arm in first) + 1:
                rung -= 1
            else:
                return [], 0

    def _train(self, arms: Sequence[Arm], rounds: int, seconds: float) -> None:
        """Up to a round, whose evaluation is read."""
        todo = iter([arm for arm in arms if arm.done < rounds])
        at_work: dict[Path, Arm] = {}

        def take() -> Job | None:
            arm = next(todo, None)
            if arm is None:
                return None
            at_work[arm.folder] = arm
            began = time.monotonic()
            first: list[int] = []

            def on_round(round: Round) -> bool:
                if not first:
                    first.append(round.number)
                    self._load = min(self._load, time.monotonic() - began - round.train - round.evaluate)
                arm.done, arm.train = round.number, round.train
                arm.evaluate = round.evaluate or arm.evaluate
                self.board.draw()
                return True

            config = C.make({**arm.config.complete(), "rounds": rounds})
            return Job(workers.as_trial(config, every=rounds), arm.folder, on_round)

        def end(job: Job, ended: Ended) -> None:
            arm = at_work.pop(job.folder)
            if ended.error and arm.factor == 1.0:
                self.left_out[arm.name] = str(ended.error)
            if ended.how == "done":
                rows = record.read_lines(job.folder)[-1]["aggregated"]["clients"]
                arm.vals[rounds] = {row["client"]: row["val_accuracy"] for row in rows if row["n_val"]}
                said = f"validation {percent(arm.value())}"
                self.board.say(f"{arm.name}  {S.words(arm.rates)}  round {arm.done}  {said}")

        self._pool.run(take, end, seconds)

    def ranking(self) -> list[Ranked]:
        """One line per method: those that were trained longer are before those that were given up earlier."""
        known = [arm for arm in self.arms if arm.vals]
        if not known:
            raise UserError("; ".join(f"{method}: {why}" for method, why in self.left_out.items()))
        order = sorted(known, key=lambda arm: (-max(arm.vals), -arm.value(), abs(np.log(arm.factor))))
        best = list({arm.name: arm for arm in reversed(order)}.values())[::-1]
        best.sort(key=order.index)
        found = []
        for arm in best:
            behind = None if arm is best[0] else _behind(best[0], arm)
            factors = sorted(other.factor for other in known if other.name == arm.name)
            ends = {factors[0]: "lowest", factors[-1]: "highest"} if len(factors) > 1 else {}
            tried = len(factors), ends.get(arm.factor, "")
            found.append(Ranked(arm.name, arm.rates, max(arm.vals), arm.value(), behind, *tried))
        return found

    def table(self) -> Rich:
        shown = Rich(title="choosing on validation data", title_justify="left")
        for header in ("method", "with", "round", "validation", "s per round"):
            shown.add_column(header, justify="left" if header in ("method", "with") else "right", overflow="fold")
        for arm in sorted(self.arms, key=lambda arm: (-max(arm.vals, default=0), -arm.value() if arm.vals else 0.0)):
            val = percent(arm.value()) if arm.vals else "-"
            shown.add_row(arm.name, S.words(arm.rates), str(arm.done), val, f"{arm.train:.1f}")
        return shown


def _ordered(arms: Sequence[Arm]) -> list[Arm]:
    return sorted((arm for arm in arms if arm.vals), key=lambda arm: -arm.value())


def _best(arms: Sequence[Arm], count: int) -> list[Arm]:
    """The best ones, at most two of a method, and those of at least two methods where there are two."""
    order = _ordered(arms)
    allowed = [arm for i, arm in enumerate(order) if sum(other.name == arm.name for other in order[:i]) < 2]
    kept = allowed[: max(2, count)]
    other = next((arm for arm in allowed if arm.name != allowed[0].name), None)
    if other and all(arm.name == kept[0].name for arm in kept):
        kept = [*kept[:-1], other]
    return kept


def _behind(leader: Arm, arm: Arm) -> statistics.Difference | None:
    """How far an arm is behind the leader after the last round that both were evaluated in, paired over clients."""
    round = max(set(leader.vals) & set(arm.vals), default=None)
    if round is None:
        return None
    ours, theirs = leader.vals[round], arm.vals[round]
    values = np.array([[ours[client] - theirs[client] for client in ours if client in theirs]])
    return statistics.interval(values, np.ones(values.shape[1]))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _complete(found: Chosen) -> dict[str, Any]:
    """choice.json"""
    rows = [
        {"method": one.method, "rates": one.rates, "rounds": one.rounds, "val": one.val}
        | ({"leader_minus_this": one.behind.complete(), "word": one.word} if one.behind else {})
        for one in found.ranking
    ]
    return {"ranking": rows, "left_out": found.left_out, "rounds": found.rounds, "seconds": found.seconds}


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
