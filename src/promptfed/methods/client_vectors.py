"""What SCAFFOLD and FedDyn have in common: every client keeps a vector that no one else sees, and the server keeps the
mean of all of them, which it follows by the updates alone.

The mean stays one only if both sides count the same updates. An answer may be lost, or left out by a rule: so the
server numbers its aggregations, tells everybody which one had each client's last update, and a client whose last one
is not among them goes back to the vector that it had before.
"""

from typing import ClassVar

import torch

from .. import Context, Method, Model, Params, State, Update
from .. import params as P

_CLIENTS, _TURN, _COUNTED = "clients", "turn", "counted"
_NONE = {_TURN: torch.zeros(()), _COUNTED: torch.zeros(0)}  # before the first aggregation
_BEFORE, _STAMP = "before", "stamp"  # of a client: its vector before its last round, and the turn of that round


class ClientVectors(Method):
    """Each update counts alike."""

    by_mean = True
    vector: ClassVar[str]  # the name of a client's vector, which stays with it
    mean: ClassVar[str]  # the name of their mean in the state

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        """The client's vector; zero before its first round."""
        new, old = P.under(ctx.private, self.vector), P.under(ctx.private, _BEFORE)
        if not new:
            return {name: torch.zeros_like(p) for name, p in self.shared(params).items()}
        if _STAMP not in ctx.private:  # of a run that was begun before aggregations were numbered
            return new
        used = ctx.down[_COUNTED][ctx.draws[-1]] == ctx.private[_STAMP]
        return {name: torch.where(used, p, old[name]) for name, p in new.items()}

    def both(self, new: Params, old: Params, ctx: Context) -> Params:
        """For keep(): the vector after a round and before it."""
        return {**P.nested(self.vector, new), **P.nested(_BEFORE, old), _STAMP: ctx.down[_TURN]}

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, the mean of clients' vectors, the number of clients; the number of the next
        aggregation (turn), and of the one that had each client's last update (counted, -1 before its first)."""
        shared = self.shared(init)
        zero = {name: torch.zeros_like(p) for name, p in shared.items()}
        return {**shared, **P.nested(self.mean, zero), _CLIENTS: torch.zeros(()), **_NONE}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        """A new client's vector is zero."""
        count, counted = state[_CLIENTS], {**_NONE, **state}[_COUNTED]
        mean = {name: p * count / (count + 1) for name, p in P.under(state, self.mean).items()}
        new = {**P.nested(self.mean, mean), _CLIENTS: count + 1, _COUNTED: _reaching(counted, client)}
        return {**super().admit(state, client, hello, round), **new}

    def down(self, state: State, client: int) -> Params:
        return {name: p for name, p in super().down({**_NONE, **state}, client).items() if name != _CLIENTS}

    def share(self, state: State, updates: list[Update]) -> torch.Tensor:
        """Of all clients, those of the round."""
        return len(updates) / state[_CLIENTS].clamp(min=len(updates))

    def counted(self, state: State, updates: list[Update]) -> State:
        """The numbers after an aggregation of these updates."""
        numbers, clients = {**_NONE, **state}, [update.client for update in updates]
        last = _reaching(numbers[_COUNTED], max(clients)).clone()
        last[clients] = numbers[_TURN]
        return {_TURN: numbers[_TURN] + 1, _COUNTED: last}


def _reaching(counted: torch.Tensor, client: int) -> torch.Tensor:
    """With a place for this client."""
    return torch.cat([counted, counted.new_full((max(0, client + 1 - len(counted)),), -1.0)])
