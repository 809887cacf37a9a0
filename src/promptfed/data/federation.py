"""Which client holds which images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import files
from ..errors import UserError
from .datasets import Dataset

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Site:
    """One client's share: sorted int64 indices into the dataset, none of them in two of the arrays."""

    name: str
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset split among clients."""

    dataset: Dataset
    sites: tuple[Site, ...]
    about: dict[str, Any]  # kind and settings of the partition, and its seed

    def label_counts(self, split: Literal["train", "val", "test"] = "train") -> np.ndarray:
        """How many samples of each class every client has, int64 (clients, classes)."""
        parts = [getattr(site, split) for site in self.sites]
        classes = len(self.dataset.classes)
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        cell = owner * classes + self.dataset.labels[np.concatenate(parts)]
        return np.bincount(cell, minlength=len(parts) * classes).reshape(len(parts), classes)

    def text(self) -> str:
        """The partition as plain JSON; indices count from 0 in the order of the dataset's images.

        {"format": 1, "dataset": {"name", "fingerprint", "n", "classes"}, "about": {...},
         "clients": [{"name", "train": [...], "val": [...], "test": [...]}, ...]}
        """
        data = self.dataset
        its = {"name": data.name, "fingerprint": data.fingerprint, "n": len(data), "classes": list(data.classes)}
        head = {"format": 1, "dataset": its, "about": self.about}
        clients = [
            {"name": site.name, **{split: getattr(site, split).tolist() for split in _SPLITS}} for site in self.sites
        ]
        # one client per line: readable, and a diff shows which client changed
        lines = ",\n".join(json.dumps(client, separators=(",", ":")) for client in clients)
        return f'{json.dumps(head)[:-1]}, "clients": [\n{lines}\n]}}\n'

    def save(self, path: Path) -> None:
        """Write the partition to a file."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, self.text().encode())
        except OSError as error:
            raise UserError(f'partition file "{path}" cannot be written: {error.strerror}') from None

    @classmethod
    def load(cls, path: Path, dataset: Dataset) -> "Federation":
        """Read a saved partition of this dataset."""
        try:
            text = json.loads(Path(path).read_text())
            its = dict(text["dataset"])
            about = dict(text["about"])
            sites = tuple(
                Site(str(client["name"]), *(_indices(client[split]) for split in _SPLITS)) for client in text["clients"]
            )
        except OSError as error:
            raise UserError(f"partition file {path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"partition file {path} is malformed ({type(error).__name__}: {error})") from error
        if not sites:
            raise UserError(f"partition file {path} holds no clients")
        if its.get("fingerprint") != dataset.fingerprint:
            raise UserError(
                f'partition file {path} belongs to another dataset ("{its.get("name")}" of {its.get("n")} images), '
                f'not to "{dataset.name}" of {len(dataset)} images as it is loaded now'
            )
        splits = [np.concatenate([getattr(site, split) for site in sites]) for split in _SPLITS]
        every = np.concatenate(splits)
        if len(every) and (every.min() < 0 or every.max() >= len(dataset)):
            raise UserError(f"partition file {path} holds an index outside 0..{len(dataset) - 1}")
        apart = [every]
        if about.get("overlap") is True:  # clients may have images in common, but one has none twice
            apart = [np.concatenate([np.unique(part) for part in splits])]
            apart += [np.concatenate([getattr(site, split) for split in _SPLITS]) for site in sites]
        if any(len(np.unique(part)) != len(part) for part in apart):
            raise UserError(f"partition file {path} assigns some images twice")
        return cls(dataset, sites, about)


def _indices(values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise ValueError("an index list must hold integers only")
    return np.sort(np.array(values, dtype=np.int64))
