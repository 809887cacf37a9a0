"""The pictures of a report: PNG files of run folders, made small enough for one page together."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..gather import ReportData

# Pixels and colours: less where the pictures would not fit, alike for all.
_SIZES = ((1100, 64), (900, 48), (740, 32), (620, 32), (520, 24), (420, 16))
_MOST = 60  # pictures
_ROWS, _COLUMNS = 30, 12  # of a CSV that is shown whole

CAPTIONS = {
    "comparison.png": "Accuracy by method",
    "curves.png": "Learning curves",
    "communication.png": "Accuracy against communication",
    "clients.png": "Accuracy by client, and the samples each one has",
    "partition.png": "Partition: training samples by client and class",
    "prompts.png": "The clients' prompts, and what training has changed of them",
}


@dataclass(frozen=True)
class Picture:
    path: Path
    caption: str
    kind: str  # partition, analysis or picture
    of: str = ""  # a run's label and seed; empty for a comparison's own
    note: str = ""  # what a sibling JSON file says of it
    csv: Path | None = None


@dataclass(frozen=True)
class Drawn:
    picture: Picture
    uri: str
    width: int
    height: int


def find(found: ReportData) -> list[Picture]:
    """All pictures, the most telling first: later ones are left out where there is no room."""
    places = [(folder, "") for folder in found.folders]
    many = len(found.entries) > 1
    for group in found.groups:
        for entry in group.entries:
            if entry.run.folder not in found.folders:
                places.append((entry.run.folder, f"{group.label}, seed {entry.seed}" if many else ""))
    named = {entry.run.folder: group.label for group in found.groups for entry in group.entries}
    pictures = []
    for folder, of in places:
        of = of or (named.get(folder, "") if many else "")
        for path in sorted(folder.glob("*.png")):
            name = re.sub(r"^partition-\d+\.png$", "partition.png", path.name)  # of a comparison that has several
            kind = "partition" if name == "partition.png" else "picture"
            pictures.append(Picture(path, CAPTIONS.get(name, _words(path.stem)), kind, of))
        for path in sorted((folder / "analysis").rglob("*.png")):
            pictures.append(_analysis(path, of))
    order = {"partition": 0, "analysis": 1, "picture": 2}
    own = set(found.folders)
    return sorted(pictures, key=lambda one: (order[one.kind], one.path.parent not in own, one.kind == "partition"))


def _analysis(path: Path, of: str) -> Picture:
    caption, note = _words(path.stem), ""
    try:
        about = json.loads(path.with_suffix(".json").read_text())
        caption = str(about.get("title") or caption)
        note = str(about.get("text") or about.get("caption") or "")
    except (OSError, ValueError, AttributeError):
        pass  # without one, its name has to do
    table = path.with_suffix(".csv")
    return Picture(path, caption, "analysis", of, note, table if table.exists() else None)


def _words(stem: str) -> str:
    text = stem.replace("_", " ").replace("-", " ").strip() or stem
    return text[0].upper() + text[1:]


def embed(pictures: Sequence[Picture], room: int) -> tuple[list[Drawn], list[str]]:
    """As many as fit into so many bytes, and sentences on those that do not or cannot be read."""
    opened, problems = [], []
    seen: set[bytes] = set()
    for picture in pictures[:_MOST]:
        try:
            content = picture.path.read_bytes()
            if content in seen:
                continue  # several runs' picture of the one partition
            with Image.open(io.BytesIO(content)) as image:
                opened.append((picture, image.convert("RGBA")))
            seen.add(content)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{picture.path} is no picture that can be shown: {error}.")
    drawn: list[Drawn] = []
    for width, colours in _SIZES:
        drawn = [_small(picture, image, width, colours) for picture, image in opened]
        if _bytes(drawn) <= room:
            break
    left = [picture.path for picture in pictures[_MOST:]]
    while drawn and _bytes(drawn) > room:
        left.insert(0, drawn.pop().picture.path)
    if left:
        names = ", ".join(map(str, left[:8])) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        problems.append(f"The page would be too large with all pictures; not shown: {names}.")
    return drawn, problems


def _bytes(drawn: Sequence[Drawn]) -> int:
    return sum(len(one.uri) for one in drawn)


def _small(picture: Picture, image: Image.Image, width: int, colours: int) -> Drawn:
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    if flat.width > width:
        flat = flat.resize((width, max(1, round(flat.height * width / flat.width))), Image.Resampling.LANCZOS)
    as_png, as_jpeg = io.BytesIO(), io.BytesIO()
    flat.quantize(colours, dither=Image.Dither.NONE).save(as_png, "PNG", optimize=True)
    best, kind = as_png, "png"
    if flat.getcolors(4096) is None:  # photographs rather than lines
        flat.save(as_jpeg, "JPEG", quality=82, optimize=True)
        if as_jpeg.tell() < as_png.tell():
            best, kind = as_jpeg, "jpeg"
    uri = f"data:image/{kind};base64,{base64.b64encode(best.getvalue()).decode()}"
    return Drawn(picture, uri, flat.width, flat.height)


def table(path: Path) -> tuple[list[list[str]], int]:
    """The first rows and columns of a CSV, and how many rows it has below its header."""
    try:
        with path.open(newline="") as file:
            rows = [row[:_COLUMNS] for row in csv.reader(file)]
    except (OSError, ValueError, csv.Error):
        return [], 0
    return rows[: _ROWS + 1], max(0, len(rows) - 1)
