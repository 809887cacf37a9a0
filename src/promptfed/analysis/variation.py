"""How far a client's classes lie apart in what the head sees (pFedPT, Fig. 1c and 1d)."""

from __future__ import annotations

import altair as alt
import numpy as np
from sklearn.decomposition import PCA

from ..errors import UserError
from ..report import marks, style
from . import Found, Options
from .opened import Opened

IMAGES = 500  # test images, at most


def variation(opened: Opened, options: Options) -> Found:
    client = opened.chosen(options, "test", 1)[0]
    data, test = opened.federation.dataset, opened.federation.sites[client].test[: options.images or IMAGES]
    labels = data.labels[test]
    if len(np.unique(labels)) < 2:
        raise UserError(f"variation: client {client} has test data of one class only; choose another with --client")
    features = opened.features(*opened.own(client), opened.host.samples(test))
    intra, inter = within_and_between(features, labels)
    at = PCA(2).fit_transform(features)
    rows = [
        {"client": client, "image": int(i), "label": data.classes[label], "x": float(x), "y": float(y)}
        for i, label, (x, y) in zip(test, labels, at, strict=True)
    ]
    text = (
        f"Features of {len(test)} test images of client {client}, their two principal components. Mean squared "
        f"distance of samples to the mean of their class: {intra:.3g}; of classes to their mean: {inter:.3g}; ratio "
        f"{inter / intra:.3g} (larger: classes are further apart)."
    )
    names = [data.classes[label] for label in np.unique(labels)]
    looks = marks.by_label(style.looks(names), alt.Color, alt.Shape, title="class")
    axes = alt.X("x:Q", title="principal component 1", scale=marks.NEAR), alt.Y("y:Q", title="2", scale=marks.NEAR)
    chart = marks.data(rows).mark_point(filled=True, size=35, opacity=0.75).encode(*axes, *looks).properties(height=330)
    below = f"client {client}: within classes {intra:.3g}, between classes {inter:.3g}, ratio {inter / intra:.3g}"
    return Found(style.titled(chart, opened.title, below), rows, "Features of a client's classes", text)


def within_and_between(features: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """(n, d), (n,) -> mean squared distance to the mean of the class, and of class means to their mean; all classes
    count alike."""
    groups = [features[labels == label] for label in np.unique(labels)]
    centres = np.stack([group.mean(0) for group in groups])  # (classes, d)
    within = [((group - centre) ** 2).sum(1).mean() for group, centre in zip(groups, centres, strict=True)]
    return max(float(np.mean(within)), 1e-12), float(((centres - centres.mean(0)) ** 2).sum(1).mean())
