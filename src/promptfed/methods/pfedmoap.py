"""pFedMoAP: a client mixes its own prompt with those of other clients by a gate that attends to them for each image.

Luo et al., "Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language Models" (ICLR 2025).
"""

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, State, Update
from .. import params as P
from ..models.base import dense
from ..seeding import torch_rng
from ..tuning import GIVEN, as_clip
from ..tunings.text import TextContext
from .text_prompts import TextMethod

_PROMPT = "prompt"


class Experts(TextContext):
    """The client's own context is one expert; K contexts of other clients, which stay as received, are the others."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "experts": GIVEN, "gate.": "own"}
    about = "text context + own gate over others' contexts"
    role_words: ClassVar[dict[str, str]] = {"body": "text context", "own": "gate over its own and others' contexts"}

    experts: int = Field(9, ge=1, description="contexts of other clients that a client receives (K)")
    gate_width: int = Field(128, ge=1, description="width of the gate's queries and keys")
    own_weight: float = Field(0.5, ge=0, description="weight of the own context's logits, added to the mixture's")

    def init(self, model: Model, seed: int) -> Params:
        made, g, width = super().init(model, seed), torch_rng(seed, "gate"), as_clip(model).embedding
        gate = {f"gate.{name}": dense(g, self.gate_width, width)[0] for name in ("query", "key")}
        return {**made, "experts": made["context"].repeat(self.experts, 1, 1), **gate}

    def expert_text(self, model: Model, params: Params) -> Tensor:
        """(K, classes, d)"""
        return torch.stack([self.text_of(model, p) for p in params["experts"]])

    def logits(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        features = self.features(model, params, batch, ctx)
        others = ctx.reference["experts"] if ctx.reference else self.expert_text(model, params)
        return self.mixed(model, params, features, others)

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.mixed(model, params, features, self.expert_text(model, params))

    def mixed(self, model: Model, params: Params, features: Tensor, others: Tensor) -> Tensor:
        """(B, classes). The image asks, the experts' text features of a class answer."""
        clip = as_clip(model)
        text = torch.cat([self.text(model, params)[None], others])  # (1 + K, classes, d)
        queries, keys = F.linear(features, params["gate.query"]), F.linear(text, params["gate.key"])
        attention = (torch.einsum("bg,ecg->ebc", queries, keys) / math.sqrt(self.gate_width)).softmax(0)
        each = torch.stack([clip.logits(model.weights, features, t) for t in text])  # (1 + K, B, classes)
        return self.own_weight * each[0] + (attention * each).sum(0)


class PFedMoap(TextMethod):
    """Training starts from the mean of the last round's contexts. Besides, the server hands contexts on to the clients
    whose own are nearest, before they are averaged."""

    paper = "Luo et al., ICLR 2025"
    averages = False
    tuned = Experts
    private = ("own",)
    memory = ("body",)
    own_down = True

    tuning: Experts = Field(default_factory=Experts, description="what is trained")

    # ---- client half

    def serve(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """With the context that it trained last."""
        return {**self.start(init, down, private, memory), **memory}

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        return {"experts": self.tuning.expert_text(model, params)}

    # ---- server half

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """context          the mean of the last round's contexts
        prompt.{client}  a client's last context, from its first round on"""
        return {"context": init["context"]}

    def down(self, state: State, client: int) -> Params:
        """The mean, and the K contexts of other clients that are nearest to the client's own. Fewer are repeated; if
        there are none, it is the initial context."""
        mean, pool = state["context"], P.under(state, _PROMPT)
        own = pool.pop(str(client), mean)
        others = [pool[key] for key in sorted(pool, key=int)] or [mean]
        near = sorted(others, key=lambda p: float((p - own).square().sum()))
        return {"context": mean, "experts": torch.stack([near[i % len(near)] for i in range(self.tuning.experts)])}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        return super().aggregate(state, updates) | {f"{_PROMPT}.{u.client}": u.up["context"] for u in updates}
