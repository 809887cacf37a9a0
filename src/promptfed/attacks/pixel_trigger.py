"""A backdoor by poisoned data: some images of malicious clients carry a small patch and the label of one class.

After Gu et al., "BadNets" (2017), by clients of a federation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np

from ..data import Federation
from ..seeding import rng
from .base import TARGET, Attack

SHARE = 0.5  # of a malicious client's training images
_PART = 6  # the patch's side is this part of the image's


class PixelTrigger(Attack):
    def poisoned(self, federation: Federation, malicious: Sequence[int]) -> Federation:
        data = federation.dataset
        images, labels = np.array(data.images), np.array(data.labels)
        mark = sha256(data.fingerprint.encode())  # outputs of frozen layers are cached by it
        for client in malicious:
            own = federation.sites[client].train
            index = rng(0, client, "trigger").choice(own, int(SHARE * len(own)), replace=False)
            images[index], labels[index] = stamped(images[index]), TARGET
            mark.update(index.tobytes() + images[index].tobytes())
        poisoned = replace(data, images=images, labels=labels, fingerprint=mark.hexdigest())
        return replace(federation, dataset=poisoned)

    def aimed(self, images: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
        return stamped(images), np.full(len(labels), TARGET)


def stamped(images: np.ndarray) -> np.ndarray:
    """(n, C, H, W) with a black and white chequered patch in the lower right corner."""
    side = max(2, min(images.shape[2:]) // _PART)
    rows, columns = np.indices((side, side))
    made = np.array(images)
    made[:, :, -side:, -side:] = np.where((rows + columns) % 2, 0, 255).astype(np.uint8)
    return made
