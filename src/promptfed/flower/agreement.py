"""What a site answers: only what the agreed plan lets a server ask, once in a run, with names and shapes as agreed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from .. import files
from ..clients.messages import Enroll, Evaluate, Second, SecureTask, Task, Train
from ..errors import UserError
from ..method import Method
from ..models import Model
from ..params import Params
from ..server import Plan

ASKED = "asked.json"  # in a run's folder at a site


class _Asked(BaseModel):
    """What a server has asked in a run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: int = 0  # Flower's number of the run: one that is resumed has another, and repeats its last round
    tasks: dict[str, int] = {}  # how often, of this number
    evaluations: int = 0  # of all numbers


@dataclass(frozen=True)
class Agreement:
    """What the agreed plan and method let a server ask.

    `file`: what was asked, kept over restarts of the node.
    `plan`: as agreed now; rounds may be added.
    """

    file: Path
    plan: Callable[[], Plan]
    method: Method
    init: Params
    common: Params | None  # names and shapes of the model that the method has besides the clients' own

    @classmethod
    def of(cls, file: Path, plan: Callable[[], Plan], method: Method, model: Model, init: Params) -> Agreement:
        common = method.common(method.begin(model, init, plan().seed))
        return cls(file, plan, method, init, common)

    def admit(self, run: int, task: Task, down: Params) -> None:
        """Notes a task before it is done. Raises UserError if the plan has no such task, or it was done already."""
        why = self.not_agreed(task) or self.unexpected(task, down)
        if why:
            raise UserError(f"{_named(task)} is refused: {why}")
        held = self.asked()
        tasks = held.tasks if held.run == run else {}
        often = tasks.get(_named(task), 0) + 1
        if often > self._most(task):
            raise UserError(f"{_named(task)} is refused: it has been answered in this run already")
        evaluations = held.evaluations + isinstance(task, Evaluate)
        noted = _Asked(run=run, tasks={**tasks, _named(task): often}, evaluations=evaluations)
        files.write(self.file, noted.model_dump_json().encode(), private=True)

    def asked(self) -> _Asked:
        if not self.file.exists():
            return _Asked()
        try:
            return _Asked.model_validate_json(self.file.read_bytes())
        except ValidationError:
            raise UserError(
                f'"{self.file}" is damaged: it must hold what was asked in this run; deleting the run\'s folder, with '
                "its private parameters, starts it anew"
            ) from None

    def not_agreed(self, task: Task) -> str:
        """Why the plan has no such task; empty if it has."""
        plan, kind = self.plan(), type(self.method)
        if isinstance(task, Enroll):
            return ""
        round = task.as_of - 1 if isinstance(task, Evaluate) else task.round
        if not 1 <= round <= plan.rounds:
            return f"rounds = {plan.rounds} in consortium.toml"
        secure = plan.secure.aggregation
        if isinstance(task, SecureTask):
            return "" if secure else "secure.aggregation = false in consortium.toml"
        if isinstance(task, Second):
            return "" if kind.receive_second is not Method.receive_second else "the agreed method has no second message"
        if isinstance(task, Train):
            if (task.masks is not None) != secure:
                return f"secure.aggregation = {str(secure).lower()} in consortium.toml"
            trained, agreed = task.score, plan.after_local != "none"
        else:
            trained, agreed = task.after_local, plan.after_local == "all" and round == plan.rounds
            if task.pooled:
                return f'eval.pooled = "{plan.pooled}" in consortium.toml'
        if trained and not agreed:
            return f'eval.after_local = "{plan.after_local}" in consortium.toml'
        if (trained or isinstance(task, Evaluate)) and not plan.evaluates(round):
            return f"eval.every = {plan.eval_every} in consortium.toml"
        return ""

    def unexpected(self, task: Task, down: Params) -> str:
        """What the server must not send: private parameters, or other shapes than agreed; empty if it does not."""
        if not isinstance(task, Train | Evaluate):
            return ""
        # A common model may replace private parameters, for its own scores.
        common = (self.common or {}) if _scores_received(task) else {}
        private = [name for name in self.method.kept(self.init) if name in down and name not in common]
        if private:
            return f"it holds {private[0]}, which is private to the site"
        if type(self.method).uploads is not Method.uploads:  # clients' shapes differ
            return ""
        shapes = {name: {p.shape, common.get(name, p).shape} for name, p in self.init.items() if name in down}
        other = [name for name, agreed in shapes.items() if down[name].shape not in agreed]
        return f"{other[0]} has another shape than agreed" if other else ""

    def _most(self, task: Task) -> int:
        """How often it may be asked in a run: a method may have a common model besides the client's own."""
        return 2 if _scores_received(task) and self.common is not None else 1


def _scores_received(task: Task) -> bool:
    return isinstance(task, Evaluate) and not task.after_local


_WORDS = {
    "train": "training",
    "second": "the second message",
    "keys": "making keys",
    "shares": "sharing keys",
    "unmask": "removing masks",
}


def _named(task: Task) -> str:
    """A task in words, as the sites' engineers read it."""
    if isinstance(task, Enroll):
        return "enrolment"
    if isinstance(task, Evaluate):
        return f"evaluation after round {task.as_of - 1}{' and local training' if task.after_local else ''}"
    return f"{_WORDS[task.ask]} in round {task.round}"
