"""run(): the only round loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor

from . import params as P
from . import scoring
from .clients.base import Clients, Notice
from .errors import UserError
from .method import Method, State, split_once
from .models import Model
from .params import Params
from .phases import Update
from .scoring import Scores
from .seeding import rng

Line = dict[str, Any]  # what is recorded of a round


@dataclass(frozen=True)
class Plan:
    rounds: int
    fraction: float  # of the clients that have training data, sampled every round
    seed: int
    eval_every: int = 1
    # Scores of locally trained models: of nobody, of each round's participants, or also of everyone at the end.
    after_local: Literal["none", "participants", "all"] = "participants"
    # When personal models are scored on everybody's test data: at every evaluation, at the last one, or never.
    pooled: Literal["every", "last", "never"] = "every"
    newcomers: tuple[int, ...] = ()  # clients that are not there from the start
    join_round: int = 0  # the first round they may take part in; 0: they never train, and are served only

    def train(self, clients: Sequence[int], round: int) -> list[int]:
        """Those that may be asked to train in a round."""
        there = self.join_round and round >= self.join_round
        return [client for client in clients if there or client not in self.newcomers]

    def serve(self, method: Method, clients: Sequence[int], round: int) -> list[int]:
        """Those that have a model behind a round."""
        return list(clients) if method.serves else self.train(clients, round)


class Recorder(Protocol):
    def restore(self) -> tuple[int, State] | None:
        """The last completed round and the server's state behind it."""

    def begin(self, round: int, clients: Sequence[int]) -> None: ...

    def on_notice(self, notice: Notice) -> None:
        """Of a client, within a round or before the first. May come from any thread."""
        return

    def end(self, line: Line, state: State) -> None:
        """A round is over. Once this returns, it is never trained again."""


def run(method: Method, model: Model, init: Params, clients: Clients, plan: Plan, recorder: Recorder) -> State:
    clients.watch(recorder.on_notice)
    restored = recorder.restore()
    if restored:
        done, state = restored
    else:
        done, state = 0, checked(method, "begin", method.begin(model, init, plan.seed))
        state = _admit(method, state, clients, plan.train(clients.ids(), 0), 0)
    for round in range(done + 1, plan.rounds + 1):
        begun = time.perf_counter()
        if round == plan.join_round:
            state = _admit(method, state, clients, plan.newcomers, round)
        sizes = clients.sizes()
        there = plan.train(clients.ids(), round)
        chosen = sample({client: sizes[client] for client in there}, plan.fraction, plan.seed, round)
        recorder.begin(round, chosen)
        due = round % plan.eval_every == 0 or round == plan.rounds
        sent = {client: checked(method, "down", method.down(state, client)) for client in chosen}
        updates, trained = clients.train(sent, round, score=due and plan.after_local != "none")
        used, left_out = screen(updates, chosen, method.shared(init), partial(method.unusable, state))
        line = _line(round, chosen, used, left_out)
        if any(u.moved for u in used):
            line["moved"] = [{"client": u.client, "roles": dict(u.moved)} for u in used]
        if used:
            made = checked(method, "aggregate", method.aggregate(state, used))
            if P.finite({name: p for name, p in made.items() if p is not state.get(name)}):
                state = made
                second = method.send_second(state, used)
            else:  # each was finite, and what was made of them is not: the round is as if nobody had answered
                second = {}
                line["left_out"] += [{"client": u.client, "why": "aggregated to something not finite"} for u in used]
            if second:
                line["bytes"]["down"] += sum(clients.send_second(second, round).values())
                line["bytes"]["parameters_down"] += sum(map(P.numel, second.values()))
        line["seconds"] = {"train": time.perf_counter() - begun}
        if due:
            begun = time.perf_counter()
            served = {client: method.down(state, client) for client in plan.serve(method, clients.ids(), round)}
            wide = plan.pooled == "every" or (plan.pooled == "last" and round == plan.rounds)
            scores = clients.evaluate(served, as_of=round + 1, pooled=wide and method.personal, after_local=False)
            stages = {"aggregated": scores, "after_local": trained}
            if plan.after_local == "all" and round == plan.rounds:
                able = {client: down for client, down in served.items() if client in there}
                stages["after_local_all"] = clients.evaluate(able, as_of=round + 1, pooled=wide, after_local=True)
            common = method.common(state)
            if common is not None:
                stages["common"] = clients.evaluate(
                    dict.fromkeys(served, common), as_of=round + 1, pooled=False, after_local=False
                )
            for stage, found in stages.items():
                one_model = stage == "common" or (stage == "aggregated" and not method.personal)
                for new in (False, True):
                    part = [s for s in found if (s.client in plan.newcomers) is new]
                    if part:
                        line[f"newcomers_{stage}" if new else stage] = _evaluated(part, model, one_model)
            line["seconds"]["evaluate"] = time.perf_counter() - begun
        recorder.end(line, state)
    return state


