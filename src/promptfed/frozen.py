"""Never compute twice what is frozen: values of samples that depend on frozen weights only.

A tuning names what it wants of each sample (`frozen_name`) and how it is computed (`frozen`). Values are kept in
memory-mapped files below the cache folder, for all processes, rounds, seeds and runs: the system's page cache holds
what fits into memory, the disk the rest. The key holds weights, dataset and preprocessing, so a change of any of them
is another entry. Entries that were not used for longest make room when the budget is exceeded.
"""

from __future__ import annotations

import json
import os
import warnings
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from .data import Dataset, cache
from .models import Model
from .params import Params
from .tuning import Tuning

CHUNK = 128  # samples a forward pass


class FrozenValues:
    """The frozen values of a dataset's samples under one model, each computed when it is first asked for."""

    def __init__(self, tuning: Tuning, model: Model, dataset: Dataset, device: torch.device, budget: float) -> None:
        self._tuning, self._model, self._dataset, self._device = tuning, model, dataset, device
        self._files: dict[str, np.memmap] | None = None
        one = {name: v.cpu().numpy() for name, v in self._compute(np.arange(1)).items()}
        need = len(dataset) * sum(v.nbytes for v in one.values())
        if need > budget:
            warnings.warn(
                f"engine.frozen_gb = {budget / 1e9:g} is too little for the {tuning.frozen_name(model)} of "
                f"{len(dataset)} images ({need / 1e9:.1f} GB): they are computed anew every time",
                stacklevel=2,
            )
            return
        path = cache.root() / "frozen" / self._key()
        if not cache.finished(path):
            _make_room(path.parent, budget - need)
            with cache.writing(path) as folder:
                for name, v in one.items():
                    np.lib.format.open_memmap(
                        folder / f"{name}.npy", mode="w+", dtype=v.dtype, shape=(len(dataset), *v.shape[1:])
                    )
                np.lib.format.open_memmap(folder / "known.npy", mode="w+", dtype=np.bool_, shape=(len(dataset),))
                (folder / "meta.json").write_text(json.dumps({"of": dataset.name, "by": model.name}))
        os.utime(path)  # used last
        self._files = {file.stem: np.load(file, mmap_mode="r+") for file in path.glob("*.npy")}

    def __call__(self, index: np.ndarray) -> Params:
        """(n, ...) of each value, on the device."""
        if self._files is None:
            return self._compute(index)
        known = self._files["known"]
        missing = np.unique(index[~known[index]])
        for i in range(0, len(missing), CHUNK):
            part = missing[i : i + CHUNK]
            for name, v in self._compute(part).items():
                self._files[name][part] = v.cpu().numpy()
            known[part] = True  # last, so that no other process takes a value that is not there yet
        return {
            name: torch.from_numpy(np.ascontiguousarray(file[index])).to(self._device)
            for name, file in self._files.items()
            if name != "known"
        }

    def _compute(self, index: np.ndarray) -> Params:
        parts: list[Params] = []
        mean, std = normalisation(self._model, self._dataset, self._device)
        with torch.no_grad():
            for i in range(0, len(index), CHUNK):
                x = torch.from_numpy(self._dataset.images[index[i : i + CHUNK]]).to(self._device)
                parts.append(self._tuning.frozen(self._model, (x.float() - mean) / std))
        if not parts:
            return {name: v[:0] for name, v in self._compute(np.arange(1)).items()}
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _key(self) -> str:
        digest = blake2b(digest_size=16)
        for name, p in sorted(self._model.weights.items()):
            if not name.startswith("head."):  # never part of what is frozen
                digest.update(name.encode())
                digest.update(p.detach().cpu().contiguous().numpy().tobytes())
        mean, std = normalisation(self._model, self._dataset, torch.device("cpu"))
        return cache.key(
            weights=digest.hexdigest(),
            dataset=self._dataset.fingerprint,
            scale=[mean.flatten().tolist(), std.flatten().tolist()],
            value=self._tuning.frozen_name(self._model),
            device=self._device.type,
        )


def normalisation(model: Model, dataset: Dataset, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation (C, 1, 1) on the scale of stored pixels. A pre-trained model wants its own."""
    scale = model.preprocess or dataset
    mean, std = (torch.tensor(v, device=device).reshape(-1, 1, 1) * 255 for v in (scale.mean, scale.std))
    return mean, std


def _make_room(folder: Path, left: float) -> None:
    """Removes the entries that were not used for longest, until the rest fits into what is left of the budget."""
    entries = sorted((p for p in folder.glob("[!.]*") if p.is_dir()), key=lambda p: p.stat().st_mtime)
    sizes = [sum(f.stat().st_size for f in entry.iterdir()) for entry in entries]
    total = sum(sizes)
    for entry, size in zip(entries, sizes, strict=True):
        if total <= left:
            break
        cache.discard(entry)
        total -= size
