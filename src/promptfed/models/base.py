"""What every backbone is: named weights, and two pure functions of them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.images import Resize
from ..params import Params
from .pretrained.preprocess import Preprocess


@dataclass
class Model(ABC):
    """A backbone with prompt slots.

    `weights` are the values it comes with. They stay frozen unless a tuning trains a copy of them; the functions below
    therefore take the weights to use as an argument. A pixel prompt needs no slot of its own (it is added to x);
    `width` is the size of a token for backbones that take tokens, and None for the others. Pre-trained weights come
    with the `preprocess` that their images need.
    """

    name: str
    image: tuple[int, int, int]  # channels, height, width
    classes: int
    weights: Params = field(repr=False, default_factory=dict)
    width: int | None = None
    preprocess: Preprocess | None = field(default=None, kw_only=True)

    @property
    def resize(self) -> Resize:
        """How images of any size become its own."""
        return self.preprocess.resize if self.preprocess else Resize(self.image[1:])

    @abstractmethod
    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """x (B, C, H, W) normalised -> (B, d), what the head sees. tokens (T, width) are inserted after cls."""

    def classify(self, weights: Params, features: Tensor) -> Tensor:
        """(B, d) -> (B, classes)."""
        return F.linear(features, weights["head.weight"], weights["head.bias"])

    def to(self, device: torch.device) -> "Model":
        self.weights = {name: p.to(device) for name, p in self.weights.items()}
        return self


def batched(*tensors: Tensor) -> bool:
    """Whether vmap batches one of the tensors, also under a gradient."""
    functorch = torch._C._functorch

    def inside(t: Tensor) -> Tensor:
        while functorch.is_gradtrackingtensor(t):
            t = functorch.get_unwrapped(t)
        return t

    return any(functorch.is_batchedtensor(inside(t)) for t in tensors)


def dense(g: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear or convolutional layer, uniform in +-1/sqrt(fan in) (PyTorch's own default)."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(shape).uniform_(-bound, bound, generator=g), torch.empty(shape[0]).uniform_(
        -bound, bound, generator=g
    )


def normal(g: torch.Generator, *shape: int, std: float = 0.02) -> Tensor:
    return torch.randn(shape, generator=g) * std
