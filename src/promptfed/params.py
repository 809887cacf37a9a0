"""Params: a flat dict of dotted names to tensors, and the few things done to it."""

import math
from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

Params = dict[str, Tensor]


def under(params: Params, name: str, sep: str = ".") -> Params:
    """The entries below a name, with it removed: under({"val.x": a, "w": b}, "val") is {"x": a}."""
    prefix = name + sep
    return {key.removeprefix(prefix): p for key, p in params.items() if key.startswith(prefix)}


def nested(name: str, params: Params, sep: str = ".") -> Params:
    """The inverse of under(): all entries, below a name."""
    return {f"{name}{sep}{key}": p for key, p in params.items()}


def groups(params: Params) -> dict[str, Params]:
    """{"3.x": a, "3.y": b} -> {"3": {"x": a, "y": b}}"""
    found: dict[str, Params] = {}
    for key, p in params.items():
        group, _, rest = key.partition(".")
        found.setdefault(group, {})[rest] = p
    return found


class Mean:
    """A weighted mean of items that come one by one. `total`: what their weights are expected to sum to."""

    def __init__(self, total: float) -> None:
        self._expected, self._total = float(total), 0.0
        self._sum: Params = {}

    def add(self, item: Params, weight: float) -> None:
        self._sum = self._sum or {name: torch.zeros_like(p) for name, p in item.items()}
        for name, p in self._sum.items():
            p.add_(item[name], alpha=weight / self._expected)
        self._total += weight

    def value(self) -> Params:
        if self._total == self._expected:
            return self._sum
        return {name: p * (self._expected / self._total) for name, p in self._sum.items()}


def mean(items: Sequence[Params], weights: Sequence[float]) -> Params:
    """Weighted mean; the weights need not sum to one."""
    total = sum(weights)
    if not items or total <= 0:
        raise ValueError("mean() needs at least one item and a positive total weight")
    found = Mean(total)
    for item, weight in zip(items, weights, strict=True):
        found.add(item, weight)
    return found.value()


def minus(a: Params, b: Params) -> Params:
    """a - b, over the names of a."""
    return {name: p - b[name] for name, p in a.items()}


def dot(a: Params, b: Params) -> Tensor:
    """Inner product, over the names of a."""
    return torch.stack([(p * b[name]).sum() for name, p in a.items()]).sum()


def sqdist(a: Params, b: Params) -> Tensor:
    """Squared Euclidean distance over the names of a."""
    return torch.stack([(p - b[name]).square().sum() for name, p in a.items()]).sum()


def sqnorm(a: Params) -> Tensor:
    return torch.stack([p.square().sum() for p in a.values()]).sum()


def stack(items: Sequence[Params]) -> Params:
    """K equal-shaped Params to one with a leading axis of K."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def unstack(params: Params, k: int) -> list[Params]:
    """The inverse of stack; the parts own their memory."""
    return [{name: p[i].clone() for name, p in params.items()} for i in range(k)]


def to(params: Params, device: torch.device) -> Params:
    return {name: p.to(device) for name, p in params.items()}


def digest(params: Params) -> str:
    """A hash of all names, types, shapes and values."""
    found = sha256()
    for name, p in sorted(params.items()):
        found.update(f"{name} {p.dtype} {tuple(p.shape)} ".encode())
        found.update(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def equal(a: Params, b: Params) -> bool:
    """The same names and values."""
    return a.keys() == b.keys() and all(p is b[name] or torch.equal(p, b[name]) for name, p in a.items())


def finite(params: Params) -> bool:
    """Whether no value is infinite or NaN."""
    # A sum is finite only if all its terms are, and is far cheaper than a look at each of them.
    return all(math.isfinite(p.sum().item()) or bool(p.isfinite().all()) for p in params.values())


def nbytes(params: Params) -> int:
    return sum(p.numel() * p.element_size() for p in params.values())


def numel(params: Params) -> int:
    return sum(p.numel() for p in params.values())
