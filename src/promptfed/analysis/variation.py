"""How far a client's classes lie apart in what the head sees (pFedPT, Fig. 1c and 1d)."""

from __future__ import annotations

import altair as alt
import numpy as np
from sklearn.decomposition import PCA

from ..errors import UserError
from ..report import marks, style
from ..runs import statistics
from . import Found, Options
from .opened import Opened

IMAGES = 500  # test images, at most


def variation(opened: Opened, options: Options) -> Found:
    """The first client's features are drawn; of several clients the ratio is told, with and without the prompt."""
    data, sites = opened.federation.dataset, opened.federation.sites
    test = {c: sites[c].test[: options.images or IMAGES] for c in opened.chosen(options, "test", 1)}
    several = {c: index for c, index in test.items() if 1 < len(np.unique(data.labels[index])) < len(index)}
    if not several:
        only = ", ".join(map(str, test))
        raise UserError(
            f"variation: client {only} has test data of one class only, or one image of each; choose another with "
            "--client"
        )
    ratios: list[dict[str, float]] = []
    found = {}
    for client, index in several.items():
        work, params = opened.own(client)
        bare, samples, labels = opened.bare(work, params), opened.host.samples(index), data.labels[index]
        found[client] = features = opened.features(work, params, samples)
        row = {"client": client, "ratio": ratio(features, labels)}
        if bare is not None:
            row["ratio_without_prompt"] = ratio(opened.features(work, params, samples, bare), labels)
        ratios.append(row)
    client, features = next(iter(found.items()))
    labels = data.labels[several[client]]
    intra, inter = within_and_between(features, labels)
    at = PCA(2).fit_transform(features)
    rows = [
        {"client": client, "image": int(i), "label": data.classes[label], "x": float(x), "y": float(y)}
        for i, label, (x, y) in zip(several[client], labels, at, strict=True)
    ]
    text = (
        f"Features of {len(labels)} test images of client {client}, their two principal components. Mean squared "
        f"distance of samples to the mean of their class: {intra:.3g}; of classes to their mean: {inter:.3g}; ratio "
        f"{inter / intra:.3g} (larger: classes are further apart).{_of_several(ratios)}"
    )
    names = [data.classes[label] for label in np.unique(labels)]
    looks = marks.by_label(style.looks(names), alt.Color, alt.Shape, title="class")
    axes = alt.X("x:Q", title="principal component 1", scale=marks.NEAR), alt.Y("y:Q", title="2", scale=marks.NEAR)
    chart = marks.data(rows).mark_point(filled=True, size=35, opacity=0.75).encode(*axes, *looks).properties(height=330)
    below = f"client {client}: within classes {intra:.3g}, between classes {inter:.3g}, ratio {inter / intra:.3g}"
    shown = style.titled(chart, opened.title, below)
    return Found(shown, rows, "Features of a client's classes", text, {"clients": ratios})


def _of_several(ratios: list[dict[str, float]]) -> str:
    """Logarithms, as a ratio of clients with few images can be very large."""
    logs = {name: np.log([row[name] for row in ratios]) for name in ratios[0] if name != "client"}
    if len(ratios) == 1:
        return ""
    text = f" Logarithm of the ratio, mean over {len(ratios)} clients: {statistics.over_clients(logs['ratio'])}"
    if len(logs) == 1:
        return f"{text}."
    without = logs["ratio_without_prompt"]
    difference = statistics.over_clients(logs["ratio"] - without, "+.2f")
    return f"{text}, without the prompt {statistics.over_clients(without)} (difference {difference})."


def ratio(features: np.ndarray, labels: np.ndarray) -> float:
    within, between = within_and_between(features, labels)
    return between / within


def within_and_between(features: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """(n, d), (n,) -> mean squared distance to the mean of the class, and of class means to their mean; all classes
    count alike."""
    groups = [features[labels == label] for label in np.unique(labels)]
    centres = np.stack([group.mean(0) for group in groups])  # (classes, d)
    within = [((group - centre) ** 2).sum(1).mean() for group, centre in zip(groups, centres, strict=True)]
    return max(float(np.mean(within)), 1e-12), float(((centres - centres.mean(0)) ** 2).sum(1).mean())
