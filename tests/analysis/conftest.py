"""Small finished runs, each made once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import promptfed

DIGITS = {
    "dataset": {"name": "digits", "limit": 120, "size": 16},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4, "min_samples": 6},
    "engine": {"workers": 1},
    "rounds": 2,
}
SHAPES = {
    "dataset": {"name": "shapes", "limit": 128},
    "partition": {"name": "domain", "clients": 8, "split": [0.5, 0.25, 0.25]},
    "engine": {"workers": 1},
    "rounds": 1,
}
FEW = {  # some of them without validation data
    "dataset": {"name": "shapes", "limit": 64},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4, "min_samples": 6, "split": [0.6, 0.1, 0.3]},
    "engine": {"workers": 1},
    "rounds": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "pfedpt": {
        "method": {"name": "pfedpt", "epochs": 1, "prompt_epochs": 1},
        "eval": {"after_local": "all"},
        **DIGITS,
    },
    "fedavg": {"method": {"name": "fedavg", "epochs": 1}, **DIGITS},
    "tuned": {"method": {"name": "fedavg+ft", "epochs": 1, "finetune_epochs": 1}, **DIGITS, "rounds": 1},
    "local": {"method": {"name": "local", "epochs": 1}, **DIGITS, "rounds": 1},
    "mixture": {"method": {"name": "fedem+pt", "epochs": 1, "components": 2}, **DIGITS, "rounds": 1},
    "vpt": {"method": {"name": "fedper+vpt", "epochs": 1, "tokens": 2}, "backbone": "vit-mini", **SHAPES},
    "promptfl": {"method": {"name": "promptfl", "epochs": 1, "context": 2}, "backbone": "clip-mini", **SHAPES},
    "sgpt": {"method": {"name": "sgpt", "epochs": 1, "groups": 5}, "backbone": "vit-mini", **SHAPES},
    "dp2fl": {"method": {"name": "dp2fl", "epochs": 1, "depth": 2}, "backbone": "clip-mini", **FEW},
    "sealed": {
        "method": {"name": "dp2fl", "epochs": 1, "depth": 2, "privacy": "sealed"},
        "backbone": "clip-mini",
        **FEW,
    },
}
RUNS["sgpt"]["method"] |= {"shared_layers": [0], "group_layers": [1]}

Finished = Callable[[str], Path]


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, _cache: None) -> Finished:
    """The folder of the run of this name."""
    base = tmp_path_factory.mktemp("runs")

    def make(name: str) -> Path:
        folder = base / name
        if not folder.exists():
            promptfed.run(out=folder, **RUNS[name])
        return folder

    return make
