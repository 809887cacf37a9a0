"""A cache of the outputs of frozen layers, which are the same in every round.

A tuning names the output it needs per sample (`frozen_name`) and computes it (`frozen`). Values are kept in
memory-mapped files below the cache folder, for all processes, rounds, seeds and runs: the system's page cache holds
what fits into memory, the disk the rest. The key holds weights, dataset and preprocessing, so a change of any of them
makes a new entry. The least recently used entries are removed when the budget is exceeded.

Training images that vary have other values: those of fixed views are cached too, those of new ones are not.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import files
from ..data import Dataset, cache
from ..data.augment import FixedViews
from ..models import Model
from ..params import Params, digest, stack
from ..precision import full
from ..tuning import Tuning

CHUNK = 128  # samples per forward pass


class FrozenValues:
    """The frozen values of a dataset's samples, or of fixed views of them, under one model: each computed when it is
    first asked for."""

    def __init__(
        self,
        tuning: Tuning,
        model: Model,
        dataset: Dataset,
        device: torch.device,
        budget: float,
        views: FixedViews | None = None,
    ) -> None:
        self._tuning, self._model, self._dataset, self._device, self._views = tuning, model, dataset, device, views
        self._files: dict[str, np.ndarray] | None = None  # by the tuning's own name of a value
        one = {name: v.cpu().numpy() for name, v in self._forward(slice(0, 1)).items()}
        count = len(dataset if views is None else views)
        need = count * sum(v.nbytes for v in one.values())
        if need > budget:
            warnings.warn(
                f"engine.frozen_gb = {budget / 1e9:g} is too small for the {tuning.frozen_name(model)} of {count} "
                f"{'images' if views is None else 'views'} ({need / 1e9:.1f} GB): they are computed again every time",
                stacklevel=2,
            )
            return
        path = cache.root() / "frozen" / self._key()
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(path.parent / ".lock"):  # one process at a time makes or removes entries
            if not cache.finished(path):
                _make_room(path.parent, budget - need)
                with cache.writing(path) as folder:
                    for i, v in enumerate(one.values()):
                        _allocate(folder / f"{i}.npy", v.dtype, (count, *v.shape[1:]))
                    _allocate(folder / "known.npy", np.dtype(np.bool_), (count,))
                    (folder / "meta.json").write_text(json.dumps({"of": dataset.name, "by": model.name}))
            os.utime(path)  # last used now
            named = {"known": "known.npy", **{name: f"{i}.npy" for i, name in enumerate(one)}}
            # As plain arrays, of which single rows are faster to get.
            self._files = {name: np.asarray(np.load(path / file, mmap_mode="r+")) for name, file in named.items()}

    @property
    def cached(self) -> bool:
        """Whether the budget allows it."""
        return self._files is not None

    def known(self, index: np.ndarray) -> int:
        """Of how many of these samples the cache has the values, computed by any process."""
        return 0 if self._files is None else int(self._files["known"][index].sum())

    def __call__(self, index: np.ndarray) -> Params:
        """(n, ...) of each value, on the device."""
        # Always the same chunks of the dataset: rounding depends on the batch size, and a value must not depend on
        # which samples were asked for first.
        if self._files is None:
            return self._anew(index)
        known = self._files["known"]
        missing = index[~known[index]]
        for chunk in np.unique(missing // CHUNK) if len(missing) else ():
            part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            for name, v in self._forward(part).items():
                self._files[name][part] = v.cpu().numpy()
            known[part] = True  # last, so that no other process reads a value before it is written
        return {
            name: torch.from_numpy(np.ascontiguousarray(file[index])).to(self._device)
            for name, file in self._files.items()
            if name != "known"
        }

    def _anew(self, index: np.ndarray) -> Params:
        found: dict[int, Params] = {}
        chunks, within = index // CHUNK, index % CHUNK
        for chunk in np.unique(chunks):
            values = self._forward(slice(chunk * CHUNK, (chunk + 1) * CHUNK))
            for i in np.flatnonzero(chunks == chunk):
                found[int(i)] = {name: v[within[i]] for name, v in values.items()}
        if not found:
            return {name: v[:0] for name, v in self._forward(slice(0, 1)).items()}
        return stack([found[i] for i in range(len(index))])

    def _forward(self, part: slice) -> Params:
        mean, std = normalisation(self._model, self._dataset, self._device)
        if self._views is None:
            x = torch.from_numpy(np.array(self._dataset.images[part])).to(self._device).float()
        else:
            x = self._views(np.arange(*part.indices(len(self._views))))
        with torch.no_grad(), full(self._device):  # whatever the precision, so that all runs share them
            return self._tuning.frozen(self._model, (x - mean) / std)

    def _key(self) -> str:
        frozen = {name: p for name, p in self._model.weights.items() if not name.startswith("head.")}
        mean, std = normalisation(self._model, self._dataset, torch.device("cpu"))
        return cache.key(
            layout=2,  # files are numbered: two tunings may have names of their own for the same values
            weights=digest(frozen),
            dataset=self._dataset.fingerprint,
            scale=[mean.flatten().tolist(), std.flatten().tolist()],
            value=self._tuning.frozen_name(self._model),
            device=self._device.type,
            **({"views": self._views.key} if self._views else {}),
        )


def normalisation(model: Model, dataset: Dataset, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation (C, 1, 1) on the scale of stored pixels. A pre-trained model has its own."""
    scale = model.preprocess or dataset
    mean, std = (torch.tensor(v, device=device).reshape(-1, 1, 1) * 255 for v in (scale.mean, scale.std))
    return mean, std


def inputs(tuning: Tuning, model: Model, x: torch.Tensor) -> tuple[torch.Tensor, Params]:
    """`x` and `frozen` of a batch of normalised images: frozen values, and no images where the tuning needs none."""
    if not tuning.frozen_name(model):
        return x, {}
    with torch.no_grad():
        frozen = tuning.frozen(model, x)
    return (x if tuning.images else x.new_empty(len(x), 0)), frozen


def _allocate(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """An array of zeros on disk. All blocks are allocated at once: on a full disk a later write would crash."""
    np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape).flush()
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _make_room(folder: Path, left: float) -> None:
    """Removes the least recently used entries until the rest fits into `left` bytes."""
    entries = sorted((p for p in folder.glob("[!.]*") if p.is_dir()), key=lambda p: p.stat().st_mtime)
    sizes = [sum(f.stat().st_size for f in entry.iterdir()) for entry in entries]
    total = sum(sizes)
    for entry, size in zip(entries, sizes, strict=True):
        if total <= left:
            break
        shutil.rmtree(entry, ignore_errors=True)
        total -= size
