import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import HOSTILE, Line, history

from promptfed.data import Dataset, Federation, Site, load
from promptfed.runs import config as C
from promptfed.runs import record
from promptfed.runs.api import Result


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image cache away from the user's, shared by the tests."""
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def deal(dataset: Dataset, clients: int) -> Federation:
    """Shares of different sizes; with more clients than images, some are empty."""
    cuts = np.linspace(0, 1, clients + 1) ** 1.5 * len(dataset)
    shares = np.split(np.arange(len(dataset)), cuts[1:-1].astype(int))
    sites = tuple(
        Site(f"client-{i}", one[: len(one) // 2], one[:0], one[len(one) // 2 :]) for i, one in enumerate(shares)
    )
    return Federation(dataset, sites, {"kind": "dirichlet"})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Result]:
    """A run's folder with these lines; `clients` = 0 leaves the partition out."""

    def write(name: str, lines: Sequence[Line], clients: int = 3, **settings: Any) -> Result:
        folder = tmp_path / name
        folder.mkdir()
        common = {
            "method": "fedavg",
            "dataset": {"name": "digits", "limit": 120},
            "partition": {"name": "dirichlet", "alpha": 0.3, "clients": clients or 3},
        }
        config = C.make(common, settings)
        if clients:
            deal(load(config.dataset), clients).save(folder / "partition.json")
        (folder / "config.toml").write_text(C.dump(config.complete()))
        (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        numbers = record.result(lines, {}) if any("aggregated" in one for one in lines) else {}
        return Result(folder, numbers)

    return write


@pytest.fixture
def comparison(make: Callable[..., Result], tmp_path: Path) -> Path:
    """Three rows, the first with two seeds; its label would break a page that trusts it."""
    common = {"rounds": 4, "eval": {"pooled": "never", "after_local": "none"}}
    for name, seed, lines in (
        ("a-seed0", 0, history(0.6, wide=None)),
        ("a-seed1", 1, history(0.7, wide=None)),
        ("fedavg-seed0", 0, history(0.5)),
        ("local-seed0", 0, history(0.8, wide=None, sent=0)),
    ):
        result = make(name, lines, seed=seed, **common)
        (result.folder / "result.json").write_text(json.dumps({**result.numbers, "seed": seed}))
    slug = re.sub(r"[^a-z0-9]+", "-", HOSTILE.lower()).strip("-")
    for seed in (0, 1):
        (tmp_path / f"a-seed{seed}").rename(tmp_path / f"{slug}-seed{seed}")
    (tmp_path / "table.json").write_text(json.dumps([{"label": HOSTILE}, {"label": "FedAvg"}, {"label": "local"}]))
    return tmp_path
