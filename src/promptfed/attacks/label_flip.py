"""Label flipping: malicious clients train on wrong labels, c as the last class but c."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..data import Federation


def flipped(federation: Federation, malicious: Sequence[int]) -> Federation:
    """With wrong labels of these clients' training data. Their validation and test data stay as they are."""
    data = federation.dataset
    labels = np.array(data.labels)
    for client in malicious:
        index = federation.sites[client].train
        labels[index] = len(data.classes) - 1 - labels[index]
    return replace(federation, dataset=replace(data, labels=labels))
