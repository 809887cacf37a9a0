"""CLIP's causal text transformer (Radford et al., ICML 2021), a function of its weights, with slots for context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..params import Params
from .transformer import Activation, attend, complete, layer_norm, project


@dataclass(frozen=True)
class Sentences:
    """One sentence per class: start token, words and slots for context vectors, end token; padded to the longest."""

    ids: Tensor  # (C, N); values in slots and after the end token do not matter
    end: Tensor  # (C,) position of the end token
    slots: Tensor  # (C, L) positions of the context vectors
    shared: int  # leading positions at which all classes have the same token or the same slot, end tokens excluded
    plain: int  # those of them before the first slot

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], slots: Sequence[Sequence[int]] | None = None) -> Sentences:
        """From the token ids of each class, start and end token included, and the positions of its context vectors."""
        slots = slots or [() for _ in rows]
        ends = [len(row) - 1 for row in rows]
        # Negative numbers mark slots, each its own.
        marked = [
            [-1 - places.index(i) if i in places else token for i, token in enumerate(row)]
            for row, places in zip(rows, slots, strict=True)
        ]
        columns = enumerate(zip(*marked, strict=False))  # up to the shortest one
        shared = next((i for i, column in columns if len(set(column)) > 1), min(ends))
        if shared < 1:
            raise ValueError("sentences begin with the same start token")
        plain = next((i for i in range(shared) if marked[0][i] < 0), shared)
        ids = torch.zeros(len(rows), max(ends) + 1, dtype=torch.long)
        for c, row in enumerate(rows):
            ids[c, : len(row)] = torch.tensor(row)
        places = torch.tensor([list(s) for s in slots], dtype=torch.long).reshape(len(rows), -1)
        return cls(ids, torch.tensor(ends), places, shared, plain)

    def to(self, device: torch.device) -> Sentences:
        return replace(self, ids=self.ids.to(device), end=self.end.to(device), slots=self.slots.to(device))


@dataclass(frozen=True)
class TextTower:
    depth: int
    heads: int
    eps: float = 1e-5
    activation: Activation = "quick_gelu"
    at: str = "body.text"  # prefix of its weights' names

    def features(
        self,
        weights: Params,
        sentences: Sentences,
        context: Tensor | None = None,
        deep: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """-> (C, d), the projected end tokens.

        context (L, width), or (C, L, width) with vectors per class, fills the slots (CoOp; Zhou et al., IJCV 2022);
        deep[i], of the same forms, takes its place at layer i = 1, 2, ... (MaPLe; Khattak et al., CVPR 2023).

        The first P positions are the same for all classes, and no token sees later ones: this prefix is computed once,
        (1, P, width), and the classes' own tokens (C, N - P, width) attend to it and to themselves.
        """
        at, deep = self.at, deep or {}
        slots, given = sentences.slots.shape[1], 0 if context is None else context.shape[-2]
        if slots != given:
            raise ValueError(f"{given} context vectors for {slots} slots")
        prompts = [p for p in (context, *deep.values()) if p is not None]
        cut = sentences.plain if any(p.ndim == 3 for p in prompts) else sentences.shared
        classes, length = sentences.ids.shape
        places = torch.arange(length, device=sentences.ids.device)
        # (C, N, L): 1 where the l-th context vector stands; a product with it puts the vectors there, exactly.
        place = (places[:, None] == sentences.slots[:, None, :]).to(weights[f"{at}.position"].dtype)

        h = F.embedding(sentences.ids, weights[f"{at}.tokens"])  # (C, N, width)
        if context is not None:
            h = _fill(h, place, context)
        h = h + weights[f"{at}.position"][:length]
        prefix, own = h[:1, :cut], h[:, cut:]
        causal = places <= places[:, None]  # (N, N)
        for i in range(self.depth):
            if i in deep:
                if deep[i].ndim == 2:  # vectors per class come after the cut
                    prefix = _fill(prefix, place[:1, :cut], deep[i])
                own = _fill(own, place[:, cut:], deep[i])
            name = f"{at}.blocks.{i}"
            q, k, v = project(weights, name, prefix, self.heads, self.eps)
            own_q, own_k, own_v = project(weights, name, own, self.heads, self.eps)
            prefix = complete(weights, name, prefix, attend(q, k, v, causal[:cut, :cut]), self.eps, self.activation)
            own_k = torch.cat([k.expand(classes, -1, -1, -1), own_k], dim=2)
            own_v = torch.cat([v.expand(classes, -1, -1, -1), own_v], dim=2)
            own = complete(weights, name, own, attend(own_q, own_k, own_v, causal[cut:]), self.eps, self.activation)
        end = own[torch.arange(classes, device=own.device), sentences.end - cut]  # (C, width)
        return F.linear(layer_norm(weights, f"{at}.norm", end, self.eps), weights[f"{at}.proj"])


def _fill(h: Tensor, place: Tensor, vectors: Tensor) -> Tensor:
    """h (C, N, width) with the vectors, (L, width) or (C, L, width), in the slots of place (C, N, L)."""
    return torch.where(place.sum(-1, keepdim=True) > 0, place @ vectors, h)
