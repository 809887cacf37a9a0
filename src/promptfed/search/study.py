"""The trials of one row: proposed by Optuna and pruned, or a fixed grid where it is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from scipy.stats import qmc

from ..runs import record
from .space import Space
from .workers import objective

JOURNAL = "study.journal"
_FULL = 4  # trials of a row before any is pruned, and that are fixed


@dataclass(frozen=True)
class Trial:
    number: int
    values: dict[str, Any]
    state: Literal["running", "done", "pruned", "failed"] = "running"
    value: float | None = None


class Study(Protocol):
    """A fixed number of trials of one row. The first one has the row's own values, where the space holds them."""

    def ask(self) -> Trial | None:
        """The next trial, first those that were interrupted; None if there are no more."""

    def report(self, trial: Trial, round: int, value: float) -> bool:
        """After a round: whether the trial goes on."""

    def tell(self, trial: Trial, state: Literal["done", "pruned", "failed"], value: float | None) -> None: ...

    def trials(self) -> list[Trial]: ...


def folder_of(folder: Path, number: int) -> Path:
    return folder / f"trial-{number:03}"


def best(study: Study) -> Trial | None:
    """The first of those with the highest value."""
    done = [trial for trial in study.trials() if trial.state == "done" and trial.value is not None]
    return max(done, key=lambda trial: (trial.value, -trial.number), default=None)


def has_optuna() -> bool:
    try:
        import optuna  # noqa: F401
    except ImportError:
        return False
    return True


class Grid(Study):
    """Points that fill the space evenly."""

    def __init__(self, folder: Path, space: Space, own: Mapping[str, Any], count: int) -> None:
        self._trials = []
        for number, values in enumerate(_spread(space, own, count)):
            numbers = record.read_result(folder_of(folder, number))
            trial = Trial(number, values)
            self._trials.append(replace(trial, state="done", value=objective(numbers)) if numbers else trial)
        self._next = iter([trial for trial in self._trials if trial.state == "running"])
        self._asked = {trial.number for trial in self._trials if trial.state == "done"}

    def ask(self) -> Trial | None:
        trial = next(self._next, None)
        if trial:
            self._asked.add(trial.number)
        return trial

    def report(self, trial: Trial, round: int, value: float) -> bool:
        return True

    def tell(self, trial: Trial, state: Literal["done", "pruned", "failed"], value: float | None) -> None:
        self._trials[trial.number] = replace(trial, state=state, value=value)

    def trials(self) -> list[Trial]:
        return [trial for trial in self._trials if trial.number in self._asked]


class Optuna(Study):
    """A few points that fill the space evenly, then tree-structured Parzen estimators; a trial below the median of the
    others after as many rounds is pruned. All rows share one journal file."""

    def __init__(
        self, folder: Path, space: Space, own: Mapping[str, Any], count: int, name: str, rounds: int, seed: int
    ) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._space, self._count, self._folder = optuna, space, count, folder
        journal = folder.parent / JOURNAL
        # Of a process that was killed while it wrote: tune() has locked the folder, so nobody else is writing.
        journal.with_name(f"{JOURNAL}.lock").unlink(missing_ok=True)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        study = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True)
        begun = study.get_trials(deepcopy=False)
        if not begun:
            for values in _spread(space, own, _FULL):
                study.enqueue_trial(values)
        # Resumed with another seed: the same one would draw the same trials again.
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=_FULL, seed=(1000 * seed + len(begun)) % 2**32)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=_FULL, n_warmup_steps=rounds // 4)
        self._study = study
        running = optuna.trial.TrialState.RUNNING
        self._left = [optuna.trial.Trial(study, trial._trial_id) for trial in begun if trial.state == running]
        self._live: dict[int, Any] = {}

    def ask(self) -> Trial | None:
        if self._left:
            asked = self._left.pop(0)
        elif len(self.trials()) < self._count:
            asked = self._study.ask()
        else:
            return None
        values = {key: each.suggest(asked, key) for key, each in self._space.items()}
        asked.set_user_attr("folder", folder_of(self._folder, asked.number).name)
        self._live[asked.number] = asked
        return Trial(asked.number, values)

    def report(self, trial: Trial, round: int, value: float) -> bool:
        live = self._live[trial.number]
        live.report(value, round)
        return not live.should_prune()

    def tell(self, trial: Trial, state: Literal["done", "pruned", "failed"], value: float | None) -> None:
        states = self._optuna.trial.TrialState
        ends = {"done": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        self._study.tell(self._live.pop(trial.number), value if state == "done" else None, ends[state])

    def trials(self) -> list[Trial]:
        states = self._optuna.trial.TrialState
        pairs = (
            (states.COMPLETE, "done"),
            (states.PRUNED, "pruned"),
            (states.FAIL, "failed"),
            (states.RUNNING, "running"),
        )
        words: dict[Any, Any] = dict(pairs)
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state in words:
                values = {key: self._space[key].rounded(value) for key, value in trial.params.items()}
                found.append(Trial(trial.number, values, words[trial.state], trial.value))
        return found


def _spread(space: Space, own: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The row's own values, then Halton points, which fill the space evenly however many there are. The first two of
    them, a corner and the middle, are left out: own values usually are in the middle."""
    first = [dict(own)] if _holds(space, own) else []
    points = qmc.Halton(len(space), scramble=False).random(count + 2)[2:].tolist()
    drawn = [{key: space[key].at(u) for key, u in zip(space, point, strict=True)} for point in points]
    return [*first, *drawn][:count]


def _holds(space: Space, own: Mapping[str, Any]) -> bool:
    return all(key in own and space[key].holds(own[key]) for key in space)
