"""Datasets before they are decoded, and the sources that need no download: digits, drawn shapes and idx."""

import gzip
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image

from ..errors import UserError
from . import shapes

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"})
SPLITS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}
SPLIT_NAMES = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What is known about N images besides their pixels."""

    labels: np.ndarray  # int64 (N,)
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ()
    domain: np.ndarray | None = None  # int64 (N,)
    sites: tuple[str, ...] = ()
    site: np.ndarray | None = None  # int64 (N,)
    split: np.ndarray | None = None  # int8 (N,)

    def take(self, chosen: np.ndarray) -> Self:
        """The images at these indices, in this order."""
        return replace(
            self,
            labels=self.labels[chosen],
            domain=None if self.domain is None else self.domain[chosen],
            site=None if self.site is None else self.site[chosen],
            split=None if self.split is None else self.split[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Source(Labels):
    """N labelled images, decoded one at a time on demand."""

    image: Callable[[int], Image.Image]  # may raise anything on a corrupt image
    name: Callable[[int], str]  # what a message calls image i

    def take(self, chosen: np.ndarray) -> "Source":
        """The images at these indices, in this order."""
        image, name = self.image, self.name
        return replace(super().take(chosen), image=lambda i: image(int(chosen[i])), name=lambda i: name(int(chosen[i])))

    def keep(self, classes: tuple[str, ...]) -> "Source":
        """Only the images of these classes, which get new labels in this order."""
        spelled = [name.lower().replace(" ", "_") for name in self.classes]
        renamed = np.full(len(spelled), -1, dtype=np.int64)
        for new, name in enumerate(classes):
            if name not in spelled:
                raise UserError(f'dataset.name: class "{name}" is not among the classes of the source')
            renamed[spelled.index(name)] = new
        labels = renamed[self.labels]
        return replace(self, labels=labels, classes=classes).take(np.flatnonzero(labels >= 0))

    def rename(self, names: tuple[str, ...]) -> "Source":
        """Class names instead of numbers; a source that has names keeps them."""
        bare = all(name.isdigit() for name in self.classes) and len(names) == len(self.classes)
        return replace(self, classes=names) if bare else self

    def subset(self, limit: int) -> "Source":
        """A stratified subset that depends on nothing but `limit` and the labels."""
        n = len(self.labels)
        if limit >= n:
            return self
        rng = np.random.default_rng([limit, n])
        order = rng.permutation(n)
        order = order[np.argsort(self.labels[order], kind="stable")]  # by class, random within
        # every n/limit-th of them: each class gets its share to within one image
        return self.take(
            np.sort(order[np.minimum((np.arange(limit) + rng.random()) * n / limit, n - 1).astype(np.int64)])
        )


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


def visible(folder: Path) -> list[Path]:
    """What a folder holds, hidden files left out, in an order that does not depend on the file system."""
    return sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda p: p.name)


def digits() -> Located:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8, values 0..16."""

    def read(scratch: Path) -> Source:
        from sklearn.datasets import load_digits  # slow to import, and only needed here

        data = load_digits()
        images = (data.images * (255 / 16)).round().astype(np.uint8)  # (N, 8, 8)
        return _arrays(images, data.target, tuple(str(d) for d in range(10)), "digit")

    return Located("scikit-learn digits", read)


def drawn() -> Located:
    """The pictures of `shapes`; their styles are the domains."""

    def read(scratch: Path) -> Source:
        scenes = shapes.sample(shapes.COUNT, seed=0)
        images = shapes.draw(scenes, seed=0).transpose(0, 2, 3, 1)  # (N, 32, 32, 3)
        source = _arrays(images, scenes.shape, shapes.SHAPES, "picture")
        return replace(source, domains=shapes.STYLES, domain=scenes.style)

    return Located(f"drawn shapes {shapes.VERSION}", read)


_IDX = re.compile(r"(?P<prefix>.*?)(?P<split>train|t10k|test|valid)[-.]images[-.]idx3[-.]ubyte(?P<zip>\.gz)?")


def idx_files(folder: Path) -> list[re.Match[str]]:
    """The image files of an MNIST-style folder."""
    return [match for p in visible(folder) if (match := _IDX.fullmatch(p.name))]


def idx(folder: Path, splits: tuple[str, ...]) -> Located:
    """MNIST-style idx files, plain or gzipped; the classes are named by their numbers."""
    matches = idx_files(folder)
    prefixes = sorted({m["prefix"] for m in matches})
    if len(prefixes) > 1:
        raise UserError(
            f'dataset.name = "{folder}" holds several idx datasets ({", ".join(prefixes)}); keep one per folder'
        )
    chosen = [m for m in matches if not splits or _split_of(m["split"]) in splits]
    if not chosen:
        raise UserError(f'dataset.splits: "{folder}" has no such split, only {", ".join(m["split"] for m in matches)}')
    chosen.sort(key=lambda m: SPLIT_NAMES.index(_split_of(m["split"])))
    pairs = [(folder / m.string, folder / _labels_of(m.string)) for m in chosen]
    for _, label_file in pairs:
        if not label_file.is_file():
            raise UserError(f'dataset.name = "{folder}" lacks the label file {label_file.name}')

    def read(scratch: Path) -> Source:
        images = [_read_idx(image_file, 3) for image_file, _ in pairs]
        labels = [_read_idx(label_file, 1) for _, label_file in pairs]
        for (image_file, _), some, theirs in zip(pairs, images, labels, strict=True):
            if len(some) != len(theirs):
                raise UserError(f"{image_file} holds {len(some)} images but its label file {len(theirs)} labels")
        values, target = np.unique(np.concatenate(labels), return_inverse=True)
        return _arrays(np.concatenate(images), target, tuple(str(v) for v in values), "image")

    return Located(identify(folder, [file for pair in pairs for file in pair]), read)


def _labels_of(name: str) -> str:
    head, tail = name.rsplit("images", 1)
    return f"{head}labels{tail.replace('idx3', 'idx1')}"


def _split_of(name: str) -> str:
    return SPLIT_NAMES[SPLITS.get(name, 2)]  # MNIST calls its test split t10k


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


def _arrays(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], word: str) -> Source:
    return Source(
        labels=labels.astype(np.int64),
        classes=classes,
        image=lambda i: Image.fromarray(images[i]),
        name=lambda i: f"{word} {i}",
    )
