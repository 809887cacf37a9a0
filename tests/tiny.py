"""A model small enough to differentiate by hand, its gradients in NumPy, and a few samples for it.

The NumPy half is written in float64 from the formulas alone; of the package it uses only the seeded generator.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from promptfed.clients.host import Host
from promptfed.clients.store import Store
from promptfed.method import Method
from promptfed.methods import METHODS
from promptfed.models import Model
from promptfed.params import Params
from promptfed.seeding import rng
from promptfed.training import Samples, Work

torch.set_num_threads(1)

Numbers = dict[str, np.ndarray]
Gradient = Callable[[Numbers, np.ndarray, np.ndarray], Numbers]

# Methods that train all weights of any model, need nothing from enrollment and send no stats.
OTHER = ("fedmix", "fedem", "fedproto")
PLAIN = [name for name, kind in METHODS.items() if kind.tuned is Method.tuned and name not in OTHER]

IMAGE = (2, 5, 6)
CLASSES = 3
BODY = ("body.weight", "body.bias")
HEAD = ("head.weight", "head.bias")
SEED, ROUND, CLIENT = 3, 2, 5  # not zero, and all different


@dataclass
class Linear(Model):
    """Two linear layers with nothing between them."""

    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        return x.flatten(1) @ weights["body.weight"].T + weights["body.bias"]


def linear(seed: int = 0, image: tuple[int, int, int] = IMAGE, classes: int = CLASSES, width: int = 4) -> Linear:
    g = np.random.default_rng(seed)
    shapes = {
        "body.weight": (width, int(np.prod(image))),
        "body.bias": (width,),
        "head.weight": (classes, width),
        "head.bias": (classes,),
    }
    weights = {name: torch.from_numpy(g.normal(0, 0.3, shape).astype(np.float32)) for name, shape in shapes.items()}
    return Linear("linear", image, classes, weights)


def samples(n: int, seed: int = 0, image: tuple[int, int, int] = IMAGE, classes: int = CLASSES) -> Samples:
    g = np.random.default_rng([seed, 99])
    half = torch.full((image[0], 1, 1), 127.5)
    x = torch.from_numpy(g.integers(0, 256, (n, *image)).astype(np.uint8))
    return Samples(x, torch.from_numpy(g.integers(0, classes, n)), half, half.clone())


def work(
    params: Params, n: int = 10, client: int = CLIENT, down: Params | None = None, memory: Params | None = None
) -> Work:
    return Work(client, samples(n, client), dict(params), down or {}, memory or {})


def near(params: Params, seed: int, scale: float = 0.2) -> Params:
    """Parameters of the same names and shapes with other values."""
    g = np.random.default_rng([seed, 7])
    return {k: v + torch.from_numpy(g.normal(0, scale, v.shape).astype(np.float32)) for k, v in params.items()}


def toy_host(method: Method, path: Path, sizes: Sequence[int] = (8, 6), block: int = 1) -> Host:
    """The linear model and clients with this many training samples, no validation or test data."""
    data, empty = samples(sum(sizes)), np.arange(0)
    places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    half = (0.5,) * IMAGE[0]
    federation = SimpleNamespace(
        dataset=SimpleNamespace(images=data.x.numpy(), labels=data.y.numpy(), mean=half, std=half),
        sites=[SimpleNamespace(train=index, val=empty, test=empty) for index in places],
    )
    store = Store(path / "clients")
    return Host(
        method=method,
        model=linear(),
        federation=federation,  # type: ignore[arg-type]
        store=store,
        seed=SEED,
        device=torch.device("cpu"),
        block=block,
    )


# ---- by hand


def numbers(params: Params) -> Numbers:
    return {name: p.detach().double().numpy() for name, p in params.items()}


def arrays(data: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Images normalised with mean .5 and std .5, and labels."""
    return (data.x.numpy() / 255 - 0.5) / 0.5, data.y.numpy()


def features(p: Numbers, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1) @ p["body.weight"].T + p["body.bias"]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy(p: Numbers, x: np.ndarray, y: np.ndarray) -> float:
    probability = softmax(features(p, x) @ p["head.weight"].T + p["head.bias"])
    return float(-np.log(probability[np.arange(len(y)), y]).mean())


def gradients(p: Numbers, x: np.ndarray, y: np.ndarray, more: np.ndarray | None = None) -> Numbers:
    """Of the mean cross-entropy with respect to the four parameters and the input ("x"). `more` (B, d): the gradient of
    other terms of the loss with respect to the features."""
    f = features(p, x)
    d_logits = (softmax(f @ p["head.weight"].T + p["head.bias"]) - np.eye(CLASSES)[y]) / len(y)
    d_features = d_logits @ p["head.weight"] + (0 if more is None else more)
    return {
        "head.weight": d_logits.T @ f,
        "head.bias": d_logits.sum(0),
        "body.weight": d_features.T @ x.reshape(len(x), -1),
        "body.bias": d_features.sum(0),
        "x": (d_features @ p["body.weight"]).reshape(x.shape),
    }


def plan(n: int, batch_size: int, epochs: int, number: int = 0, client: int = CLIENT) -> list[np.ndarray]:
    """The samples of each step of phase `number`: one permutation per epoch, cut into batches."""
    g = rng(SEED, ROUND, client, "batches", number)
    orders = [g.permutation(n) for _ in range(epochs)]
    return [order[i : i + batch_size] for order in orders for i in range(0, n, batch_size)]


def descend(
    p: Numbers,
    data: Samples,
    steps: Iterable[np.ndarray],
    lr: Mapping[str, float],
    gradient: Gradient = gradients,
    momentum: float = 0.0,
) -> Numbers:
    """SGD on the names in lr, each at its own rate; all others stay fixed."""
    x, y = arrays(data)
    velocity = {name: np.zeros_like(p[name]) for name in lr}
    for index in steps:
        g = gradient(p, x[index], y[index])
        velocity = {name: momentum * v + g[name] for name, v in velocity.items()}
        p = {name: v - lr[name] * velocity[name] if name in lr else v for name, v in p.items()}
    return p


def same(params: Params, expected: Numbers, tolerance: float = 2e-5) -> None:
    assert set(params) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name].numpy(), value, rtol=tolerance, atol=tolerance, err_msg=name)


def distance(a: Numbers, b: Numbers) -> float:
    """The largest difference; tests use it to show that they would notice a missing term."""
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)
