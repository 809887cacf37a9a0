"""The race of choose(): successive halving on validation data, against the clock.

The first rounds of every candidate tell what its rounds cost; one that could not complete a third of its run within the
whole budget is left out. The others are tried with several learning rates, for a ninth of the rounds; where the best
rate of a leading candidate is the highest or the lowest, further ones follow. The best go on for a third of the rounds,
and the best of those for all, as far as the time allows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np
from rich.table import Table as Rich

from ..errors import UserError
from ..runs import config as C
from ..runs import record, statistics
from . import space as S
from . import workers
from .board import Board, percent
from .workers import Ended, Job, Pool, Round

ALIKE, EARLIER = "cannot be told apart", "ahead then, given up later"
_FACTORS = (1.0, 3.0, 1 / 3, 10.0, 0.1)  # of all learning rates of a method
_PROBE = 2  # rounds that tell what a round costs: the first one also fills caches
_RUNGS = (9, 3, 1)  # rounds are divided by
_LEAST = 3  # so many times the budget a whole run may take: the race compares what rounds there are time for
_SAFE = 0.85  # of the time that is left may be planned for


@dataclass(eq=False)
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
    failed: bool = False

    @property
    def rates(self) -> dict[str, float]:
        return S.rates(self.config)

    def reached(self, last: int) -> int:
        """The last round up to this one that it was evaluated in; 0: none."""
        return max((round for round in self.vals if round <= last), default=0)

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
            return EARLIER
        return "behind" if self.behind.low > 0 else ALIKE


class Race:
    """Successive halving against the clock."""

    def __init__(
        self, candidates: Mapping[str, C.Config], rounds: int, seconds: float, folder: Path, pool: Pool, begun: float
    ) -> None:
        self._candidates, self._rounds, self._seconds, self._folder = candidates, rounds, seconds, folder
        self._pool, self._until = pool, begun + seconds
        self.board: Board = Board(None, self.table)
        self.left_out: dict[str, str] = {}
        self._complete = 1  # the last round that all arms of the race have completed: they are ranked by no later one
        self.arms = [self._arm(name, 1.0) for name in candidates]
        self._load = seconds  # before a run's first round: the least so far, as the first one is slow

    def _arm(self, name: str, factor: float) -> Arm:
        config = self._candidates[name]
        scaled = {key: float(f"{factor * rate:.4g}") for key, rate in S.rates(config).items()}
        folder = self._folder / f"{name.replace(':', '.').replace('/', '-')}-x{factor:.2g}"
        return Arm(name, factor, S.overlaid(config, scaled), folder)

    def _alike(self, arm: Arm, factor: float) -> Arm:
        """With other learning rates; its rounds take as long."""
        return replace(self._arm(arm.name, factor), train=arm.train, evaluate=arm.evaluate)

    def _cost(self, arm: Arm, rounds: int) -> float:
        """Expected seconds to go on to this round."""
        return self._load + (rounds - arm.done) * arm.train + arm.evaluate if rounds > arm.done else 0.0

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def run(self) -> None:
        self._probe()
        for arm in self.arms:
            if not arm.vals:
                begun = (arm.folder / "config.toml").exists()
                why = "its first round did not end in half of the budget" if begun else "its turn did not come"
                self.left_out.setdefault(arm.name, why)
        self.arms = [arm for arm in self.arms if arm.vals] or self.arms
        self._drop_slow()
        rungs = sorted({min(max(_PROBE, -(-self._rounds // share)), self._rounds) for share in _RUNGS})
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
            if any(to not in arm.vals and not arm.failed for arm in racing):  # the time is over
                break
            self._complete = to
            racing = [arm for arm in racing if to in arm.vals] or racing
            if not i:
                racing += self._further(racing, to, self._left() / len(rungs))

    def _probe(self) -> None:
        """A round of each candidate, and a second one of the cheap ones: the first also fills caches."""
        budget = self._left()
        self._train(self.arms, 1, budget / 2)
        cheap = [arm for arm in self.arms if arm.vals and self._cost(arm, _PROBE) < budget / 40]
        self._train(cheap, min(_PROBE, self._rounds), budget / 8)

    def _drop_slow(self) -> None:
        """Candidates that could not complete a third of their run within the budget, even alone."""
        rounds = -(-self._rounds // _LEAST)
        slow = {arm.name: self._load + rounds * arm.train + arm.evaluate if arm.vals else inf for arm in self.arms}
        for name, seconds in slow.items():
            if self._seconds < seconds < inf:
                about = f"{rounds} of its {self._rounds} rounds would take about {_minutes(seconds)}"
                self.left_out[name] = f"too slow for the budget of {_minutes(self._seconds)}: {about}"
        kept = [arm for arm in self.arms if slow[arm.name] <= self._seconds]
        if not kept:
            said = "; ".join(f"{method}: {why}" for method, why in self.left_out.items())
            raise UserError(f"--minutes = {self._seconds / 60:g} is too short for every candidate ({said})")
        self.arms = kept

    def _variants(self, rung: int, share: float) -> list[Arm]:
        """Other learning rates of the candidates, cheap candidates first, as many as there is time for; they become
        arms of the race."""
        left = _SAFE * share * self._pool.size - sum(self._cost(arm, rung) for arm in self.arms)
        tunable = sorted((arm for arm in self.arms if arm.rates), key=lambda arm: arm.train)
        made = []
        for factor in _FACTORS[1:]:
            for arm in tunable:
                other = self._alike(arm, factor)
                if (cost := self._cost(other, rung)) <= left:
                    left -= cost
                    made.append(other)
        self.arms += made
        return made

    def _further(self, racing: Sequence[Arm], rung: int, share: float) -> list[Arm]:
        """Learning rates beyond the best one of a leading candidate where that is the highest or the lowest of its own,
        up to the same round, until it is not or so many seconds are over; they become arms of the race."""
        made: list[Arm] = []
        until = time.monotonic() + share
        while True:
            leading = _best([*racing, *made], -(-len(racing) // 3))
            best = {arm.name: arm for arm in reversed(leading)}
            left = _SAFE * (until - time.monotonic())
            new: list[Arm] = []
            for arm in best.values():
                further = {"highest": 3.0, "lowest": 1 / 3}.get(self._edge(arm))
                other = self._alike(arm, further * arm.factor) if further else arm
                begun = other.folder in {one.folder for one in self.arms}
                costs = [self._cost(one, rung) for one in (*new, other)]
                if not begun and sum(costs) <= left * self._pool.size and costs[-1] <= left:
                    new.append(other)
            if not new:
                return made
            self.arms += new
            self._train(new, rung, until - time.monotonic())
            made += [arm for arm in new if rung in arm.vals]

    def _edge(self, arm: Arm) -> str:
        """highest or lowest, if the learning rate of an arm is at an end of those that were tried."""
        alike = [other for other in self.arms if other.name == arm.name]
        factors = sorted(other.factor for other in alike if other.vals or other.failed)
        return {factors[0]: "lowest", factors[-1]: "highest"}.get(arm.factor, "") if len(factors) > 1 else ""

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
            arm.failed = ended.how == "failed"
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
        known = {arm: arm.reached(self._complete) for arm in self.arms if arm.reached(self._complete)}
        if not known:
            raise UserError("; ".join(f"{method}: {why}" for method, why in self.left_out.items()))
        order = sorted(known, key=lambda arm: (-known[arm], -arm.value(known[arm]), abs(np.log(arm.factor))))
        best = list({arm.name: arm for arm in reversed(order)}.values())[::-1]
        best.sort(key=order.index)
        found = []
        for arm in best:
            behind = None if arm is best[0] else _behind(best[0], arm, self._complete)
            tried = sum(other.name == arm.name for other in known)
            told = (known[arm], arm.value(known[arm]), behind, tried, self._edge(arm))
            found.append(Ranked(arm.name, arm.rates, *told))
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


def _behind(leader: Arm, arm: Arm, last: int) -> statistics.Difference | None:
    """How far an arm is behind the leader after the last round that both were evaluated in, paired over clients."""
    round = max((round for round in leader.vals if round in arm.vals and round <= last), default=None)
    if round is None:
        return None
    ours, theirs = leader.vals[round], arm.vals[round]
    values = np.array([[ours[client] - theirs[client] for client in ours if client in theirs]])
    return statistics.interval(values, np.ones(values.shape[1]))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
