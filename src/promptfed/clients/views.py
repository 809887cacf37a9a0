"""Views of training samples, as batches hold them: images, or outputs of frozen layers for these views."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..data.augment import Augment, FixedViews
from ..models import Model
from ..params import Params
from ..training import Samples
from ..tuning import Tuning
from .frozen import FrozenValues, inputs


@dataclass(frozen=True)
class NewViews:
    """A new view in every epoch. Outputs of frozen layers are computed for every batch."""

    tuning: Tuning
    model: Model
    n: int  # of the client's samples
    augment: Augment

    def draw(self, g: np.random.Generator) -> np.ndarray:
        return self.augment.draw(self.n, self.model.image[1:], g)

    def __call__(self, samples: Samples, at: Tensor, drawn: np.ndarray) -> tuple[Tensor, Params]:
        x = self.augment(samples.x[at], drawn, self.model.resize.interpolation)
        return inputs(self.tuning, self.model, samples.normalise(x))


@dataclass(frozen=True)
class SomeViews:
    """In every epoch one of a few fixed views, whose outputs of frozen layers are cached where there is room."""

    tuning: Tuning
    model: Model
    index: np.ndarray  # (n,) of the client's samples in the dataset
    fixed: FixedViews
    values: FrozenValues | None  # of the fixed views, if the tuning has any

    def draw(self, g: np.random.Generator) -> np.ndarray:
        return self.index * self.fixed.views + g.integers(self.fixed.views, size=len(self.index))

    def __call__(self, samples: Samples, at: Tensor, drawn: np.ndarray) -> tuple[Tensor, Params]:
        if self.values is None or not self.values.cached:
            return inputs(self.tuning, self.model, samples.normalise(self.fixed(drawn)))
        images = samples.normalise(self.fixed(drawn)) if self.tuning.images else samples.mean.new_empty(len(at), 0)
        return images, self.values(drawn)