def checked(method: Method, hook: str, made: Any) -> Params:
    """What a hook gave, if it is what it must be: a user's own method may have forgotten to return it."""
    where = f"{type(method).__name__}.{hook}() must return a dict of tensors"
    if not isinstance(made, dict):
        raise UserError(f"{where}, not {type(made).__name__}")
    for name, p in made.items():
        if not isinstance(p, Tensor):
            raise UserError(f"{where}, and {name!r} in it is of type {type(p).__name__}")
    return made


def _admit(method: Method, state: State, clients: Clients, joining: Sequence[int], round: int) -> State:
    hellos: dict[int, Params] = clients.enroll(joining) if method.enrolls else {client: {} for client in joining}
    for client, hello in hellos.items():
        if not P.finite(hello):
            raise UserError(f"client {client} cannot be enrolled: what it says of itself is not finite")
        state = method.admit(state, client, hello, round)
    return state


def sample(sizes: dict[int, int], fraction: float, seed: int, round: int) -> list[int]:
    """The clients of a round: at least one, of those that have something to train on."""
    able = [client for client, n in sizes.items() if n]
    count = min(len(able), max(1, int(fraction * len(able) + 0.5)))
    return sorted(rng(seed, round, "sample").choice(able, count, replace=False).tolist())


def screen(
    updates: Sequence[Update],
    asked: Sequence[int],
    shared: Params,
    unusable: Callable[[Update], str] = lambda update: "",
) -> tuple[list[Update], list[dict[str, Any]]]:
    """Updates that can be used, by client; and who is left out of the round, and why."""
    used, left_out = [], []
    answered = {update.client: update for update in updates}
    for client in sorted(asked):
        update = answered.get(client)
        why = "no answer" if update is None else fault(update, shared) or unusable(update)
        if update is None or why:
            left_out.append({"client": client, "why": why})
        else:
            used.append(update)
    return used, left_out


def fault(update: Update, shared: Params) -> str:
    """Why an update must not be used; empty if it may."""
    if update.error:
        return update.error
    if {name: p.shape for name, p in update.up.items()} != {name: p.shape for name, p in shared.items()}:
        return "other names or shapes than the shared parameters"
    if update.n < 1:
        return "no samples"
    told = [update.loss * update.n if update.loss is not None else 0.0, *update.moved.values()]
    if not all(map(math.isfinite, told)) or not P.finite({**update.up, **update.stats}):
        return "non-finite update"
    return ""


def _line(round: int, chosen: Sequence[int], used: Sequence[Update], left_out: Sequence[dict[str, Any]]) -> Line:
    losses = [(u.loss, u.n) for u in used if u.loss is not None]
    samples = sum(n for _, n in losses)
    return {
        "round": round,
        "clients": list(chosen),
        "left_out": list(left_out),
        "train_loss": sum(loss * n for loss, n in losses) / samples if samples else None,
        "passes": sum(u.passes for u in used),
        "bytes": {
            "clients": len(used),
            "up": sum(u.bytes_up for u in used),
            "down": sum(u.bytes_down for u in used),
            "parameters_up": sum(P.numel(u.up) for u in used),
            # Of what travels once the bytes tell: this counts what is sent again every round.
            "parameters_down": sum(P.numel(split_once(u.sent)[0]) for u in used),
        },
    }


def _evaluated(scores: Sequence[Scores], model: Model, one_model: bool) -> dict[str, Any]:
    return {
        "summary": scoring.summary(scores, model.classes, one_model),
        "passes": sum(s.passes for s in scores),
        "clients": scoring.per_client(scores),
    }
