"""SGPT on a small ViT with queries that point everywhere, its features sample by sample, its keys' slope."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from promptfed.method import Method
from promptfed.methods import create
from promptfed.methods.sgpt import Sgpt
from promptfed.models.vit import vit
from promptfed.params import Params
from promptfed.phases import Batch, Context, Phase
from promptfed.training import Samples, Trained, Work, train
from tiny import CLIENT, ROUND, SEED, near, samples

NAME = "promptfed.methods.sgpt:Sgpt"
IMAGE, CLASSES, WIDTH, DEPTH = (3, 8, 12), 3, 16, 5
MODEL = vit(IMAGE, CLASSES, 0, width=WIDTH, depth=DEPTH, heads=2)
W = MODEL.weights
G, LENGTH = 4, 2
SMALL = {"groups": G, "prompt_length": LENGTH, "shared_layers": (0, 1), "group_layers": (2, 4), "standardise": False}
SHARED, GROUP = ("shared.0", "shared.1"), ("group.2", "group.4")
HEAD = ("head.weight", "head.bias")
MIDDLE = torch.tensor([0.5, 0.5])


def small(**settings: Any) -> Sgpt:
    method = create(NAME, {**SMALL, **settings})
    assert isinstance(method, Sgpt)
    return method


def some(method: Method, seed: int = 1) -> Params:
    """Parameters that no symmetry can hide a mistake in."""
    return near(method.tuning.init(MODEL, SEED), seed, 0.3)


def data(n: int, client: int = CLIENT) -> Samples:
    """Images, and in place of their queries, which are much alike in a fresh model, numbers that point everywhere."""
    found = samples(n, client, IMAGE)
    query = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(client))
    return Samples(found.x, found.y, found.mean, found.std, {"query": query})


def whole(n: int = 6, frozen: bool = True) -> Batch:
    held = data(n)
    return Batch(held.images(slice(None)), held.y, None, MIDDLE, {}, held.frozen if frozen else {})


def context(phase: Phase | None = None, counts: Any = (0,) * G, own: Any = None) -> Context:
    down = {"counts": torch.tensor(counts, dtype=torch.float32)}
    stats = {} if own is None else {"selected": torch.tensor(own, dtype=torch.float32)}
    return Context(down, {}, phase, torch.tensor(6), torch.ones(CLASSES), {}, stats)


def block(method: Sgpt, name: str) -> Phase:
    return next(phase for phase in method.phases(1) if phase.name == name)


def work(params: Params, n: int, client: int = CLIENT, counts: Any = (0,) * G) -> Work:
    return Work(client, data(n, client), params, context(counts=counts).down, {})


def local_round(method: Sgpt, works: list[Work], phases: tuple[Phase, ...] | None = None) -> list[Trained]:
    return train(method, MODEL, works, phases or method.phases(ROUND), SEED, ROUND)


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def cosines(query: Tensor, keys: Tensor) -> np.ndarray:
    return unit(query.double().numpy()) @ unit(keys.detach().double().numpy()).T


def pooled(
    params: Params, x: Tensor, chosen: list[int] | None, shared: bool = True, first: int | None = None
) -> Tensor:
    """Layer by layer, sample by sample: the mean of cls and the group's tokens behind the final norm; or of so many
    first ones."""
    found = []
    for i, h in enumerate(MODEL.embed(W, x)):
        cls, groups, standing, patches = h[:1], h[:0], h[:0], h[1:]
        for layer in range(DEPTH):
            if shared and f"shared.{layer}" in params:
                standing = torch.cat([params[f"shared.{layer}"], standing])
            if chosen is not None and f"group.{layer}" in params:
                groups = torch.cat([params[f"group.{layer}"][chosen[i]], groups])
            sizes = [1, len(groups), len(standing), len(patches)]
            tokens = torch.cat([cls, groups, standing, patches])[None]
            cls, groups, standing, patches = MODEL.block(W, f"body.blocks.{layer}", tokens)[0].split(sizes)
        assert len(groups) == (0 if chosen is None else LENGTH * 2)
        found.append(MODEL.norm(W, torch.cat([cls, groups])[:first]).mean(0))
    return torch.stack(found)


def key_gradient(keys: np.ndarray, query: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of the mean of -cos: d cos / dk = (q^ - cos k^) / |k|."""
    found = np.zeros_like(keys)
    for q, g in zip(unit(query), chosen, strict=True):
        k = unit(keys[g])
        found[g] -= (q - (q @ k) * k) / np.linalg.norm(keys[g]) / len(query)
    return found
