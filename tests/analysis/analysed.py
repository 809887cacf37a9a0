"""One analysis of a run, and its rows."""

import csv
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

from promptfed.analysis import Options, make


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def made(folder: Path, name: str, out: Path, options: Options | None = None) -> list[dict[str, str]]:
    """The rows of one analysis, whose picture and caption are looked at."""
    files = make(folder, [name], out, options).files[name]
    assert [file.name for file in files[:2]] == [f"{name}.png", f"{name}.csv"]
    with Image.open(files[0]) as image:
        assert 700 <= image.width <= 1700
        assert 300 <= image.height <= 1600
        assert len(image.convert("RGB").resize((80, 80)).getcolors(6400) or []) > 3
    caption = json.loads((out / f"{name}.json").read_text())
    assert set(caption) == {"title", "text"}
    assert "nan" not in caption["text"]
    return read(files[1])


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def columns(row: dict[str, str], start: str) -> np.ndarray:
    return np.array([float(value) for key, value in row.items() if key.startswith(f"{start} ")])


def differences(caption: Path) -> list[float]:
    """The differences that a caption tells; each is in its interval."""
    text = json.loads(caption.read_text())["text"]
    found = re.findall(r"difference ([+-][.\d]+) \[([+-][.\d]+), ([+-][.\d]+)\]", text)
    assert all(float(low) <= float(mean) <= float(high) for mean, low, high in found)
    return [float(mean) for mean, _, _ in found]
