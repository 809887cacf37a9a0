"""Inversion of an update that one step on one sample has made: its label and its image, by the gradient they cause.

After Zhu et al., "Deep Leakage from Gradients" (NeurIPS 2019), with the cosine of Geiping et al. (NeurIPS 2020): image
and label are optimised so that their gradient points where the update does. The observer knows the model, what the
client has received and the learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..clients.frozen import normalisation
from ..method import Method
from ..models import Model
from ..params import Params
from ..phases import Batch, Context
from ..privacy import Privacy, randomness
from ..runs.build import Parts
from ..seeding import torch_rng

_STEPS, _RATE = 150, 0.1


@dataclass(frozen=True)
class Recovered:
    labels: float  # share that is right
    error: float  # mean squared error of pixels in 0..1
    random: float  # that of another image of the same samples in place of the recovered one


def recover(parts: Parts, params: Params, index: np.ndarray, privacy: Privacy | None) -> Recovered:
    """Of the samples at `index`, each the only one of an update that starts from these parameters."""
    method, model, data = parts.method, parts.model, parts.federation.dataset
    mean, std = normalisation(model, data, parts.device)
    pixels = torch.from_numpy(data.images[index]).to(parts.device).float() / 255
    y = torch.from_numpy(data.labels[index]).to(parts.device)

    def slopes(x: Tensor, label: Tensor) -> Tensor:
        """(n, d) gradients of images (n, C, H, W) in 0..1 with label distributions (n, classes)"""
        each = vmap(grad(_loss), in_dims=(None, None, None, None, 0, 0))
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
            made = each(_trained(method, params), params, method, model, (255 * x - mean) / std, label)
        return torch.cat([made[name].flatten(1) for name in made], dim=1)

    with torch.no_grad():
        sent = slopes(pixels, torch.nn.functional.one_hot(y, model.classes).float())
    if privacy:
        seed, rate = parts.config.seed, method.lr
        each = [privacy.release({"w": -rate * g}, {"w": 0 * g}, randomness(seed, i, 0)) for i, g in enumerate(sent)]
        sent = torch.stack([-up["w"] for up in each])
    g = torch_rng(parts.config.seed, "inversion")
    x = torch.randn(pixels.shape, generator=g).to(parts.device).requires_grad_()  # before a sigmoid
    label = torch.zeros(len(y), model.classes, device=parts.device, requires_grad=True)  # before a softmax
    descend = torch.optim.Adam([x, label], _RATE)
    for _ in range(_STEPS):
        near = torch.nn.functional.cosine_similarity(slopes(x.sigmoid(), label.softmax(1)), sent, dim=1)
        x.grad, label.grad = torch.autograd.grad(-near.sum(), [x, label])
        descend.step()
    errors = [(one.detach() - pixels).square().mean() for one in (x.sigmoid(), pixels.roll(1, 0))]
    return Recovered(float((label.argmax(1) == y).float().mean()), *map(float, errors))


def _trained(method: Method, params: Params) -> Params:
    return {name: p for name, p in method.shared(params).items() if method.tuning.role(name) in method.roles()}


def _loss(trained: Params, params: Params, method: Method, model: Model, x: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of one image (C, H, W) with a distribution (classes,)."""
    none = torch.zeros((), dtype=torch.int64, device=x.device)
    batch = Batch(x[None], none[None], None, x.new_zeros(2), {})
    ctx = Context({}, {}, None, none, none.expand(model.classes))
    logits = method.tuning.logits(model, {**params, **trained}, batch, ctx)[0]
    return -(label * logits.log_softmax(0)).sum()
