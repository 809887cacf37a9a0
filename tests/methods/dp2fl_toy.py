"""A small CLIP, DP2FL on it, and a server's state with what three clients send to it."""

from typing import Any

import torch
from torch import Tensor

from promptfed import models
from promptfed.method import State
from promptfed.methods.dp2fl import Dp2fl
from promptfed.methods.dp2fl.sealed import SealedDp2fl
from promptfed.models.clip import CLIP
from promptfed.phases import Batch, Context, Update
from promptfed.testing import NAMES
from promptfed.tunings.maple import Maple

SIZES = (5, 4, 3, 1, 4)
CTX = Context({}, {}, None, torch.tensor(1), torch.ones(4))


def mini() -> CLIP:
    made = models.build("clip-mini", (3, 32, 32), 4, 5, NAMES)
    assert isinstance(made, CLIP)
    return made


MODEL = mini()


def method_of(**given: Any) -> Dp2fl:
    kind = SealedDp2fl if given.get("privacy") == "sealed" else Dp2fl
    return kind(tuning=Maple(depth=2), **{"epochs": 1, **given})


def batch_of(x: Tensor, y: Tensor | None = None) -> Batch:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Batch(x, labels, None, torch.tensor([0.5, 0.5]), {})


def images(n: int = 3, seed: int = 0, side: int = 32) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def toy_state(method: Dp2fl, holders: tuple[int, ...] = (0, 1)) -> State:
    """Three clients, of which the last has no validation data."""
    state = method.begin(MODEL, method.tuning.init(MODEL, 0), 0)
    for client in range(3):
        hello = {"x": torch.full((1, 17, 128), float(client)), "y": torch.tensor([client])}
        if method.privacy == "sealed":
            hello["key"] = torch.full((32,), 200 - client, dtype=torch.uint8)
        state = method.admit(state, client, hello if client in holders else {}, 0)
    return state


def toy_updates(method: Dp2fl, state: State, clients: tuple[int, ...] = (0, 1, 2)) -> list[Update]:
    losses = {0: (0.4, 1.1), 1: (0.9, 0.6), 2: (5.0, 1.05)}  # of client i's model on the sets of 0 and 1
    before = {0: 1.0, 1: 1.0}
    updates = []
    for client in clients:
        g = torch.Generator().manual_seed(client)
        sent = method.down(state, client)
        up = {n: sent[n] + 0.1 * torch.randn(sent[n].shape, generator=g) for n in method.tuning.init(MODEL, 0)}
        stats = {f"loss.{j}": torch.tensor(v, dtype=torch.float64) for j, v in enumerate(losses[client])}
        stats["total"] = torch.tensor(sum(losses[client]), dtype=torch.float64)
        if client in before:
            stats["before"] = torch.tensor(before[client], dtype=torch.float64)
        updates.append(Update(client, sent, up, 10**client, stats))
    return updates
