"""Where in a frozen transformer classes come apart (SGPT, appendix, Fig. 5): before, all classes can share prompts."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import torch
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

from ..data.sources import stratified
from ..errors import UserError
from ..models import ViT
from ..report import marks, style
from ..training import chunks
from . import Found, Options
from .attention import transformer
from .opened import Opened

IMAGES = 300
PANELS = 4  # layers that are drawn; the table has all


def layers(opened: Opened, options: Options) -> Found:
    tower = transformer(opened.model)
    if tower is None:
        raise UserError(f'layers: backbone "{opened.model.name}" is not a transformer')
    data, pool = opened.federation.dataset, np.concatenate([site.test for site in opened.federation.sites])
    index = pool[stratified(data.labels[pool], options.images or IMAGES)]
    labels = data.labels[index]
    if len(np.unique(labels)) < 2 or len(index) < 3:
        raise UserError(f"layers: test images of two classes are needed, got {len(index)} of {len(np.unique(labels))}")
    states = class_tokens(opened, tower, data.images[index])  # (depth, n, width)
    same = [alike(state, labels) for state in states]
    guess = float(np.mean([(np.sum(labels == label) - 1) / (len(labels) - 1) for label in labels]))
    drawn = [int(layer) for layer in np.unique(np.linspace(0, tower.depth - 1, PANELS).round())]
    rows = []
    for layer in drawn:
        tsne = TSNE(2, perplexity=min(30.0, (len(index) - 1) / 3), init="pca", random_state=0, n_jobs=1)
        for i, label, (x, y) in zip(index, labels, tsne.fit_transform(states[layer]), strict=True):
            rows.append(
                {"layer": layer + 1, "image": int(i), "label": data.classes[label], "x": float(x), "y": float(y)}
            )
    text = (
        f"t-SNE of the class token of {len(index)} test images after layers of the frozen backbone, without prompts. "
        f"Share of images whose nearest neighbour is of the same class: {same[0]:.0%} after the first layer, "
        f"{same[-1]:.0%} after the last; {guess:.0%} by chance."
    )
    table = [
        {"layer": layer + 1, "nearest_of_same_class": share, "by_chance": guess} for layer, share in enumerate(same)
    ]
    panels = [_panel([row for row in rows if row["layer"] == layer + 1], same[layer]) for layer in drawn]
    chart: Any = alt.concat(*panels, columns=2)
    below = "class token by layer; %: images whose nearest neighbour is of the same class"
    return Found(style.titled(chart, opened.title, below), rows, "Classes by layer", text, {"all": table})


def class_tokens(opened: Opened, tower: ViT, images: np.ndarray) -> np.ndarray:
    """After each layer, (depth, n, width)."""
    found: list[list[torch.Tensor]] = [[] for _ in range(tower.depth)]
    weights = opened.model.weights
    with torch.no_grad():
        for batch in chunks(opened.pixels(images)):
            h = tower.embed(weights, batch.x)
            for layer, states in enumerate(found):
                h = tower.encode(weights, h, start=layer, stop=layer + 1)
                states.append(h[:, 0])
    return torch.stack([torch.cat(states) for states in found]).cpu().numpy()


def alike(states: np.ndarray, labels: np.ndarray) -> float:
    """Of states (n, width), the share whose nearest other one has the same label."""
    nearest = NearestNeighbors(n_neighbors=1).fit(states).kneighbors(return_distance=False)[:, 0]
    return float((labels[nearest] == labels).mean())


def _panel(rows: list[dict[str, Any]], same: float) -> Any:
    names = list(dict.fromkeys(sorted(row["label"] for row in rows)))
    looks = marks.by_label(style.looks(names), alt.Color, alt.Shape, title="class")
    bare: dict[str, Any] = {
        "title": None,
        "axis": alt.Axis(labels=False, ticks=False, grid=False, domain=False),
        "scale": marks.NEAR,
    }
    at = alt.X("x:Q", **bare), alt.Y("y:Q", **bare)
    points = marks.data(rows).mark_point(filled=True, size=18, opacity=0.75).encode(*at, *looks)
    return points.properties(width=300, height=230, title=f"layer {rows[0]['layer']}: {same:.0%}")
