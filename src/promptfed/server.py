"""run(): the only round loop; step(): one round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from . import Method, Model, Params, State, Update, UserError, aggregation, scoring
from . import params as P
from .aggregation import Aggregation, Rule
from .clients.base import Clients, Notice
from .intake import Intake
from .method import split_once
from .scoring import Scores
from .secure import Secure
from .secure import check_count as check_masked
from .secure.server import MaskedSum
from .seeding import rng

Line = dict[str, Any]  # what is recorded of a round


@dataclass(frozen=True)
class Plan:
    rounds: int
    fraction: float  # of the clients that have training data, sampled every round
    seed: int
    eval_every: int = 1
    # Scores of locally trained models: none, of each round's participants, or at the end also of all clients.
    after_local: Literal["none", "participants", "all"] = "participants"
    # When personal models are scored on all clients' test data: at every evaluation, at the last one, or never.
    pooled: Literal["every", "last", "never"] = "every"
    newcomers: tuple[int, ...] = ()  # clients that are not there from the start
    join_round: int = 0  # the first round they may take part in; 0: they never train, and are only served
    aggregation: Aggregation = field(default_factory=Aggregation)
    secure: Secure = field(default_factory=Secure)

    def evaluates(self, round: int) -> bool:
        return round % self.eval_every == 0 or round == self.rounds

    def train(self, clients: Sequence[int], round: int) -> list[int]:
        """Clients that may be asked to train in a round."""
        there = self.join_round and round >= self.join_round
        return [client for client in clients if there or client not in self.newcomers]

    def chosen(self, sizes: dict[int, int], round: int) -> list[int]:
        """The clients of a round, out of all."""
        there = self.train(list(sizes), round)
        return sample({client: sizes[client] for client in there}, self.fraction, self.seed, round)

    def serve(self, method: Method, clients: Sequence[int], round: int) -> list[int]:
        """Clients that have a model after a round."""
        return list(clients) if method.serves else self.train(clients, round)


class Recorder(Protocol):
    def restore(self) -> tuple[int, State] | None:
        """The last completed round and the server's state after it."""

    def recorded(self) -> Sequence[Line]:
        """The lines of completed rounds."""
        return []

    def begin(self, round: int, clients: Sequence[int]) -> None: ...

    def on_notice(self, notice: Notice) -> None:
        """About a client, within a round or before the first. May be called from any thread."""
        return

    def end(self, line: Line, state: State) -> None:
        """A round is over. Once this returns, it is never trained again."""


def run(method: Method, model: Model, init: Params, clients: Clients, plan: Plan, recorder: Recorder) -> State:
    """All rounds that are not on record yet -> the server's final state."""
    clients.watch(recorder.on_notice)
    restored = recorder.restore()
    if restored:
        done, state = restored
    else:
        done, state = 0, checked(method, "begin", method.begin(model, init, plan.seed))
        state = admit(method, state, clients, plan.train(clients.ids(), 0), 0)
    if plan.secure.aggregation:
        check_masked(len(plan.chosen(clients.sizes(), 1)))
    rule = plan.aggregation.rule()
    if rule:
        aggregation.check_count(plan.aggregation, len(plan.chosen(clients.sizes(), 1)))
        rule.recall(recorder.recorded())
    for round in range(done + 1, plan.rounds + 1):
        begun = time.perf_counter()
        if round == plan.join_round:
            state = admit(method, state, clients, plan.newcomers, round)
        state, line, trained = step(method, init, clients, plan, state, round, recorder.begin, rule)
        line["seconds"] = {"train": time.perf_counter() - begun}
        if plan.evaluates(round):
            begun = time.perf_counter()
            line |= _evaluate(method, model, clients, plan, state, round, trained)
            line["seconds"]["evaluate"] = time.perf_counter() - begun
        recorder.end(line, state)
    return state


