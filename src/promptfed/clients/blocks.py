"""How many clients an accelerator trains as one block (`engine.block = "auto"`): as many as its memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import params as P
from ..method import Method
from ..models import Model
from ..phases import Phase
from ..training import LocalPhase, Trained, Work

MOST = 64  # clients in a block
_COPIES = 4  # of what is trained: values, gradients and two moments of an optimiser
_SHARE = 0.5  # of free memory; the rest is for gradients of activations, and for what the estimate leaves out


def fitting(method: Method, model: Model, work: Work, phases: Sequence[Phase], free: int) -> int:
    """A power of two, so that it hardly depends on how much memory other programs use at the moment."""
    needs = max((client_bytes(method, model, work, phase) for phase in phases), default=0)
    fit = int(_SHARE * free) // max(needs, 1)
    return 1 << (max(1, min(fit, MOST)).bit_length() - 1)


def client_bytes(method: Method, model: Model, work: Work, phase: Phase) -> int:
    """What a client adds to a block's memory: its samples, what it trains, and all that its loss makes on the way."""
    block, before = [work] * 2, [Trained(work.params)] * 2  # stacked clients have other operations than a single one
    local = LocalPhase(method, model, block, before, phase, torch.zeros)
    index = np.arange(min(len(work.samples), phase.batch_size))
    views = work.samples.views.draw(np.random.default_rng(0))[index] if work.samples.views else None
    made = _Made()
    with made:
        local.loss(local.state, local._batch([index] * 2, torch.zeros(2, 2, device=work.samples.y.device), [views] * 2))
    held = P.nbytes({"x": work.samples.x, **work.samples.frozen})
    return 2 * held + _COPIES * P.nbytes(local.state.trained) // 2 + made.bytes // 2


def free_bytes(device: torch.device) -> int:
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return int(torch.cuda.mem_get_info(device)[0])


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations make: views of their arguments are not new."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        old, new = _storages((args, kwargs)), _storages(made)
        self.bytes += sum(size for storage, size in new.items() if storage not in old)
        return made


def _storages(tree: Any) -> dict[int, int]:
    """Their sizes, by what tells them apart."""
    found = (t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}
