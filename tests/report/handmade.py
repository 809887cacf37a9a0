"""Lines of rounds.jsonl, written by hand: nothing is trained for a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Line = dict[str, Any]


def stage(accuracies: Sequence[float | None], wide: float | None = 0.5, ids: Sequence[int] | None = None) -> Line:
    """An evaluation in which the clients reached these accuracies."""
    known = [a for a in accuracies if a is not None]
    local = {"mean": float(np.mean(known)), "std": float(np.std(known)), "worst": min(known)} if known else {}
    ids = ids or range(len(accuracies))
    return {
        "summary": {
            "local": {"mean": None, "std": None, "worst": None, "weighted": None, **local},
            "macro_f1": None,
            "global": wide,
            "global_macro_f1": None,
            "loss": None,
            "val": None,
        },
        "passes": 0,
        "clients": [
            {"client": i, "n_test": 0 if a is None else 10, "accuracy": a} for i, a in zip(ids, accuracies, strict=True)
        ],
    }


def line(
    number: int,
    clients: Sequence[int],
    left_out: Sequence[int] = (),
    loss: float | None = 1.0,
    sent: int = 0,
    **more: Line,
) -> Line:
    """A line of rounds.jsonl. `sent`: bytes each way, of all clients together."""
    return {
        "round": number,
        "clients": list(clients),
        "left_out": [{"client": i, "why": "non-finite loss"} for i in left_out],
        "train_loss": loss,
        "passes": 1,
        "bytes": {"clients": len(clients), "up": sent, "down": sent, "parameters_up": sent // 4, "parameters_down": 0},
        "seconds": {"train": 0.1},
        **more,
    }
