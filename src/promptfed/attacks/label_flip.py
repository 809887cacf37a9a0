"""Label flipping: malicious clients train on wrong labels, c as the last class but c."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..data import Federation
from .base import Attack


class LabelFlip(Attack):
    """It has worked on a test image that gets the label that its own was flipped to."""

    def poisoned(self, federation: Federation, malicious: Sequence[int]) -> Federation:
        """Validation and test data stay as they are."""
        data = federation.dataset
        labels = np.array(data.labels)
        for client in malicious:
            index = federation.sites[client].train
            labels[index] = len(data.classes) - 1 - labels[index]
        return replace(federation, dataset=replace(data, labels=labels))

    def aimed(self, images: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
        return images, classes - 1 - labels
