"""A site's own images: one folder per class, some of the classes that all sites agreed on."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError, unknown
from ..seeding import rng
from .datasets import Dataset
from .federation import Site
from .shares import stratified
from .sources import Source, folder, spelled

SPLIT = (0.7, 0.1, 0.2)  # train, validation, test


def read(path: Path) -> Source:
    """The images below class/*.jpg."""
    if not path.is_dir():
        raise UserError(f'--data = "{path}" is not a folder')
    try:
        found = folder(path, ()).read(path)
    except UserError:
        found = None
    if found is None or found.domains or found.sites:
        raise UserError(f'--data = "{path}" must hold images as class/*.jpg, in one folder for each class')
    return found


def class_indices(path: Path, classes: Sequence[str], agreed: Sequence[str]) -> list[int]:
    """The index of each of the folder's classes among the agreed ones; case, and _ for a space, are ignored."""
    known = {spelled(name): i for i, name in enumerate(agreed)} | {name: i for i, name in enumerate(agreed)}
    for name in classes:
        if name not in known and spelled(name) not in known:
            raise unknown(f'--data = "{path}": class', name, agreed)
    return [known[name] if name in known else known[spelled(name)] for name in classes]


def split(dataset: Dataset, seed: int) -> Site:
    """All of a dataset as training, validation and test data: the same on every call."""
    parts = stratified([np.arange(len(dataset))], dataset.labels, SPLIT, rng(seed, "join"))[0]
    return Site(dataset.name, *(np.sort(index) for index in parts))
