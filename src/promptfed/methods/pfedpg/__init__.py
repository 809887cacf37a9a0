"""pFedPG: the server generates each client's prompts, and learns from how the clients changed them.

Yang et al., "Efficient Model Personalization in Federated Learning via Client-Specific Prompt Generation" (ICCV 2023).
Eq. 5, read literally, would move what is generated away from the client's result; here the server descends. How
the generator is initialised is not published: docs/methods/pfedpg.md says what was chosen.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ... import Context, Method, Model, Params, State, Tuning, Update
from ... import params as P
from ...seeding import torch_rng
from ...tunings.heads import SCALE
from . import descriptors
from .generators import GENERATORS, Start, descended, start
from .prompts import Prompts


class PFedPg(Method):
    """Clients train the prompts they receive and a head of their own; only the change of the prompts is sent."""

    paper = "Yang et al., ICCV 2023"
    averages = False
    tuned = Prompts
    private = ("head",)
    own_down = True

    tuning: Tuning = Field(default_factory=Prompts, description="what is trained")
    batch_size: int = Field(64, ge=1, description="samples per step")
    lr: float = Field(0.25, gt=0, description="local learning rate")
    weight_decay: float = Field(0.001, ge=0, description="weight decay")
    server_lr: float = Field(0.001, gt=0, description="learning rate of generator, basis and descriptors (alpha)")
    generator: Literal["attention", "mlp", "adain", "base", "average"] = Field(
        "attention",
        description="how prompts are made (Table 4): from the basis by cross-attention with the client's descriptor, "
        "from the descriptor by an MLP, from the basis by AdaIN, the learned basis for all, or the clients' average",
    )
    attention_init: Start = Field(
        "unit",
        description="attention starts with keys and values of unit scale and W_O = 0, so that clients attend to "
        "different prompts, or with matrices of equal scale",
    )
    shorten: bool = Field(False, description="halve the server's step while it overshoots (not in the paper)")
    basis: bool = Field(
        False, description="also score the basis in place of each client's prompts (stage `common`; P_base in Table 4)"
    )

    @property
    def serves(self) -> bool:
        """A client that never trains has no head."""
        return False

    # ---- client half

    def upload(self, params: Params, ctx: Context) -> Params:
        return {name: p - ctx.down[name] for name, p in self.shared(params).items()}

    # ---- server half

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """base.*               the prompt basis P_base, (K, width) per layer that has prompts
        generator.*          the weights of G
        descriptor.{client}  d_n, (width,)
        seed                 of the descriptors; these three only if prompts are generated"""
        base = self.shared(init)
        weights = start(self.generator, base, self.attention_init, torch_rng(seed, "prompt generator"))
        state = {**P.nested("base", base), **P.nested("generator", weights)}
        return {**state, "seed": torch.tensor(seed)} if weights else state

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        state = super().admit(state, client, hello, round)
        own = {f"descriptor.{client}": descriptors.first(state, client, round)} if "seed" in state else {}
        return {**state, **own}

    def down(self, state: State, client: int) -> Params:
        """P_n = G(P_base, d_n), for each layer that has prompts: (K, width)."""
        base = self.unmade(state)
        if self.generator not in GENERATORS:
            return base
        make, weights, own = GENERATORS[self.generator], P.under(state, "generator"), descriptors.current(state, client)
        return {**base, **{name: make(weights, p, own) for name, p in P.under(state, "base").items()}}

    def unmade(self, state: State) -> Params:
        """The basis itself, as a client would receive it."""
        return {**P.under(state, "base"), **P.nested(SCALE, P.under(state, SCALE))}

    def common(self, state: State) -> Params | None:
        return self.unmade(state) if self.basis else None

    def describe(self, state: State, clients: Sequence[int]) -> dict[str, float]:
        """The rms of the clients' prompts, and of the difference of two clients' prompts over all pairs."""
        prompts = self.stacked(state, clients).double()
        # The mean of (a - b)^2 over all pairs is twice the sample variance.
        apart = 2 * prompts.var(0).mean() if len(clients) > 1 else torch.zeros(())
        return {"prompt_rms": float(prompts.square().mean().sqrt()), "prompt_difference_rms": float(apart.sqrt())}

    def stacked(self, state: State, clients: Sequence[int]) -> Tensor:
        """The clients' prompts, a row each."""
        names, downs = P.under(state, "base"), [self.down(state, client) for client in clients]
        return torch.stack([torch.cat([down[name].flatten() for name in names]) for down in downs])

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """One step of all that generates (Eq. 5): the clients' changes stand for negative gradients."""
        base = P.under(state, "base")
        if self.generator == "average":
            change = P.mean([u.up for u in updates], [u.n for u in updates])
            return {**state, **P.nested("base", {name: base[name] + p for name, p in change.items()})}
        theirs = {f"descriptor.{u.client}" for u in updates}
        learnt = {name: p for name, p in state.items() if name.startswith(("base.", "generator.")) or name in theirs}
        changes = torch.stack([torch.cat([u.up[name].flatten() for name in base]) for u in updates])

        def made(learnt: Params) -> Tensor:
            return self.stacked({**state, **learnt}, [u.client for u in updates])

        return {**state, **descended(learnt, made, changes, self.server_lr, self.shorten)}
