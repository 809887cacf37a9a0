"""SGPT: prompts that all samples share, prompts of groups, and keys by which each sample finds its group.

Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning"
(CVPR 2024), arXiv:2310.18285. One global model for all clients; what differs is which groups a client's samples select.

Reconstructed where the paper is silent: q_g counts what the server knows and, besides, the client's own selections of
this round (no client depends on another one's turn); the inverted order swaps the two blocks and nothing else; blocks
of the other ablations take as many epochs as one block. From the authors' code: the floor below q_g, uniform weights
for keys of rarely selected groups, the keys' initial values.
"""

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from ... import Batch, Context, Model, Params, Phase, State, Update, UserError
from ... import params as P
from .features import SharedGroup
from .selection import Selection

BLOCK_I, BLOCK_II = "shared", "group"  # phases of a round


class Sgpt(Selection):
    paper = "Deng et al., CVPR 2024"
    sends = "how often groups are selected"
    tuned = SharedGroup

    batch_size: int = Field(40, ge=1, description="samples per step")
    lr: float = Field(0.01, gt=0, description="local learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(1e-5, ge=0, description="weight decay")
    training: Literal["bcd", "bcd-inverted", "joint", "shared", "group"] = Field(
        "bcd",
        description="shared prompts before group prompts, after them, at once, or one kind without the other (Table 3)",
    )
    key_weights: Literal["selections", "samples"] = Field(
        "selections", description="weight of a client's key: how often it was selected, or the client's samples"
    )
    rare: int = Field(
        50, ge=0, description="up to this many selections per round, all clients' keys of a group have equal weights"
    )
    key_momentum: float = Field(0.5, ge=0, lt=1, description="momentum of the server's keys (alpha_k)")
    prompt_momentum: float = Field(0.5, ge=0, lt=1, description="momentum of the server's group prompts (alpha_g)")
    cache: bool = Field(
        True,
        description="compute what comes before the group prompts once per round while only they are trained; "
        "keeps tokens x width numbers per sample of the client",
    )

    @model_validator(mode="before")
    @classmethod
    def _leaves_out(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A kind of prompt that is not trained is not there either, and does not travel."""
        tuning = given.get("tuning", SharedGroup())
        for alone, setting in (("group", "shared_layers"), ("shared", "group_layers")):
            if given.get("training") == alone:
                tuning = tuning.model_copy(update={setting: ()})
            elif not getattr(tuning, setting):
                raise UserError(
                    f'method.{setting} = [] must name at least one layer; method.training="{alone}" does without'
                )
        return {**given, "tuning": tuning}

    # ---- client half: Algorithm 1

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.training == "joint":
            return (self.phase(name="joint"),)
        first = self.phase(("body", "head"), name=BLOCK_I)
        second = self.phase(("group", "keys", "head"), name=BLOCK_II)
        order = {"bcd": (first, second), "bcd-inverted": (second, first), "shared": (first,), "group": (second,)}
        return order[self.training]

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        # In Block II nothing before the group prompts changes: computed once per round instead of once per epoch. It
        # takes n x tokens x width numbers: 0.6 MB per sample of a ViT-B/16 at 224 pixels, 0.3 GB for 500 samples.
        return self.tuning.hidden(model, params, batch) if self.cache and ctx.within(BLOCK_II) else {}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        if ctx.within(BLOCK_I):  # Eq. 10: cross-entropy, without group prompts
            logits = self.tuning.head(model, params, self.tuning.prompted(model, params, batch, chosen=None))
            return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}
        # Eq. 11: cross-entropy with the prompts of the chosen groups, and the distance to their keys
        near = self.tuning.similarity(model, params, batch)  # (B, G)
        chosen = self.choose(near.detach(), batch, ctx)
        logits = self.tuning.head(model, params, self.tuning.prompted(model, params, batch, chosen))
        cross_entropy = F.cross_entropy(logits, batch.y, reduction="none")
        key = -near.gather(1, chosen[:, None])[:, 0]  # Eq. 6; its gradient is zero in all other keys
        return batch.mean(cross_entropy + key), {"selected": self.count(chosen, batch)}

    # ---- server half

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """Means weighted by samples, keys by selections; momentum on group prompts and keys (Eq. 7)."""
        # In double precision, so that the order of updates does not show.
        ups = [{name: p.double() for name, p in u.up.items()} for u in updates]
        new = P.mean(ups, [u.n for u in updates])
        nothing = torch.zeros(self.tuning.groups)
        selected = torch.stack([u.stats.get("selected", nothing).double() for u in updates])  # (clients, G)
        total = selected.sum(0)
        if "keys" in new and self.key_weights == "selections":
            share = torch.where(total > self.rare, selected / total.clamp(min=1), 1 / len(updates))
            new["keys"] = (share[:, :, None] * torch.stack([up["keys"] for up in ups])).sum(0)
        rates = {"group": self.prompt_momentum, "keys": self.key_momentum}
        for name, p in new.items():
            rate = rates.get(self.tuning.role(name), 0.0)
            new[name] = (rate * state[name].double() + (1 - rate) * p).to(state[name].dtype)
        return {**state, **new, "counts": (state["counts"].double() + total).to(state["counts"].dtype)}