def step(
    method: Method,
    init: Params,
    clients: Clients,
    plan: Plan,
    state: State,
    round: int,
    begin: Callable[[int, Sequence[int]], None] = lambda round, chosen: None,
    rule: Rule | None = None,
) -> tuple[State, Line, list[Scores]]:
    """One round -> the server's new state, what is recorded of the round, scores of locally trained models."""
    # 1. Choose clients.
    sizes = clients.sizes()
    chosen = plan.chosen(sizes, round)
    begin(round, chosen)
    # 2. Send each its part of the state; 3. it trains and answers. With secure aggregation, clients share keys before.
    shared, asked = method.shared(init), {client: sizes[client] for client in chosen}
    masked = MaskedSum(plan.secure, clients, asked, shared, plan.seed, round) if plan.secure.aggregation else None
    sent = outgoing(method, state, masked.share() if masked else chosen)
    score = plan.evaluates(round) and plan.after_local != "none"
    intake = Intake(method, state, shared, asked, rule is not None, masked)
    updates, trained = clients.train(sent, round, score, intake.take, masked.masks if masked else None)
    # 4. Leave out what cannot be used.
    used, left_out = screen([*updates, *masked.lost] if masked else updates, chosen)
    why = ""
    if rule and len(used) < rule.needed(len(used)):
        why = f"{len(used)} updates are too few for {rule.name}"
    elif masked and used:
        why = masked.unmask(method, used[0].sent, [u.client for u in used])
    if why:
        left_out += [{"client": u.client, "why": why} for u in used]
        used = []
    line = _line(round, chosen, used, left_out, sum(P.numel(method.uploads(shared, u.client)) for u in used))
    if masked:
        line["bytes"]["up"] += masked.bytes_up
        line["bytes"]["down"] += masked.bytes_down
    if not used:
        return state, line, trained
    # 5. Aggregate. If that is not finite although every update was, the round is as if nobody had answered.
    if rule:
        made, used, line["aggregation"] = aggregation.apply(rule, method, state, init, used, (plan.seed, round))
    else:
        made = intake.aggregate(used)
    complete(method, state, checked(method, "aggregate", made))
    if not P.finite({name: p for name, p in made.items() if p is not state.get(name)}):
        line["left_out"] += [{"client": u.client, "why": "aggregated to something not finite"} for u in used]
        return state, line, trained
    # 6. Send a second message, if the method has one.
    second = method.send_second(made, used)
    if second:
        line["bytes"]["down"] += sum(clients.send_second(second, round).values())
        line["bytes"]["parameters_down"] += sum(map(P.numel, second.values()))
    return made, line, trained


def admit(method: Method, state: State, clients: Clients, joining: Sequence[int], round: int) -> State:
    """First contact with clients: at the start (round 0), or before the given round."""
    hellos: dict[int, Params] = clients.enroll(joining) if method.enrolls else {client: {} for client in joining}
    for client, hello in hellos.items():
        if not P.finite(hello):
            raise UserError(f"client {client} cannot be enrolled: its first message is not finite")
        state = method.admit(state, client, hello, round)
    return state


def _evaluate(
    method: Method, model: Model, clients: Clients, plan: Plan, state: State, round: int, trained: Sequence[Scores]
) -> Line:
    """Scores of the models after a round, by stage; of newcomers apart."""
    served = outgoing(method, state, plan.serve(method, clients.ids(), round))
    wide = plan.pooled == "every" or (plan.pooled == "last" and round == plan.rounds)
    scores = clients.evaluate(served, as_of=round + 1, pooled=wide and method.personal, after_local=False)
    stages: dict[str, Sequence[Scores]] = {"aggregated": scores, "after_local": trained}
    if plan.after_local == "all" and round == plan.rounds:
        there = plan.train(clients.ids(), round)
        able = {client: down for client, down in served.items() if client in there}
        stages["after_local_all"] = clients.evaluate(able, as_of=round + 1, pooled=wide, after_local=True)
    common = method.common(state)
    if common is not None:
        stages["common"] = clients.evaluate(
            dict.fromkeys(served, common), as_of=round + 1, pooled=False, after_local=False
        )
    described = method.describe(state, list(served)).items()
    found: Line = {"server": {key: v if math.isfinite(v) else None for key, v in described}} if described else {}
    for stage, scored in stages.items():
        one_model = method.serves if stage == "common" else stage == "aggregated" and not method.personal
        for new in (False, True):
            part = [s for s in scored if (s.client in plan.newcomers) is new]
            if part:
                found[f"newcomers_{stage}" if new else stage] = {
                    "summary": scoring.summary(part, model.classes, one_model),
                    "passes": sum(s.passes for s in part),
                    "clients": scoring.per_client(part),
                }
    return found


