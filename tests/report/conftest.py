import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import Line

from promptfed import config as C
from promptfed import record
from promptfed.api import Result
from promptfed.data import Dataset, Federation, Site, load


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
