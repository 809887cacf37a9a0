"""FlexLoRA: clients train LoRA of unequal ranks; the server averages their products and cuts the mean to each rank.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources" (NeurIPS
2024). The best approximation of a rank comes from the singular value decomposition of the mean product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .. import Params, State, Update, UserError
from .. import params as P
from ..tunings.lora import Lora
from .on_frozen import OnFrozen

_A, _B = "lora.a.", "lora.b."


class FlexLora(OnFrozen):
    """A client of rank r receives the r largest singular values and their vectors, and sends matrices of its rank."""

    paper = "Bai et al., NeurIPS 2024"
    averages = False
    tuned = Lora
    own_down = True

    tuning: Lora = Field(default_factory=Lora, description="what is trained")
    ranks: tuple[int, ...] = Field(
        (2, 4, 8),
        min_length=1,
        description="the clients' ranks, in turn: with three, client 4 has the second; none may be above `rank`",
    )

    @model_validator(mode="after")
    def _ranks_fit(self) -> FlexLora:
        if not all(1 <= rank <= self.tuning.rank for rank in self.ranks):
            raise UserError(f"method.ranks = {list(self.ranks)} must be 1 to {self.tuning.rank}, which is method.rank")
        return self

    def down(self, state: State, client: int) -> Params:
        return self.cut(super().down(state, client), client)

    def uploads(self, shared: Params, client: int) -> Params:
        return self.cut(shared, client)

    def cut(self, params: Params, client: int) -> Params:
        """With the first rows of A and columns of B, as many as the client's rank."""
        rank = self.ranks[client % len(self.ranks)]
        first = {name: p[:rank] for name, p in params.items() if name.startswith(_A)}
        first |= {name: p[:, :rank].contiguous() for name, p in params.items() if name.startswith(_B)}
        return {**params, **first}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """State: the shared parameters, with A and B of the largest rank in the order of their singular values."""
        updates = sorted(updates, key=lambda update: update.client)  # vectors of equal singular values are not unique
        weights = [update.n / sum(u.n for u in updates) for update in updates]
        others = [{n: p for n, p in u.up.items() if not n.startswith((_A, _B))} for u in updates]
        made = {**state, **P.mean(others, weights)}
        for a in (name for name in state if name.startswith(_A)):
            b = a.replace(_A, _B)
            # The old A with a B of zero: where products have a lower rank than the state, its directions remain.
            left = [weight * u.up[b] for u, weight in zip(updates, weights, strict=True)] + [torch.zeros_like(state[b])]
            made[b], made[a] = factors(left, [*(u.up[a] for u in updates), state[a]], len(state[a]))
        return made

    def common(self, state: State) -> Params:
        """The mean at the largest rank."""
        return super().down(state, client=0)


def factors(left: Sequence[Tensor], right: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """B (outputs, rank) and A (rank, inputs) whose product is nearest to the sum of all left @ right: U S and V^T of
    its singular value decomposition. The sum itself, of the size of a weight, is never formed."""
    q, r = torch.linalg.qr(torch.cat(list(left), dim=1).double())
    p, s = torch.linalg.qr(torch.cat(list(right)).T.double())
    u, values, v = torch.linalg.svd(r @ s.T)
    b, a = q @ (u[:, :rank] * values[:rank]), v[:rank] @ p.T
    return b.to(left[0]), a.to(left[0])
