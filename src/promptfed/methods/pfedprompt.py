"""pFedPrompt: a shared text context, and attention of each client over the stored features of its own images.

Guo et al., "pFedPrompt: Learning Personalized Prompt for Vision-Language Models in Federated Learning" (WWW 2023).
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Model, Params, State
from ..tuning import STORED, as_clip
from ..tunings.text import TextContext
from .text_prompts import TextMethod


class FeatureStore(TextContext):
    """To the text's logit of a class is added how near the image is to the client's stored images of that class."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "store.": STORED}
    about = "text context + stored image features"
    role_words: ClassVar[dict[str, str]] = {"body": "text context", STORED: "features of its images"}
    per_class = True

    shots: int = Field(16, ge=1, description="training samples of each class whose features a client stores")
    own_weight: float = Field(1.0, ge=0, description="weight of the attention over stored features (alpha)")
    sharpness: float = Field(5.5, gt=0, description="how fast attention falls with the distance of features (beta)")

    def init(self, model: Model, seed: int) -> Params:
        filled = torch.zeros(model.classes, self.shots)
        keys = torch.zeros(model.classes, self.shots, as_clip(model).embedding)
        return {**super().init(model, seed), "store.keys": keys, "store.filled": filled}

    def stored(self, model: Model, params: Params, batches: Iterator[Batch]) -> Params:
        """The features of the first `shots` samples of each class; a place that is not filled does not count."""
        keys, filled = params["store.keys"].clone(), params["store.filled"].clone()
        for batch in batches:
            features = (batch.frozen or self.frozen(model, batch.x))["features"]
            for feature, label in zip(features, batch.y.tolist(), strict=True):
                place = int(filled[label].sum())
                if place < self.shots:
                    keys[label, place], filled[label, place] = feature, 1
        return {"store.keys": keys, "store.filled": filled}

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return self.text_logits(model, params, features) + self.own_weight * self.attention(params, features)

    def text_logits(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return super().head(model, params, features)

    def attention(self, params: Params, features: Tensor) -> Tensor:
        """(B, classes): the sum of exp(-beta (1 - cos)) over the stored features of each class."""
        cosines = torch.einsum("bd,csd->bcs", features, params["store.keys"])
        return ((self.sharpness * (cosines - 1)).exp() * params["store.filled"]).sum(-1)


class PFedPrompt(TextMethod):
    """The context is trained by the text's logits alone: in training, an image would find itself in the store."""

    paper = "Guo et al., WWW 2023"
    tuned = FeatureStore

    tuning: FeatureStore = Field(default_factory=FeatureStore, description="what is trained")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        logits = self.tuning.text_logits(model, params, self.tuning.features(model, params, batch, ctx))
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}

    def common(self, state: State) -> Params:
        """The shared context, with an empty store."""
        return {**self.down(state, client=0), "store.filled": torch.zeros(1, 1)}
