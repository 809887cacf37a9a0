"""What a site answers: only what the agreed plan lets a server ask, once in a run, with names and shapes as agreed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..clients.messages import Answer, Enroll, Evaluate, Second, SecureTask, Task, Train
from ..clients.wire import unpack
from ..errors import UserError
from ..method import Method
from ..models import Model
from ..params import Params
from ..server import Plan
from .audit import AuditLog, listed

_TRAINING = "training"


@dataclass(frozen=True)
class Agreement:
    """What the agreed plan and method let a server ask.

    `log`: what was asked, kept over restarts of the node.
    `run`: its name. `by`: who signs requests.
    `plan`: as agreed now; rounds may be added.
    """

    log: AuditLog
    plan: Callable[[], Plan]
    method: Method
    init: Params
    common: Params | None  # names and shapes of the model that the method has besides the clients' own
    run: str = ""
    by: str = ""

    @classmethod
    def of(
        cls, log: AuditLog, plan: Callable[[], Plan], method: Method, model: Model, init: Params, **about: str
    ) -> Agreement:
        common = method.common(method.begin(model, init, plan().seed))
        return cls(log, plan, method, init, common, **about)

    def admit(self, number: int, task: Task, down: Params, size: int) -> None:
        """Notes a task before it is done. Raises UserError if the plan has no such task, or it was done already.
        `number`: Flower's of the run; one that is resumed has another, and repeats its last round."""
        about = {"run": self.run, "number": number, "task": named(task)}
        why = self.not_agreed(task) or self.unexpected(task, down)
        if not why and self.asked(**about) >= self._most(task):
            why = "it has been answered in this run already"
        if why:
            self.log.append(kind="refused", **about, why=why)
            raise UserError(f"{named(task)} is refused: {why}")
        self.log.append(kind="asked", **about, bytes=size, by=self.by)

    def asked(self, **about: Any) -> int:
        """How often requests of this description were admitted."""
        wanted = {"kind": "asked", **about}.items()
        return sum(all(entry.get(key) == value for key, value in wanted) for entry in self.log.entries())

    def trained(self) -> bool:
        """Whether the site has trained in this run since its folder was made."""
        for entry in reversed([entry for entry in self.log.entries() if entry.get("run") == self.run]):
            if entry["kind"] == "begun" or (entry["kind"] == "left" and entry["task"].startswith(_TRAINING)):
                return bool(entry["kind"] == "left")
        return False

    def left(self, number: int, task: Task, answer: Answer, **released: Any) -> None:
        """Notes what is about to leave the site. `released`: the count of updates under differential privacy."""
        tensors = [name for blob in answer.blobs for name in unpack(blob)[0]]
        heads = [result.model_dump_json(exclude_none=True) for result in answer.results]
        fields = [name for result in answer.results for name in result.model_dump(exclude_none=True)]
        self.log.append(
            kind="left",
            run=self.run,
            number=number,
            task=named(task),
            bytes=sum(map(len, answer.blobs)) + sum(map(len, heads)),
            names=listed([*tensors, *fields]),
            **released,
        )

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
    "train": _TRAINING,
    "second": "the second message",
    "keys": "making keys",
    "shares": "sharing keys",
    "unmask": "removing masks",
}


def named(task: Task) -> str:
    """A task in words, as the sites' engineers read it."""
    if isinstance(task, Enroll):
        return "enrolment"
    if isinstance(task, Evaluate):
        return f"evaluation after round {task.as_of - 1}{' and local training' if task.after_local else ''}"
    return f"{_WORDS[task.ask]} in round {task.round}"
