"""The small CNN of pFedPT: two 5x5 convolutions without padding, each pooled 2x2, two hidden layers, a linear head."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import Params, UserError
from ..seeding import torch_rng
from .base import Model, batched, dense


@dataclass
class CNN(Model):
    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        if not batched(x):  # a quarter faster on a CPU; stacked clients become one grouped convolution instead
            x = x.contiguous(memory_format=torch.channels_last)
        for conv in ("conv1", "conv2"):
            x = F.conv2d(x, weights[f"body.{conv}.weight"], weights[f"body.{conv}.bias"])
            x = F.relu(F.max_pool2d(x, 2))  # the same as pooling after the ReLU, on a quarter of the values
        x = x.flatten(1)
        for layer in self._hidden:
            x = F.relu(F.linear(x, weights[f"body.{layer}.weight"], weights[f"body.{layer}.bias"]))
        return x

    @property
    def _hidden(self) -> tuple[str, ...]:
        return ("fc1", "fc2") if "body.fc2.weight" in self.weights else ("fc1",)


def cnn(
    image: tuple[int, int, int],
    classes: int,
    seed: int,
    *,
    name: str = "cnn",
    filters: tuple[int, int] = (64, 64),
    hidden: tuple[int, ...] = (394, 192),
) -> CNN:
    channels, height, width = image
    # Each stage removes 4 pixels (5x5, no padding) and halves the rest.
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    if rows < 1 or columns < 1:
        raise UserError(f'dataset.size: backbone "{name}" needs images of at least 16x16 pixels, got {height}x{width}')
    g = torch_rng(seed, "cnn")
    shapes: dict[str, tuple[int, ...]] = {
        "body.conv1": (filters[0], channels, 5, 5),
        "body.conv2": (filters[1], filters[0], 5, 5),
    }
    inputs = filters[1] * rows * columns
    for i, units in enumerate(hidden, start=1):
        shapes[f"body.fc{i}"] = (units, inputs)
        inputs = units
    shapes["head"] = (classes, inputs)
    weights: Params = {}
    for layer, shape in shapes.items():
        weights[f"{layer}.weight"], weights[f"{layer}.bias"] = dense(g, *shape)
    return CNN(name, image, classes, weights)
