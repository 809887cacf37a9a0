"""The pictures of a report: PNG files of run folders, embedded without loss."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from ..gather import ReportData
from .view import Table, listed

_MOST = 60  # pictures
_ROWS, _COLUMNS = 30, 12  # of a CSV file that are shown

CAPTIONS = {
    "comparison.png": "Accuracy by method",
    "curves.png": "Learning curves",
    "communication.png": "Accuracy against communication",
    "clients.png": "Accuracy and number of samples by client",
    "partition.png": "Partition: training samples by client and class",
    "prompts.png": "The clients' prompts, and what training has changed in them",
}
Kind = Literal["partition", "analysis", "picture"]
_KINDS: tuple[Kind, ...] = ("partition", "analysis", "picture")  # the most telling first


@dataclass(frozen=True)
class Picture:
    path: Path
    caption: str
    kind: Kind
    of: str = ""  # a run's label and seed; empty for a comparison's own
    note: str = ""  # from the JSON file beside an analysis

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Figure:
    picture: Picture
    uri: str
    width: int
    height: int
    table: Table | None  # the CSV file beside an analysis


def find(data: ReportData) -> list[Picture]:
    """All pictures, the most telling first: the page has a limited number of them."""
    many = len(data.entries) > 1
    labels = {entry.run.folder: (group.label, entry.seed) for group in data.groups for entry in group.entries}
    pictures = []
    for folder in dict.fromkeys((*data.folders, *labels)):
        label, seed = labels.get(folder, ("", 0))
        of = "" if not (many and label) else label if folder in data.folders else f"{label}, seed {seed}"
        for path in sorted(folder.glob("*.png")):
            name = re.sub(r"^partition-\d+\.png$", "partition.png", path.name)  # of a comparison that has several
            kind: Kind = "partition" if name == "partition.png" else "picture"
            pictures.append(Picture(path, CAPTIONS.get(name, _words(path.stem)), kind, of))
        pictures += [_analysis(path, of) for path in sorted((folder / "analysis").rglob("*.png"))]
    return sorted(pictures, key=lambda one: (_KINDS.index(one.kind), one.path.parent not in data.folders))


def _analysis(path: Path, of: str) -> Picture:
    caption, note = _words(path.stem), ""
    try:
        about = json.loads(path.with_suffix(".json").read_text())
        caption = str(about.get("title") or caption)
        note = str(about.get("text") or about.get("caption") or "")
    except (OSError, ValueError, AttributeError):
        pass  # without the file, the picture's name is its caption
    return Picture(path, caption, "analysis", of, note)


def _words(stem: str) -> str:
    text = stem.replace("_", " ").replace("-", " ").strip() or stem
    return text[0].upper() + text[1:]


def embed(pictures: Sequence[Picture]) -> tuple[list[Figure], list[str]]:
    """Each different picture once, and sentences on those that are not shown."""
    figures: dict[bytes, Figure] = {}
    problems = []
    for picture in pictures[:_MOST]:
        try:
            content = picture.path.read_bytes()
            if content not in figures:
                figures[content] = _figure(picture, content)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{picture.path} cannot be shown as a picture: {error}.")
    if left := pictures[_MOST:]:
        problems.append(f"The page has the first {_MOST} pictures; not shown: {listed((p.path for p in left), 8)}.")
    return list(figures.values()), problems


def _figure(picture: Picture, content: bytes) -> Figure:
    """Lossless WebP is a third of the PNG's size; fewer colours would merge those of the palette."""
    webp = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.save(webp, "WEBP", lossless=True)
        uri = f"data:image/webp;base64,{base64.b64encode(webp.getvalue()).decode()}"
        return Figure(picture, uri, image.width, image.height, _table(picture.path.with_suffix(".csv")))


def _table(path: Path) -> Table | None:
    """The first rows and columns of a CSV file, if there is one."""
    try:
        with path.open(newline="") as file:
            heads, *rows = [row[:_COLUMNS] for row in csv.reader(file)]
    except (OSError, ValueError, csv.Error):
        return None
    some = f", the first {_ROWS} of {len(rows)} rows" if len(rows) > _ROWS else ""
    return Table(f"{path.name}{some}", heads, rows[:_ROWS])
