"""FedMGP: a client has several groups of text and image prompts, and sends those that are drawn by their likeness to
the shared ones.

Bo et al., "FedMGP: Personalized Federated Learning with Multi-Group Text-Visual Prompts" (NeurIPS 2025).
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, Phase, State
from .. import params as P
from ..tunings.groups import OWN, SHARED, Groups
from .text_prompts import TextMethod

_CHOSEN = "chosen"


class FedMgp(TextMethod):
    paper = "Bo et al., NeurIPS 2025"
    tuned = Groups
    private = (OWN,)
    keeps = "which groups it sent last"

    tuning: Groups = Field(default_factory=Groups, description="what is trained")
    diversity: float = Field(1.0, ge=0, description="weight of the likeness of groups to each other")
    temperature: float = Field(1.0, gt=0, description="temperature of the choice of groups that are sent")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase((OWN,)),)

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """What the server has replaces the groups that the client sent last; in its first round, its first groups."""
        found = super().start(init, down, private, memory)
        if f"{OWN}.text" not in down:  # which only common() sends
            at = private.get(_CHOSEN, torch.arange(self.tuning.selected))
            for name, p in P.under(down, SHARED).items():
                found[f"{OWN}.{name}"] = found[f"{OWN}.{name}"].index_copy(0, at.to(p.device), p)
        return found

    def serve(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """A client that has not trained yet has no groups of its own."""
        return self.start(init, down if f"{OWN}.text" in private else self.common(down), private, memory)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """The mean over groups of each one's cross-entropy, and the likeness of groups, the mean of both towers'."""
        images = self.tuning.split(self.tuning.features(model, params, batch, ctx))
        texts = self.tuning.texts(model, params)
        logits = self.tuning.group_logits(model, images, texts)
        task = torch.stack([F.cross_entropy(each, batch.y, reduction="none") for each in logits]).mean(0)
        weight = self.diversity / 2
        return batch.mean(task + weight * likeness(images)) + weight * likeness(texts).mean(), {}

    def chosen(self, params: Params, ctx: Context) -> Tensor:
        """(s,) groups drawn without replacement, by softmax of their cosine with the nearest one received."""
        own, received = (_flat(P.under(p, name)) for p, name in ((params, OWN), (ctx.down, SHARED)))
        cosines = F.cosine_similarity(own[:, None], received[None], dim=-1).amax(1)  # (G,)
        weights = (cosines / self.temperature).softmax(0).cpu()
        return torch.multinomial(weights, self.tuning.selected, generator=ctx.random("groups")).sort().values

    def upload(self, params: Params, ctx: Context) -> Params:
        at = self.chosen(params, ctx)
        return P.nested(SHARED, {name: p[at.to(p.device)] for name, p in P.under(params, OWN).items()})

    def unmoved(self, init: Params, ctx: Context) -> Params:
        """The groups that it received, whichever it would have drawn."""
        return P.nested(SHARED, P.under(ctx.down, SHARED))

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        return {_CHOSEN: self.chosen(params, ctx)}

    def common(self, state: State) -> Params:
        """The shared groups, repeated."""
        at = torch.arange(self.tuning.groups) % self.tuning.selected
        return {**state, **P.nested(OWN, {name: p[at] for name, p in P.under(state, SHARED).items()})}


def likeness(features: Tensor) -> Tensor:
    """(G, N, d) of unit length -> (N,): the mean cosine of two groups."""
    groups = len(features)
    return (features.sum(0).square().sum(-1) - groups) / (groups * (groups - 1))


def _flat(groups: Params) -> Tensor:
    """(G, ...) each -> (G, n)"""
    return torch.cat([groups[name].flatten(1) for name in sorted(groups)], dim=1)
