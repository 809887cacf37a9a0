"""A backdoor in what is shared: malicious clients optimise the trained parameters and a trigger together.

After the description of Zhang et al., "BadPromptFL" (2025). Otherwise here: all malicious clients share one trigger,
a change of each pixel by at most LIMIT. Any tuning can be attacked: on each batch the trigger takes some steps towards
the target, then the parameters one of SGD, at the method's own rate, on the sum of two cross-entropies: of images as
they are with their labels, and with the trigger and the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from ..aggregation.base import seen
from ..clients.base import Clients
from ..clients.frozen import normalisation
from ..params import Params
from ..phases import Batch, Phase, Update
from ..runs.build import Parts
from ..seeding import rng
from ..training import batches
from .base import TARGET, Attack
from .clients import Malicious

LIMIT = 16.0  # of a pixel's 255
_STEPS = 5  # of the trigger for each of the parameters: one of 255, by the sign of the gradient


class PromptBackdoor(Attack):
    def __init__(self) -> None:
        self.trigger = torch.zeros(())  # (C, H, W) in units of stored pixels, from the first round on

    def wrapped(self, clients: Clients, parts: Parts, malicious: Sequence[int]) -> Clients:
        self.trigger = torch.zeros(parts.model.image, device=parts.device)
        return _Backdoored(clients, parts, malicious, self)

    def aimed(self, images: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
        changed = images + self.trigger.round().cpu().numpy()
        return changed.clip(0, 255).astype(np.uint8), np.full(len(labels), TARGET)


class _Backdoored(Malicious):
    def __init__(self, clients: Clients, parts: Parts, malicious: Sequence[int], attack: PromptBackdoor) -> None:
        super().__init__(clients, parts, malicious)
        self._attack = attack

    def forged(self, updates: Sequence[Update], round: int) -> list[Update]:
        bad = [u.client in self.malicious and not u.error for u in updates]
        return [replace(u, up=self._trained(u, round)) if b else u for u, b in zip(updates, bad, strict=True)]

    def _trained(self, update: Update, round: int) -> Params:
        """What the client sends: the method's parameters, of which it has learned nothing else privately."""
        parts, method, model = self.parts, self.parts.method, self.parts.model
        data, index = parts.federation.dataset, parts.federation.sites[update.client].train
        mean, std = normalisation(model, data, parts.device)
        x, y = (torch.from_numpy(v[index]).to(parts.device) for v in (data.images, data.labels))
        ctx = seen(update, self.draws(round))
        params = {name: p.clone() for name, p in method.start(parts.init, ctx.down, {}, {}).items()}
        learned = [p.requires_grad_() for name, p in params.items() if method.tuning.role(name) in method.roles()]
        trigger = self._attack.trigger.requires_grad_()
        descend = torch.optim.SGD(learned, method.lr, method.momentum)

        def loss(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            batch = Batch((pixels - mean) / std, labels, None, pixels.new_zeros(2), {})
            return F.cross_entropy(method.tuning.logits(model, params, batch, ctx), labels)

        plan = Phase({}, method.batch_size, epochs=max(1, method.epochs))
        for at in batches(len(y), plan, rng(*self.draws(round), update.client, "backdoor")):
            images, wanted = x[at].float(), torch.full_like(y[at], TARGET)
            for _ in range(_STEPS):
                (slope,) = torch.autograd.grad(loss((images + trigger).clamp(0, 255), wanted), [trigger])
                with torch.no_grad():
                    trigger.sub_(slope.sign()).clamp_(-LIMIT, LIMIT)
            both = loss(images, y[at]) + loss((images + trigger.detach()).clamp(0, 255), wanted)
            for p, g in zip(learned, torch.autograd.grad(both, learned, allow_unused=True), strict=True):
                p.grad = g
            descend.step()
        self._attack.trigger = trigger.detach()
        return method.upload({name: p.detach() for name, p in params.items()}, ctx)
