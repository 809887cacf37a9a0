"""Descriptors d_n of clients, in the server's state: `descriptor.{client}`, (width,)."""

import torch
from torch import Tensor

from ... import State
from ... import params as P
from ...seeding import torch_rng


def first(state: State, client: int, round: int) -> Tensor:
    """A client that is there from the start has a random descriptor, a newcomer the mean of all."""
    fresh = torch.randn(len(_like(state)), generator=torch_rng(int(state["seed"]), "descriptor", client))
    return fresh if round == 0 else _mean(state, fresh)


def current(state: State, client: int) -> Tensor:
    """The mean of all for a client that has none."""
    own = state.get(f"descriptor.{client}")
    return _mean(state, torch.zeros_like(_like(state))) if own is None else own


def _mean(state: State, otherwise: Tensor) -> Tensor:
    known = P.under(state, "descriptor")  # a state read from a file has another order: added in that of clients
    return torch.stack([known[client] for client in sorted(known, key=int)]).mean(0) if known else otherwise


def _like(state: State) -> Tensor:
    """(width,): one of the basis's prompts."""
    return next(iter(P.under(state, "base").values()))[0]
