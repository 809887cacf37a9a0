"""FedProto: clients exchange the mean features of each class, and no weights.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022), Algorithm 1.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, State, Update
from ..precision import full

_SUM, _SEEN = "sum", "seen"  # in stats: (classes, d) sums of features, (classes,) samples drawn
_PROTOTYPES, _KNOWN = "prototypes", "known"  # in the state: (classes, d), (classes,) 1 where there is a prototype


class FedProto(Method):
    """Prototypes are means over the samples drawn in local training: sums that the loss adds up."""

    paper = "Tan et al., AAAI 2022"
    averages = False
    sends = "sums of features and counts of each class"
    private = ("body", "head")
    needs = ("body", "head")

    lamda: float = Field(1.0, ge=0, description="weight of the distance of features to prototypes")

    def stays(self, name: str) -> bool:
        return True

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """Cross-entropy + lamda times the squared distance of a sample's features to the prototype of its class, as a
        mean over coordinates; zero for classes without a prototype."""
        z = self.tuning.features(model, params, batch, ctx)
        cross_entropy = F.cross_entropy(self.tuning.head(model, params, z), batch.y, reduction="none")
        members = F.one_hot(batch.y, model.classes).to(z.dtype)  # (B, classes)
        if batch.weight is not None:
            members = members * batch.weight[:, None]
        distance = (z - ctx.down[_PROTOTYPES][batch.y]).square().mean(1) * ctx.down[_KNOWN][batch.y]
        with full(z.device):
            told = {_SUM: members.float().T @ z.float(), _SEEN: members.float().sum(0)}
        return batch.mean(cross_entropy + self.lamda * distance), told

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """prototypes  (classes, d), zero where there is none yet
        known       (classes,) whether there is one"""
        width = init["head.weight"].shape[1]
        return {_PROTOTYPES: torch.zeros(model.classes, width), _KNOWN: torch.zeros(model.classes)}

    def unusable(self, state: State, update: Update) -> str:
        shapes = {name: s.shape for name, s in update.stats.items()}
        if shapes != {_SUM: state[_PROTOTYPES].shape, _SEEN: state[_KNOWN].shape}:
            return "no prototypes, or of another shape"
        return "" if bool((update.stats[_SEEN] >= 0).all()) else "negative numbers of samples"

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """The mean over all samples of a class; a class that no client has seen in this round keeps its prototype."""
        sums = torch.stack([u.stats[_SUM] for u in updates]).sum(0)
        seen = torch.stack([u.stats[_SEEN] for u in updates]).sum(0)
        new = sums / seen.clamp(min=1)[:, None]
        found = torch.where((seen > 0)[:, None], new, state[_PROTOTYPES])
        return {**state, _PROTOTYPES: found, _KNOWN: state[_KNOWN].maximum((seen > 0).to(seen.dtype))}
