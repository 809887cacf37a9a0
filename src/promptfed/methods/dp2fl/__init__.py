"""DP2FL: a task prompt that all clients share and a data prompt per client, both weighted by validation losses.

Chang et al., "Dual prompt personalized federated learning in foundation models" (Scientific Reports 15, 28026, 2025).
Its equations are rebuilt from its words. The client's model is MaPLe (tunings/maple.py).

A round: clients train both prompts, and evaluate their models on all clients' validation sets. The server weights task
prompts and data prompts by the clients' summed losses into a global model (Eq. 7-8). Each client's own data prompt
moves towards those that did well on its own validation set (Eq. 9-17).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from ... import Model, Params, State, Update
from ... import params as P
from ...tunings.maple import Maple
from .data_prompt import combine, distance, in_order, maps
from .validation import CrossValidated
from .weights import Rule, global_weights, local_weights, raised


class Dp2fl(CrossValidated):
    """A client without validation data has no data prompt of its own: it always continues from the global one."""

    paper = "Chang et al., Scientific Reports 2025"
    sends = "validation data, losses on all clients' validation data"
    own_down = True
    tuned = Maple

    batch_size: int = Field(4, ge=1, description="samples per step")
    lr: float = Field(0.035, gt=0, description="local learning rate")
    alpha: float = Field(
        1.2, ge=1, description="a data prompt is discarded if its loss is at least this many times the loss before"
    )
    beta: float = Field(0.2, ge=0, le=1, description="total weight of the others if none is an improvement")
    negatives: Rule = Field(
        "bounded",
        description="weights of data prompts that are no improvement: below all others, as the paper's Eq. 15-17 have "
        "them, or proportional to the loss",
    )
    gamma: float = Field(0.1, ge=0, description="factor of `negatives = proportional`")
    liars: float = Field(
        0.0, ge=0, lt=0.5, description="share of reported losses on a set, the lowest, that count as the next one"
    )
    newcomer: Literal["global", "initglo", "init"] = Field(
        "global",
        description="a later client starts from the global model, from it with the initial data prompt, or from the "
        "initial model",
    )

    # ---- server: state

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The global model under its own names, and

        val.{client}.x, .y       a client's validation set (`sealed`: also .key, its public key)
        own.{client}.map.*       its data prompt, from its first round on (`sealed`: the client keeps it)
        init.*, joined.{client}  unless newcomers start from the global model: what they start from, and who is none
        """
        fresh = {"global": {}, "initglo": maps(init), "init": init}[self.newcomer]
        return {**self.shared(init), **P.nested("init", fresh)}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        return {**state, **P.nested(f"val.{client}", hello), **(self.joined([client]) if round == 0 else {})}

    def joined(self, clients: Sequence[int]) -> State:
        """Marks clients that do not, or no longer, start from initial parameters."""
        return {} if self.newcomer == "global" else {f"joined.{client}": torch.ones(1) for client in clients}

    # ---- a round

    def down(self, state: State, client: int) -> Params:
        return {**self.own(state, client), "client": torch.tensor(client), **self.sent_sets(state)}

    def own(self, state: State, client: int) -> Params:
        """The client's model, as far as the server knows it."""
        model = _global(state)
        if f"joined.{client}" not in state:  # until it has taken part in a round, also if it is only served
            model |= P.under(state, "init")
        return {**model, **P.under(state, f"own.{client}")}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        made = self.averaged(state, updates)
        ordered = in_order(updates)
        others = [maps(u.up) for u in ordered]
        for u in updates:
            if "before" in u.stats:
                losses = [float(other.stats[f"loss.{u.client}"]) for other in ordered]
                own = self.moved(maps(u.sent), float(u.stats["before"]), losses, others)
                made |= P.nested(f"own.{u.client}", own)
        return made

    def averaged(self, state: State, updates: list[Update]) -> State:
        """The global model (Eq. 7-8)."""
        weights = self.shared_weights(updates)
        return {**state, **P.mean([u.up for u in updates], weights), **self.joined([u.client for u in updates])}

    def moved(self, old: Params, before: float, losses: Sequence[float], others: Sequence[Params]) -> Params:
        """A client's data prompt after local aggregation (Eq. 9-17)."""
        return combine(old, others, self.own_weights(old, before, losses, others))

    def shared_weights(self, updates: Sequence[Update]) -> list[float]:
        return global_weights(raised([float(u.stats["total"]) for u in updates], self.liars))

    def own_weights(self, old: Params, before: float, losses: Sequence[float], others: Sequence[Params]) -> list[float]:
        distances, settings = [distance(other, old) for other in others], {"alpha": self.alpha, "beta": self.beta}
        told = raised(losses, self.liars)
        return local_weights(before, told, distances, rule=self.negatives, gamma=self.gamma, **settings)

    def common(self, state: State) -> Params:
        return _global(state)


def _global(state: State) -> Params:
    return {name: p for name, p in state.items() if name.startswith(tuple(Maple.roles))}