def outgoing(method: Method, state: State, clients: Sequence[int]) -> dict[int, Params]:
    """What each client is sent: one object for clients that are sent the same tensors."""
    sent: dict[int, Params] = {}
    last: Params = {}
    for client in clients:
        down = checked(method, "down", method.down(state, client))
        same = down.keys() == last.keys() and all(p is last[name] for name, p in down.items())
        sent[client] = last = last if same else down
    return sent


def checked(method: Method, hook: str, made: Any) -> Params:
    """The result of a hook, if it is a dict of tensors: a user's own method may have forgotten to return it."""
    where = f"{type(method).__name__}.{hook}() must return a dict of tensors"
    if not isinstance(made, dict):
        raise UserError(f"{where}, not {type(made).__name__}")
    for name, p in made.items():
        if not isinstance(p, Tensor):
            raise UserError(f"{where}, and {name!r} in it is of type {type(p).__name__}")
    return made


def complete(method: Method, state: State, made: State) -> None:
    """Refuses an aggregate that has lost something of the state, or has it in another shape."""
    where = f"{type(method).__name__}.aggregate() must return all of the state"
    for name, old in state.items():
        if name not in made:
            raise UserError(f"{where}, and {name!r} is missing: {{**state, ...}} keeps what it does not change")
        if made[name].shape != old.shape:
            raise UserError(f"{where}, and {name!r} is of shape {tuple(made[name].shape)}, not {tuple(old.shape)}")


def sample(sizes: dict[int, int], fraction: float, seed: int, round: int) -> list[int]:
    """The clients of a round: at least one of those that have training data."""
    able = [client for client, n in sizes.items() if n]
    count = min(len(able), max(1, int(fraction * len(able) + 0.5)))
    return sorted(rng(seed, round, "sample").choice(able, count, replace=False).tolist())


def screen(updates: Sequence[Update], asked: Sequence[int]) -> tuple[list[Update], list[dict[str, Any]]]:
    """Usable updates in the order of clients; and which clients are left out of the round, and why."""
    used, left_out = [], []
    answered = {update.client: update for update in updates}
    for client in sorted(asked):
        update = answered.get(client, Update(client, {}, {}, 0, error="no answer"))
        if update.error:
            left_out.append({"client": client, "why": update.error})
        else:
            used.append(update)
    return used, left_out


def _line(
    round: int, chosen: Sequence[int], used: Sequence[Update], left_out: Sequence[dict[str, Any]], up: int
) -> Line:
    losses = [(u.loss, u.n) for u in used if u.loss is not None]
    samples = sum(n for _, n in losses)
    line: Line = {
        "round": round,
        "clients": list(chosen),
        "left_out": list(left_out),
        "train_loss": sum(loss * n for loss, n in losses) / samples if samples else None,
        "passes": sum(u.passes for u in used),
        "bytes": {
            "clients": len(used),
            "up": sum(u.bytes_up for u in used),
            "down": sum(u.bytes_down for u in used),
            "parameters_up": up,
            # What is sent only once is counted in bytes, not here.
            "parameters_down": sum(P.numel(split_once(u.sent)[0]) for u in used),
        },
    }
    if any(u.moved for u in used):
        line["moved"] = [{"client": u.client, "roles": dict(u.moved)} for u in used]
    return line
