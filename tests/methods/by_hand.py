"""A local round on the linear model of tiny.py, and gradients that the tests of several methods descend."""

from typing import Any

import numpy as np
import torch

from promptfed.method import Method
from promptfed.params import Params
from promptfed.phases import Batch, Context
from promptfed.training import Trained, Work, train
from tiny import BODY, CLASSES, HEAD, IMAGE, ROUND, SEED, Numbers, features, gradients, linear, samples, softmax

MODEL = linear()
N, B = 10, 4  # two whole batches and a short one
LR = 0.1
WEIGHTS = (*BODY, *HEAD)
SIDES = tuple(f"prompt.{side}" for side in ("top", "bottom", "left", "right"))
COMMON = {"lr": LR, "batch_size": B, "epochs": 2}


def at(lr: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, lr)


def initial(method: Method) -> Params:
    return method.tuning.init(MODEL, SEED)


def local_round(method: Method, one: Work) -> Trained:
    return train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0]


def whole(n: int = 6, client: int = 1) -> Batch:
    data = samples(n, client)
    return Batch(data.images(slice(None)), data.y, None, torch.tensor([0.5, 0.5]), {})


def context(method: Method, down: Params | None = None, memory: Params | None = None) -> Context:
    return Context(down or {}, memory or {}, method.phases(1)[-1], torch.tensor(6), torch.ones(CLASSES))


# ---- FedProx, Eq. 2


def proximal(mu: float, center: Numbers) -> Any:
    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {**g, **{name: g[name] + mu * (p[name] - center[name]) for name in center}}

    return gradient


# ---- MOON, Eq. 3


def contrastive(mu: float, temperature: float, received: Numbers, previous: Numbers) -> Any:
    """l = -log(exp(cos(z, z_r)/t) / (exp(cos(z, z_r)/t) + exp(cos(z, z_p)/t))), differentiated by hand in z."""

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        z = features(p, x)
        length = np.linalg.norm(z, axis=1, keepdims=True)
        cosines, slopes = [], []
        for model in (received, previous):
            u = features(model, x)
            u = u / np.linalg.norm(u, axis=1, keepdims=True)
            cosine = (z * u).sum(1, keepdims=True) / length
            cosines.append(cosine)
            slopes.append(u / length - cosine * z / length**2)
        share = softmax(np.concatenate(cosines, 1) / temperature)
        in_z = ((share[:, :1] - 1) * slopes[0] + share[:, 1:] * slopes[1]) / temperature
        return gradients(p, x, y, more=mu * in_z / len(y))

    return gradient


# ---- pFedPT, Eq. 5 and 6

SIZE = 1
PROMPT = {"prompt_size": SIZE, "prompt_lr": 0.8, "prompt_epochs": 2}


def frame(p: Numbers) -> np.ndarray:
    canvas = np.zeros(IMAGE)
    canvas[:, :SIZE], canvas[:, -SIZE:] = p["prompt.top"], p["prompt.bottom"]
    canvas[:, SIZE:-SIZE, :SIZE], canvas[:, SIZE:-SIZE, -SIZE:] = p["prompt.left"], p["prompt.right"]
    return canvas


def in_prompt(g: np.ndarray) -> Numbers:
    """The gradient in the sides of the frame, from the gradient (B, C, H, W) in the input."""
    g = g.sum(0)
    middle = g[:, SIZE:-SIZE]
    return dict(zip(SIDES, (g[:, :SIZE], g[:, -SIZE:], middle[:, :, :SIZE], middle[:, :, -SIZE:]), strict=True))


def prompted(gradient: Any = gradients) -> Any:
    """The gradient of a loss on x + d_i."""

    def wrapped(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradient(p, x + frame(p), y)
        return {**g, **in_prompt(g["x"])}

    return wrapped
