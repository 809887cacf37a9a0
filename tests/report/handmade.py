"""Lines of rounds.jsonl, written by hand: nothing is trained for a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Line = dict[str, Any]
HOSTILE = '<b>"A" & </script><script>boom()</script>'  # a label that would break a page that trusts it


def stage(accuracies: Sequence[float | None], wide: float | None = 0.5, ids: Sequence[int] | None = None) -> Line:
    """An evaluation in which the clients' own models reached these accuracies, and this one on all clients' data."""
    known = [a for a in accuracies if a is not None]
    local = {"mean": float(np.mean(known)), "std": float(np.std(known)), "worst": min(known)} if known else {}
    ids = ids or range(len(accuracies))
    return {
        "summary": {
            "local": {"mean": None, "std": None, "worst": None, "weighted": None, **local},
            "macro_f1": None,
            "global": wide,
            "global_macro_f1": wide,
            "loss": None,
            "val": None,
        },
        "passes": 0,
        "clients": [
            {
                **{"client": i, "n_test": 0 if a is None else 10, "accuracy": a},
                **({} if wide is None else {"global_accuracy": wide}),
            }
            for i, a in zip(ids, accuracies, strict=True)
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


def history(mean: float, rounds: int = 4, wide: float | None = 0.5, sent: int = 900, **more: Any) -> list[Line]:
    """Rounds that climb to a mean over three clients."""
    each = [np.array([-0.1, 0.0, 0.1]) + mean * at / rounds for at in range(1, rounds + 1)]
    return [
        line(at, [0, 1, 2], loss=2.0 / at, sent=sent, aggregated=stage(list(np.clip(a, 0.01, 1)), wide), **more)
        for at, a in enumerate(each, 1)
    ]
