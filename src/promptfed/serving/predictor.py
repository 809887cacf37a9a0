"""A client's model, or the global one, that tells what is on images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..clients.frozen import inputs
from ..errors import UserError
from ..models import Model
from ..params import Params
from ..phases import Batch, Context
from ..seeding import rng
from ..training import CHUNK
from ..tuning import Tuning
from . import exported
from .images import Images, complain, decode, listed


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of N images, without those that could not be read."""

    names: tuple[str, ...]  # their paths, or their places in what was given
    classes: tuple[str, ...]
    probabilities: np.ndarray  # float32 (N, classes)
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def indices(self) -> np.ndarray:
        """(N,): the most probable class of each image."""
        found: np.ndarray = self.probabilities.argmax(1)
        return found

    @property
    def labels(self) -> list[str]:
        """The same by name."""
        return [self.classes[i] for i in self.indices]

    def top(self, k: int) -> list[list[tuple[str, float]]]:
        """The k most probable classes of each image, best first."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k]
        return [
            [(self.classes[i], float(row[i])) for i in best]
            for row, best in zip(self.probabilities, order, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Predictor:
    """A client's model, or the global one. `card` says where it comes from and what it needs."""

    card: exported.Card
    tuning: Tuning
    model: Model
    params: Params
    device: torch.device

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.card["classes"])

    def predict(self, images: Images, batch: int = CHUNK) -> Predictions:
        """uint8 (N, H, W, C) or (N, C, H, W); or a file, a folder (and all below it), or a list of files, folders,
        PIL images and uint8 (H, W, C). Decoded, resized and normalised as in training, `batch` images at a time.
        """
        if not 1 <= batch <= CHUNK:  # a pass never spans two chunks of an evaluation, which place moving prompts
            raise UserError(f"batch = {batch} must be 1 to {CHUNK}")
        given = listed(images, self.model.image)
        names: list[str] = []
        skipped: list[str] = []
        waiting: list[np.ndarray] = []
        found: list[np.ndarray] = []

        def flush() -> None:
            if waiting:
                found.append(self._probabilities(np.stack(waiting), len(names) - len(waiting)))
                waiting.clear()

        for name, image in given:
            decoded = decode(image, self.model.image[0], self.model.resize)
            if decoded is None:
                skipped.append(name)
                continue
            names.append(name)
            waiting.append(decoded)
            if len(waiting) == batch or len(names) % CHUNK == 0:
                flush()
        flush()
        complain(skipped, len(given), "images")
        return Predictions(tuple(names), self.classes, np.concatenate(found), tuple(skipped))

    def _probabilities(self, stored: np.ndarray, at: int) -> np.ndarray:
        """(B, C, H, W) uint8, the first of them at this place -> (B, classes). As an evaluation does it."""
        scale = self.card["normalisation"]
        mean, std = (torch.tensor(scale[k], device=self.device).reshape(-1, 1, 1) * 255 for k in ("mean", "std"))
        x = (torch.from_numpy(stored).to(self.device).float() - mean) / std
        y = torch.zeros(len(x), dtype=torch.int64, device=self.device)
        noise = torch.from_numpy(rng(0, "evaluation", at - at % CHUNK).random(2, np.float32)).to(self.device)
        nobody = torch.zeros((), dtype=torch.int64, device=self.device)
        ctx = Context({}, {}, None, nobody, nobody.expand(len(self.classes)))
        with torch.no_grad():
            x, frozen = inputs(self.tuning, self.model, x)
            logits = self.tuning.logits(self.model, self.params, Batch(x, y, None, noise, {}, frozen), ctx)
            probabilities: np.ndarray = logits.softmax(1).cpu().numpy()
        return probabilities

    def save(self, path: str | Path) -> Path:
        """One safetensors file with the card inside, and a copy of the card beside it for people; -> the file."""
        return exported.write(Path(path).expanduser(), self.card, self.tuning, self.model, self.params)
