"""A client's prompts (K, width) from the basis and its descriptor (Table 4), and a step of what generates them."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ... import Params

Start = Literal["unit", "plain"]
_HALVINGS = 30  # of a step; after them it is none


def start(kind: str, base: Params, attention: Start, g: torch.Generator) -> Params:
    """The weights of a generator; none where prompts are not generated."""
    tokens, width = next(iter(base.values())).shape
    shapes = {
        "attention": dict.fromkeys(("query", "key", "value", "out"), (width, width)),
        "mlp": {"hidden": (width, width), "prompts": (width, tokens * width)},
        "adain": dict.fromkeys(("scale", "shift"), (width, width)),
    }.get(kind, {})
    weights = {name: torch.randn(*shape, generator=g) / math.sqrt(shape[0]) for name, shape in shapes.items()}
    if kind == "attention" and attention == "unit":
        # Prompts are small, and so would be keys and values made of them: attention would hardly differ.
        rms = torch.stack([p.square().mean() for p in base.values()]).mean().sqrt()
        weights |= {name: weights[name] / rms for name in ("key", "value")}
        weights["out"] = torch.zeros_like(weights["out"])
    return weights


def attention(weights: Params, base: Tensor, own: Tensor) -> Tensor:
    """P_base + softmax(Q K^T / sqrt(l)) V W_O with one query: one vector shifts all K prompts (Eq. 3-4)."""
    query = own @ weights["query"]  # (l,)
    keys, values = base @ weights["key"], base @ weights["value"]  # (K, l)
    attention = (keys @ query / math.sqrt(len(query))).softmax(0)  # (K,)
    return base + attention @ values @ weights["out"]


def mlp(weights: Params, base: Tensor, own: Tensor) -> Tensor:
    """A layer of its own for each prompt. The basis is not learnt: it gives the prompts' number and scale."""
    hidden = (own @ weights["hidden"]).relu()
    return base.detach().std() * (hidden @ weights["prompts"]).reshape(base.shape)


def adain(weights: Params, base: Tensor, own: Tensor) -> Tensor:
    """Huang & Belongie (ICCV 2017): each prompt of the basis is normalised, then scaled and shifted by the descriptor,
    in units of the basis's deviation."""
    prompts = torch.nn.functional.layer_norm(base, base.shape[-1:])
    scale, shift = own @ weights["scale"], own @ weights["shift"]  # (l,)
    return base.std() * ((1 + scale) * prompts + shift)


GENERATORS: Mapping[str, Callable[[Params, Tensor, Tensor], Tensor]] = {
    "attention": attention,
    "mlp": mlp,
    "adain": adain,
}


def descended(learnt: Params, made: Callable[[Params], Tensor], change: Tensor, lr: float, shorten: bool) -> Params:
    """After a step (Eq. 5) that moves what is made by a part of this change: down the gradient of half the squared
    distance to what it would be after all of it. What it does not depend on stays.

    `shorten`: the step is halved until the distance does not grow."""
    learnt = {name: p.clone().requires_grad_() for name, p in learnt.items()}
    before = made(learnt)
    moves = torch.autograd.grad(before, list(learnt.values()), change, allow_unused=True)
    pairs = {name: (p.detach(), move) for (name, p), move in zip(learnt.items(), moves, strict=True)}
    with torch.no_grad():
        for halvings in range(_HALVINGS):
            after = {name: p if move is None else p + lr * 0.5**halvings * move for name, (p, move) in pairs.items()}
            if not shorten or (before + change - made(after)).square().sum() <= change.square().sum():
                return after
        return {name: p for name, (p, _) in pairs.items()}
