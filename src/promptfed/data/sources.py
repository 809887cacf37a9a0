"""Datasets before they are decoded: digits, drawings, idx files and image folders. `tables` has the others."""

import gzip
import os
import re
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UserError
from . import parts, shapes

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"})
SPLITS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}
SPLIT_NAMES = ("train", "val", "test")
FIXED = "with splits"  # in the identity of sources that once were decoded without their split
ARRAYS = ("labels", "domain", "site", "split")


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """What is known about N images besides their pixels."""

    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ()
    domain: np.ndarray | None = None  # int64 (N,), index into domains
    sites: tuple[str, ...] = ()
    site: np.ndarray | None = None  # int64 (N,), index into sites
    split: np.ndarray | None = None  # int8 (N,), 0 train 1 val 2 test, where the source fixes it

    def __len__(self) -> int:
        return len(self.labels)

    def arrays(self) -> dict[str, Any]:
        """The arrays that there are, by name."""
        return {name: array for name in ARRAYS if (array := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Source(Labels):
    """N labelled images, decoded one at a time on demand."""

    image: Callable[[int], Image.Image]  # may raise anything on a corrupt image
    name: Callable[[int], str]  # what a message calls image i

    def take(self, chosen: np.ndarray) -> "Source":
        """The images at these indices, in this order."""
        image, name = self.image, self.name
        arrays = {key: array[chosen] for key, array in self.arrays().items()}
        return replace(self, image=lambda i: image(int(chosen[i])), name=lambda i: name(int(chosen[i])), **arrays)

    def keep(self, classes: tuple[str, ...]) -> "Source":
        """Only the images of these classes, which get new labels in this order."""
        known = [spelled(name) for name in self.classes]
        renamed = np.full(len(known), -1, dtype=np.int64)
        for new, name in enumerate(classes):
            if name not in known:
                raise UserError(f'dataset.name: class "{name}" is not among the classes of the source')
            renamed[known.index(name)] = new
        labels = renamed[self.labels]
        return replace(self, labels=labels, classes=classes).take(np.flatnonzero(labels >= 0))

    def rename(self, names: tuple[str, ...]) -> "Source":
        """Class names instead of numbers; a source that has names keeps them."""
        bare = all(name.isdigit() for name in self.classes) and len(names) == len(self.classes)
        return replace(self, classes=names) if bare else self

    def subset(self, limit: int) -> "Source":
        """A stratified subset that depends on nothing but `limit` and the labels."""
        return self if limit >= len(self) else self.take(stratified(self.labels, limit))


def stratified(labels: np.ndarray, limit: int) -> np.ndarray:
    """Which ones are a stratified subset, always the same; all of them if they are no more."""
    n = len(labels)
    if limit >= n:
        return np.arange(n)
    rng = np.random.default_rng([limit, n])
    order = rng.permutation(n)
    order = order[np.argsort(labels[order], kind="stable")]  # by class, random within
    # every n/limit-th of them: each class gets its share to within one image
    at = np.minimum((np.arange(limit) + rng.random()) * n / limit, n - 1).astype(np.int64)
    return np.sort(order[at])


def spelled(name: str) -> str:
    """A class name without the differences in case and spaces between copies of a dataset."""
    return name.lower().replace(" ", "_")


@dataclass(frozen=True)
class Located:
    """A source that was found but not opened yet."""

    identity: str  # changes whenever the files do
    read: Callable[[Path], Source]  # opens it, with a scratch folder to work in


def identify(folder: Path, files: list[Path]) -> str:
    """A hash of the files' paths, sizes and times."""
    digest = sha256(str(folder.resolve()).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"\n{file.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def walk(path: Path) -> tuple[list[Path], list[Path]]:
    """Regular files and folders relative to `path`, sorted, none of them hidden or in a hidden folder."""
    files, inside = [], []
    for here, inner, names in os.walk(path, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith((".", "__MACOSX"))]
        base = Path(here).relative_to(path)
        inside += [base / name for name in inner]
        files += [base / name for name in names if not name.startswith(".") and _regular(Path(here, name))]
    return sorted(files), sorted(inside)


def _regular(file: Path) -> bool:
    """Not a pipe or a device, which would never end. A broken link is reported when it is read."""
    return file.is_file() or not file.exists()


# ---- without files


def _digits(scratch: Path) -> Source:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8, values 0..16."""
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    data = load_digits()
    images = (data.images * (255 / 16)).round().astype(np.uint8)  # (N, 8, 8)
    return _arrays(images, data.target, tuple("0123456789"), "digit")


def _drawn(world: ModuleType, classes: tuple[str, ...], domains: tuple[str, ...]) -> Located:
    """Pictures of a module that draws them."""

    def read(scratch: Path) -> Source:
        labels, domain, pictures = world.sample(world.COUNT, seed=0)
        source = _arrays(pictures.transpose(0, 2, 3, 1), labels, classes, "picture")  # (N, 32, 32, 3)
        return replace(source, domains=domains, domain=domain)

    return Located(f"{world.__name__} {world.VERSION}", read)


def _arrays(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], word: str) -> Source:
    def picture(i: int) -> Image.Image:
        return Image.fromarray(images[i])

    return Source(labels=labels.astype(np.int64), classes=classes, image=picture, name=lambda i: f"{word} {i}")


EMBEDDED = {
    "digits": Located("scikit-learn digits", _digits),
    "shapes": _drawn(shapes, shapes.SHAPES, shapes.STYLES),
    "parts": _drawn(parts, parts.CLASSES, parts.CAMERAS),
}


# ---- idx files, the format of MNIST

_IDX = re.compile(r"(?P<prefix>.*?)(?P<split>train|t10k|test|valid)[-.]images[-.]idx3[-.]ubyte(\.gz)?")


def idx_files(folder: Path) -> list[re.Match[str]]:
    """The image files of an MNIST-style folder, training images first."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    return sorted((m for name in names if (m := _IDX.fullmatch(name))), key=lambda m: _which(m["split"]))


def _which(split: str) -> int:
    return SPLITS.get(split, 2)  # MNIST calls its test split t10k


def idx(folder: Path, splits: tuple[str, ...]) -> Located:
    """Idx files, plain or gzipped; the classes are named by their numbers."""
    matches = idx_files(folder)
    prefixes = sorted({m["prefix"] for m in matches})
    if len(prefixes) > 1:
        raise UserError(
            f'dataset.name = "{folder}" holds several idx datasets ({", ".join(prefixes)}); keep one per folder'
        )
    chosen = [m for m in matches if not splits or SPLIT_NAMES[_which(m["split"])] in splits]
    if not chosen:
        raise UserError(f'dataset.splits: "{folder}" has no such split, only {", ".join(m["split"] for m in matches)}')
    names = [m.string for m in chosen]
    pairs = [(folder / name, folder / re.sub(r"images([-.])idx3", r"labels\1idx1", name)) for name in names]
    for _, label_file in pairs:
        if not label_file.is_file():
            raise UserError(f'dataset.name = "{folder}" lacks the label file {label_file.name}')

    def read(scratch: Path) -> Source:
        images = [_read_idx(image_file, 3) for image_file, _ in pairs]
        labels = [_read_idx(label_file, 1) for _, label_file in pairs]
        for (image_file, _), some, theirs in zip(pairs, images, labels, strict=True):
            if len(some) != len(theirs):
                raise UserError(f"{image_file} holds {len(some)} images but its label file {len(theirs)} labels")
        classes, target = indexed(np.concatenate(labels))
        split = np.repeat([_which(m["split"]) for m in chosen], [len(some) for some in images]).astype(np.int8)
        return replace(_arrays(np.concatenate(images), target, classes, "image"), split=split)

    return Located(f"{identify(folder, [file for pair in pairs for file in pair])} {FIXED}", read)


def _read_idx(file: Path, dimensions: int) -> np.ndarray:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        zero, kind, rank = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{rank}I", raw, 4)
        if (zero, kind, rank) != (0, 8, dimensions):
            raise ValueError
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise UserError(f"{file} is not a complete idx file of {dimensions}-dimensional bytes") from error


# ---- image folders; their layout is recognised

_LAYOUTS = "class/*.jpg, split/class/*.jpg, domain/class/*.jpg or client/{train,test}/class/*.jpg"
_NAMED = 5  # folders that a warning lists


def folder(path: Path, splits: tuple[str, ...]) -> Located:
    """Every image below `path`, labelled by the names of its folders."""
    found, inside = walk(path)
    files = [file for file in found if file.suffix.lower() in IMAGE_SUFFIXES]
    depths = {len(file.parts) for file in files}
    if len(depths) != 1 or not depths <= {2, 3, 4}:
        what = "images at mixed or unknown depths" if files else "no images"
        raise UserError(f'dataset.name = "{path}" holds {what}; allowed layouts: {_LAYOUTS}')
    depth = depths.pop()
    _warn_of_empty(path, files, inside, depth)
    by_split = depth > 2 and all(_split_of(file) in SPLITS for file in files)
    if depth == 4 and not by_split:
        raise UserError(f'dataset.name = "{path}" is nested too deeply; allowed layouts: {_LAYOUTS}')
    if by_split and splits:
        files = [file for file in files if SPLIT_NAMES[SPLITS[_split_of(file)]] in splits]
        if not files:
            raise UserError(f'dataset.splits: "{path}" has no images of {" or ".join(splits)}')

    def read(scratch: Path) -> Source:
        classes, labels = indexed([file.parts[-2] for file in files])
        source = Source(
            labels=labels, classes=classes, image=lambda i: Image.open(path / files[i]), name=lambda i: str(files[i])
        )
        names, index = indexed([file.parts[0] for file in files])
        if by_split:
            source = replace(source, split=np.array([SPLITS[_split_of(file)] for file in files], dtype=np.int8))
        if depth == 4:
            return replace(source, sites=names, site=index)
        return replace(source, domains=names, domain=index) if depth == 3 and not by_split else source

    identity = identify(path, [path / file for file in files])
    return Located(f"{identity} {FIXED}" if by_split and depth == 3 else identity, read)


def _split_of(file: Path) -> str:
    return file.parts[-3].lower()  # split/class/file or client/split/class/file


def _warn_of_empty(path: Path, files: list[Path], inside: list[Path], depth: int) -> None:
    """Warns of folders of sites, domains, splits and classes that hold no image."""
    tops, classes = {file.parts[0] for file in files}, {file.parts[-2] for file in files}
    empty = [inner for inner in inside if len(inner.parts) == 1 and inner.name not in tops]
    deep = [inner for inner in inside if len(inner.parts) == depth - 1 > 1 and inner.parts[0] in tops]
    empty += [inner for inner in deep if inner.name not in classes]
    if empty:
        names = ", ".join(f'"{inner}"' for inner in empty[:_NAMED]) + (", ..." if len(empty) > _NAMED else "")
        what = (
            "a folder without images, which is"
            if len(empty) == 1
            else f"{len(empty)} folders without images, which are"
        )
        warnings.warn(f'dataset.name = "{path}" has {what} left out: {names}', stacklevel=3)


def indexed(values: Any) -> tuple[tuple[str, ...], np.ndarray]:
    """The different values as sorted names, and the index of each value's name, int64 (N,)."""
    names, index = np.unique(values, return_inverse=True)
    return tuple(str(name) for name in names), index.astype(np.int64)
