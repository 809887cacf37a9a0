"""The optimisers of local training: one for all parameters of a phase that have the same settings."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Method, Optimizer, Params, Phase


class Sgd:
    """torch.optim.SGD to the last bit. What that does besides takes longer than the step of a small client."""

    def __init__(self, settings: Optimizer, moving: Params) -> None:
        self.settings, self.moving = settings, moving
        self.momentum: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        o, moving = self.settings, list(self.moving.values())
        descent = [p.grad for p in moving if p.grad is not None]
        if o.weight_decay:
            descent = list(torch._foreach_add(descent, moving, alpha=o.weight_decay))
        if o.momentum:
            if self.momentum:
                torch._foreach_mul_(self.momentum, o.momentum)
                torch._foreach_add_(self.momentum, descent)
            else:
                self.momentum = [d.clone() for d in descent]
            descent = self.momentum
        torch._foreach_add_(moving, descent, alpha=-o.lr)


def optimizers(method: Method, phase: Phase, trained: Params) -> list[torch.optim.Optimizer | Sgd]:
    kinds: dict[Optimizer, Params] = {}
    for name, p in trained.items():
        kinds.setdefault(phase.train[method.tuning.role(name)], {})[name] = p
    return [_made(settings, moving) for settings, moving in kinds.items()]


def _made(o: Optimizer, moving: Params) -> torch.optim.Optimizer | Sgd:
    if o.kind == "sgd":
        return Sgd(o, moving)
    kind = torch.optim.Adam if o.kind == "adam" else torch.optim.AdamW
    return kind(moving.values(), o.lr, weight_decay=o.weight_decay, foreach=True)
