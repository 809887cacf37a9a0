"""Image folders; their layout is recognised.

class/*.jpg                        split/class/*.jpg with splits named train, val, test
domain/class/*.jpg                 client/{train,val,test}/class/*.jpg
"""

import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError
from .sources import IMAGE_SUFFIXES, SPLIT_NAMES, SPLITS, Located, Source, identify

_LAYOUTS = "class/*.jpg, split/class/*.jpg, domain/class/*.jpg or client/{train,test}/class/*.jpg"
_NAMED = 5  # folders that a warning lists


def folder(path: Path, splits: tuple[str, ...]) -> Located:
    """Every image below `path`, labelled by the names of its folders."""
    files, inside = _walk(path)
    depths = {len(file.parts) for file in files}
    if len(depths) != 1 or not depths <= {2, 3, 4}:
        found = "no images" if not files else "images at mixed or unknown depths" if len(files) > 1 else "one image"
        raise UserError(f'dataset.name = "{path}" holds {found}; allowed layouts: {_LAYOUTS}')
    depth = depths.pop()
    _warn_of_empty(path, _empty(files, inside, depth))
    top = [file.parts[0] for file in files]
    by_split = depth == 3 and all(name.lower() in SPLITS for name in top)
    by_site = depth == 4
    if by_site and any(file.parts[1].lower() not in SPLITS for file in files):
        raise UserError(f'dataset.name = "{path}" is nested too deeply; allowed layouts: {_LAYOUTS}')
    if by_split or by_site:
        level = 0 if by_split else 1
        kept = [f for f in files if not splits or SPLIT_NAMES[SPLITS[f.parts[level].lower()]] in splits]
        if not kept:
            raise UserError(f'dataset.splits: "{path}" has no images of {" or ".join(splits)}')
        files = kept

    def read(scratch: Path) -> Source:
        classes, labels = _index([file.parts[-2] for file in files])
        domains, domain = _index([file.parts[0] for file in files]) if depth == 3 and not by_split else ((), None)
        sites, site = _index([file.parts[0] for file in files]) if by_site else ((), None)
        split = np.array([SPLITS[f.parts[1].lower()] for f in files], dtype=np.int8) if by_site else None
        return Source(
            labels=labels,
            classes=classes,
            image=lambda i: Image.open(path / files[i]),
            name=lambda i: str(files[i]),
            domains=domains,
            domain=domain,
            sites=sites,
            site=site,
            split=split,
        )

    return Located(identify(path, [path / file for file in files]), read)


def _walk(path: Path) -> tuple[list[Path], list[Path]]:
    """Image files and folders relative to `path`, none of them hidden or in a hidden folder."""
    files, inside = [], []
    for here, inner, names in os.walk(path, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith((".", "__MACOSX"))]
        base = Path(here).relative_to(path)
        inside += [base / name for name in inner]
        files += [
            base / name for name in names if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES
        ]
    return sorted(files, key=lambda p: p.parts), sorted(inside, key=lambda p: p.parts)


def _empty(files: list[Path], inside: list[Path], depth: int) -> list[Path]:
    """Folders of sites, domains, splits and classes that hold no image."""
    tops, classes = {file.parts[0] for file in files}, {file.parts[-2] for file in files}
    found = [inner for inner in inside if len(inner.parts) == 1 and inner.name not in tops]
    deep = [inner for inner in inside if len(inner.parts) == depth - 1 > 1 and inner.parts[0] in tops]
    return found + [inner for inner in deep if inner.name not in classes]


def _warn_of_empty(path: Path, empty: list[Path]) -> None:
    if empty:
        names = ", ".join(f'"{inner}"' for inner in empty[:_NAMED]) + (", ..." if len(empty) > _NAMED else "")
        one = len(empty) == 1
        what = "a folder without images, which is" if one else f"{len(empty)} folders without images, which are"
        warnings.warn(f'dataset.name = "{path}" has {what} left out: {names}', stacklevel=3)


def _index(names: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    values, index = np.unique(names, return_inverse=True)
    return tuple(str(v) for v in values), index.astype(np.int64)
