from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from promptfed.data import Dataset


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty image cache for every test, and a hub that nobody can reach."""
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "cache"


@pytest.fixture
def paint() -> Callable[..., Path]:
    """Save an image of one colour, making folders on the way."""

    def save(path: Path, colour: object = (10, 20, 30), size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]
        return path

    return save


def toy(labels: list[int] | np.ndarray, path: Path, classes: int | None = None, **extra: object) -> Dataset:
    """A dataset of one-pixel images with these labels."""
    labels = np.asarray(labels)
    images = (np.arange(len(labels)) % 256).astype(np.uint8).reshape(-1, 1, 1, 1)
    names = tuple(f"c{i}" for i in range(classes or int(labels.max()) + 1))
    return Dataset.from_arrays("toy", images, labels, names, path=path, **extra)  # type: ignore[arg-type]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Dataset]:
    """A dataset of one-pixel images with the given labels."""
    counter = iter(range(10**6))
    return lambda labels, classes=None, **extra: toy(labels, tmp_path / f"toy{next(counter)}", classes, **extra)
