"""The embedded CLIP on a few random images, and what its two towers make of them: for expected numbers."""

import math

import numpy as np
import torch

from promptfed import models
from promptfed.methods import create
from promptfed.models.clip import CLIP
from promptfed.params import Params
from promptfed.phases import Batch, Context, Phase

MODEL = models.build("clip-mini", (3, 32, 32), 3, 0, ("circle", "square", "star"))
assert isinstance(MODEL, CLIP)
SCALE = math.exp(float(MODEL.weights["body.scale"]))
X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
Y = [0, 1, 2, 0]
COUNTS = torch.tensor([2, 1, 1])


def batch_of(y: list[int] = Y) -> Batch:
    return Batch(X, torch.tensor(y), None, torch.zeros(2), {})


def context(phase: Phase | None = None) -> Context:
    return Context({}, {}, phase, torch.tensor(4), COUNTS)


def near(params: Params, seed: int, scale: float = 0.1) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {name: p + scale * torch.randn(p.shape, generator=g) for name, p in params.items()}


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def image() -> np.ndarray:
    """(4, d)"""
    return unit((MODEL.image_tower.features(MODEL.weights, X) @ MODEL.weights["body.image.proj"].T).numpy())


def text(vectors: torch.Tensor) -> np.ndarray:
    """(classes, d) with these context vectors before the class name."""
    sentences = MODEL.sentences(context=len(vectors))
    return unit(MODEL.text_tower.features(MODEL.weights, sentences, vectors).numpy())


def zero_shot() -> np.ndarray:
    return unit(MODEL.text_tower.features(MODEL.weights, MODEL.sentences("a photo of a {}.")).numpy())


def cross_entropy(logits: np.ndarray, y: list[int] = Y) -> float:
    return float(np.mean([np.log(np.exp(row - row[k]).sum()) for row, k in zip(logits, y, strict=True)]))


def loss_of(name: str, params: Params, **settings: object) -> float:
    return float(create(name, settings).loss(MODEL, params, batch_of(), context())[0])
