"""pFedPG: the server generates each client's prompts, and learns from how the clients changed them.

Yang et al., "Efficient Model Personalization in Federated Learning via Client-Specific Prompt Generation" (ICCV 2023).
Eq. 5, read literally, would move what is generated away from the client's result; here the server descends. How
the generator is initialised is not published: docs/methods/pfedpg.md says what was chosen.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .. import Context, Method, Model, Params, State, Tuning, Update
from .. import params as P
from ..seeding import torch_rng
from ..tunings.heads import SCALE
from ..tunings.tokens import Tokens


class Prompts(Tokens):
    """Prompt tokens and a head on features as they are: the published learning rate is for these."""

    standardise: bool = Field(False, description=Tokens.model_fields["standardise"].description)
    prompt_scale: float = Field(1.0, gt=0, description="scale of the prompts' initial values, relative to VPT's")

    def init(self, model: Model, seed: int) -> Params:
        made = super().init(model, seed)
        return {name: self.prompt_scale * p if self.role(name) == "body" else p for name, p in made.items()}


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

    attention_init: Literal["unit", "plain"] = Field(
        "unit",
        description="attention starts with keys and values of unit scale and W_O = 0, so that clients attend to "
        "different prompts, or with matrices of equal scale",
    )

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
        tokens, width = next(iter(base.values())).shape
        g = torch_rng(seed, "prompt generator")

        def matrix(inputs: int, outputs: int) -> Tensor:
            return torch.randn(inputs, outputs, generator=g) / math.sqrt(inputs)

        shapes = {
            "attention": dict.fromkeys(("query", "key", "value", "out"), (width, width)),
            "mlp": {"hidden": (width, width), "prompts": (width, tokens * width)},
            "adain": dict.fromkeys(("scale", "shift"), (width, width)),
        }.get(self.generator, {})
        state = P.nested("base", base)
        weights = {name: matrix(*shape) for name, shape in shapes.items()}
        if self.generator == "attention" and self.attention_init == "unit":
            # Prompts are small, and so would be keys and values made of them: attention would hardly differ.
            rms = torch.stack([p.square().mean() for p in base.values()]).mean().sqrt()
            weights |= {name: weights[name] / rms for name in ("key", "value")}
            weights["out"] = torch.zeros_like(weights["out"])
        state |= P.nested("generator", weights)
        if shapes:
            state["seed"] = torch.tensor(seed)
        return state

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        """A client that is there from the start has a random descriptor, a newcomer the mean of all."""
        state = super().admit(state, client, hello, round)
        if "seed" not in state:
            return state
        width = next(iter(P.under(state, "base").values())).shape[1]
        fresh = torch.randn(width, generator=torch_rng(int(state["seed"]), "descriptor", client))
        return {**state, f"descriptor.{client}": fresh if round == 0 else _mean_descriptor(state, fresh)}

    def down(self, state: State, client: int) -> Params:
        """P_n = G(P_base, d_n), for each layer that has prompts: (K, width)."""
        base, weights = P.under(state, "base"), P.under(state, "generator")
        if self.generator in ("base", "average"):
            return self.unmade(state)
        own = state.get(f"descriptor.{client}")
        if own is None:
            own = _mean_descriptor(state, torch.zeros_like(next(iter(base.values()))[0]))
        made = {"attention": _attention, "mlp": _mlp, "adain": _adain}[self.generator]
        return {**self.unmade(state), **{name: made(weights, p, own) for name, p in base.items()}}

    def unmade(self, state: State) -> Params:
        """The basis itself, as a client would receive it."""
        return {**P.under(state, "base"), **P.nested(SCALE, P.under(state, SCALE))}

    def common(self, state: State) -> Params | None:
        return self.unmade(state) if self.basis else None

    def describe(self, state: State, clients: Sequence[int]) -> dict[str, float]:
        """The rms of the clients' prompts, and of the difference of two clients' prompts over all pairs."""
        names = P.under(state, "base")
        downs = [self.down(state, client) for client in clients]
        prompts = torch.stack([torch.cat([down[name].flatten() for name in names]) for down in downs]).double()
        # The mean of (a - b)^2 over all pairs is twice the sample variance.
        apart = 2 * prompts.var(0).mean() if len(downs) > 1 else torch.zeros(())
        return {"prompt_rms": float(prompts.square().mean().sqrt()), "prompt_difference_rms": float(apart.sqrt())}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """One step of all that generates (Eq. 5): the clients' changes stand for negative gradients."""
        if self.generator == "average":
            change = P.mean([u.up for u in updates], [u.n for u in updates])
            base = P.under(state, "base")
            return {**state, **P.nested("base", {name: base[name] + p for name, p in change.items()})}
        theirs = {f"descriptor.{u.client}" for u in updates}
        learnt = {name: p for name, p in state.items() if name.startswith(("base.", "generator.")) or name in theirs}
        learnt = {name: p.clone().requires_grad_() for name, p in learnt.items()}
        # d/d(phi) of sum_n <P_n, -delta_n>: the sum of the clients' vector-Jacobian products
        value = torch.zeros(())
        for u in updates:
            made = self.down({**state, **learnt}, u.client)
            value = value - torch.stack([(made[name] * delta).sum() for name, delta in u.up.items()]).sum()
        gradients = torch.autograd.grad(value, list(learnt.values()), allow_unused=True)
        with torch.no_grad():
            stepped = {
                name: p - self.server_lr * g if g is not None else p
                for (name, p), g in zip(learnt.items(), gradients, strict=True)
            }
        return {**state, **{name: p.detach() for name, p in stepped.items()}}


def _mean_descriptor(state: State, otherwise: Tensor) -> Tensor:
    known = P.under(state, "descriptor")  # a state read from a file has another order: added in that of clients
    return torch.stack([known[client] for client in sorted(known, key=int)]).mean(0) if known else otherwise


def _attention(weights: Params, base: Tensor, own: Tensor) -> Tensor:
    """P_base + softmax(Q K^T / sqrt(l)) V W_O with one query: one vector shifts all K prompts (Eq. 3-4)."""
    query = own @ weights["query"]  # (l,)
    keys, values = base @ weights["key"], base @ weights["value"]  # (K, l)
    attention = (keys @ query / math.sqrt(len(query))).softmax(0)  # (K,)
    return base + attention @ values @ weights["out"]


def _mlp(weights: Params, base: Tensor, own: Tensor) -> Tensor:
    """A layer of its own for each prompt. The basis is not learnt: it gives the prompts' number and scale."""
    hidden = (own @ weights["hidden"]).relu()
    return base.detach().std() * (hidden @ weights["prompts"]).reshape(base.shape)


def _adain(weights: Params, base: Tensor, own: Tensor) -> Tensor:
    """Huang & Belongie (ICCV 2017): each prompt of the basis is normalised, then scaled and shifted by the descriptor,
    in units of the basis's deviation."""
    prompts = torch.nn.functional.layer_norm(base, base.shape[-1:])
    scale, shift = own @ weights["scale"], own @ weights["shift"]  # (l,)
    return base.std() * ((1 + scale) * prompts + shift)
