"""The pictures of a report: PNG files of run folders, embedded without loss."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..gather import ReportData
from ..numbers import listed

_MOST = 60  # pictures
_ROWS, _COLUMNS = 30, 12  # of a CSV file that are shown
# The other pictures of a run's folder say what the page's own charts say.
_CAPTIONS = {
    r"partition(-\d+)?\.png": "Partition: training samples by client and class",
    r"prompts\.png": "The clients' prompts, and what training has changed in them",
}


@dataclass(frozen=True)
class Figure:
    path: Path
    of: str  # a run's label and seed; empty for a comparison's own
    uri: str
    width: int
    height: int

    @property
    def partition(self) -> bool:
        return self.path.parent.name != "analysis" and self.path.name.startswith("partition")

    @property
    def about(self) -> dict[str, str]:
        """Caption and note, from the JSON file beside an analysis."""
        try:
            found = json.loads(self.path.with_suffix(".json").read_text())
            return {"caption": str(found["title"]), "note": str(found.get("text", ""))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            words = self.path.stem.replace("_", " ").replace("-", " ").strip().capitalize() or self.path.stem
            return {"caption": _caption(self.path) or words, "note": ""}

    @property
    def table(self) -> tuple[str, list[str], list[list[str]]] | None:
        """Name, heads, and the first rows and columns of the CSV file beside an analysis."""
        path = self.path.with_suffix(".csv")
        try:
            with path.open(newline="") as file:
                heads, *rows = [row[:_COLUMNS] for row in csv.reader(file)]
        except (OSError, ValueError, csv.Error):
            return None
        some = f", the first {_ROWS} of {len(rows)} rows" if len(rows) > _ROWS else ""
        return f"{path.name}{some}", heads, rows[:_ROWS]


def find(data: ReportData) -> dict[Path, str]:
    """The pictures, and of which run they are; partitions first, as the page has a limited number of pictures."""
    labels = {entry.run.folder: (group.label, entry.seed) for group in data.groups for entry in group.entries}
    found: dict[Path, str] = {}
    for folder in dict.fromkeys((*data.folders, *labels)):
        label, seed = labels.get(folder, ("", 0))
        of = "" if len(labels) == 1 or not label else label if folder in data.folders else f"{label}, seed {seed}"
        own = [path for path in sorted(folder.glob("*.png")) if _caption(path)]
        found |= dict.fromkeys([*own, *sorted((folder / "analysis").rglob("*.png"))], of)
    first = sorted(found, key=lambda path: (not path.name.startswith("partition"), path.parent not in data.folders))
    return {path: found[path] for path in first}


def _caption(path: Path) -> str:
    return next((text for name, text in _CAPTIONS.items() if re.fullmatch(name, path.name)), "")


def embed(pictures: Mapping[Path, str]) -> tuple[list[Figure], list[str]]:
    """Each different picture once, and sentences on those that are not shown."""
    figures: dict[bytes, Figure] = {}
    problems = []
    for path in list(pictures)[:_MOST]:
        try:
            content = path.read_bytes()
            if content not in figures:
                figures[content] = Figure(path, pictures[path], *_webp(content))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{path} cannot be shown as a picture: {error}.")
    if left := list(pictures)[_MOST:]:
        problems.append(f"The page has the first {_MOST} pictures; not shown: {listed(left, 8)}.")
    return list(figures.values()), problems


def _webp(content: bytes) -> tuple[str, int, int]:
    """Lossless WebP is a third of the PNG's size; fewer colours would merge those of the palette."""
    webp = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.save(webp, "WEBP", lossless=True)
        return f"data:image/webp;base64,{base64.b64encode(webp.getvalue()).decode()}", image.width, image.height
