"""What the prompts alone do: models of different clients on images of one colour each (pFedPT, Fig. 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np

from ..errors import UserError
from ..report import marks, style
from ..seeding import rng
from .base import Found, Options
from .opened import Opened, cosine

IMAGES = 100


def pure(count: int, image: tuple[int, int, int]) -> np.ndarray:
    """Images (count, C, H, W) uint8 of one colour each: random colours, or evenly spaced greys."""
    channels, height, width = image
    if channels == 1:
        colours = np.linspace(0, 255, count).round().astype(np.uint8)[:, None]
    else:
        colours = rng(0, "pure colours").integers(0, 256, (count, channels), np.uint8)
    return np.broadcast_to(colours[:, :, None, None], (count, channels, height, width)).copy()


def embedded(opened: Opened, options: Options) -> Found:
    """Fig. 5: t-SNE of the features."""
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    clients = _several(opened, options)
    images = pure(options.images or IMAGES, opened.model.image)
    samples = opened.samples(images)
    features = np.stack([opened.features(*opened.own(client), samples) for client in clients])  # (clients, n, d)
    if all(np.array_equal(features[0], one) for one in features):
        raise UserError(f'colours-tsne: under "{opened.config.method.name}" all clients have the same features')
    flat = features.reshape(-1, features.shape[-1])
    owner = np.repeat(np.arange(len(clients)), len(images))
    perplexity = min(30.0, (len(flat) - 1) / 3)
    places = TSNE(2, perplexity=perplexity, init="pca", random_state=0, n_jobs=1).fit_transform(flat)
    apart = float(silhouette_score(flat, owner))
    rows = [
        {
            "client": clients[k],
            "colour": " ".join(map(str, images[i, :, 0, 0].tolist())),
            "x": float(places[k * len(images) + i, 0]),
            "y": float(places[k * len(images) + i, 1]),
        }
        for k in range(len(clients))
        for i in range(len(images))
    ]
    title = "Features of pure-colour images under each client's model"
    text = (
        f"t-SNE of the features of {len(images)} images of one colour each, under the models of "
        f"{len(clients)} clients. Silhouette of the clients in feature space: {apart:.2f} (1: far apart, 0: mixed)."
    )
    looks = style.looks(opened.names(clients))
    points = [
        {**row, "label": name} for name, row in zip(np.repeat(list(looks), len(images)).tolist(), rows, strict=True)
    ]
    axis = alt.Axis(labels=False, ticks=False, grid=True)
    chart = (
        marks.data(points)
        .mark_point(filled=True, size=35, opacity=0.75)
        .encode(
            alt.X("x:Q", title="t-SNE 1", axis=axis, scale=marks.NEAR),
            alt.Y("y:Q", title="t-SNE 2", axis=axis, scale=marks.NEAR),
            *marks.by_label(looks, alt.Color, alt.Shape, title="client"),
        )
        .properties(height=360)
    )
    below = f"{len(images)} pure colours under each client's model; silhouette {apart:.2f}"
    return Found(style.titled(chart, opened.title, below), rows, title, text)


def predicted(opened: Opened, options: Options) -> Found:
    """Fig. 6: the mean predicted distribution over classes, against label distributions."""
    clients = _several(opened, options)
    samples = opened.samples(pure(options.images or IMAGES, opened.model.image))
    said: list[np.ndarray] = []
    bare: list[np.ndarray | None] = []
    for client in clients:
        work, params = opened.own(client)
        said.append(opened.probabilities(work, params, samples).mean(0))
        tuning = opened.bare(work, params)
        bare.append(opened.probabilities(work, params, samples, tuning).mean(0) if tuning else None)
    if all(np.array_equal(said[0], one) for one in said):
        raise UserError(f'colours-labels: under "{opened.config.method.name}" all clients have the same model')
    shares = opened.label_shares()[clients]
    near = cosine(np.stack(said), shares)  # (clients, clients)
    own, others = near.diagonal(), _others(near)
    alone = [
        float(cosine(one[None], shares[k : k + 1])[0, 0]) if one is not None else None for k, one in enumerate(bare)
    ]
    classes = opened.federation.dataset.classes
    rows = [
        {
            "client": client,
            "similarity_own": float(own[k]),
            "similarity_others": float(others[k]),
            "similarity_own_without_prompt": "" if alone[k] is None else alone[k],
            **{f"predicted {name}": float(said[k][c]) for c, name in enumerate(classes)},
            **{f"labels {name}": float(shares[k, c]) for c, name in enumerate(classes)},
        }
        for k, client in enumerate(clients)
    ]
    title = "Classes predicted on pure colours, against the clients' own labels"
    text = (
        f"Cosine of a client's mean prediction on {len(samples)} pure colours with label distributions: "
        f"{own.mean():.2f} with its own, {others.mean():.2f} with other clients' (means over {len(clients)} clients)."
    )
    known = [value for value in alone if value is not None]
    if known:
        text += f" Without the prompt: {np.mean(known):.2f} with its own."
    return Found(_similarities(opened, clients, near, alone if known else None), rows, title, text)


def _several(opened: Opened, options: Options) -> list[int]:
    clients = opened.chosen(options)
    if len(clients) < 2:
        raise UserError(f"pure colours compare clients: at least two are needed, got {len(clients)}")
    return clients


def _others(near: np.ndarray) -> np.ndarray:
    """Mean of each row without its diagonal element."""
    return np.asarray((near.sum(1) - near.diagonal()) / (len(near) - 1))


def _similarities(
    opened: Opened, clients: Sequence[int], near: np.ndarray, alone: Sequence[float | None] | None
) -> style.Chart:
    """Similarities of all pairs as a heat map; beside it each client's with its own labels and with others'."""
    names, width = opened.names(clients), min(260, 40 * len(clients))
    texts = np.vectorize("{:.2f}".format)(near) if len(clients) <= 12 else None
    heat = marks.heat_map(
        near, names, names, x="labels of client", y="model of client", legend="cosine", texts=texts, width=width
    )
    kinds = {"own labels": (style.BLUE, near.diagonal()), "others' labels, mean": (style.LIGHT, _others(near))}
    besides: marks.Besides | None = None if alone is None else ("own labels, without the prompt", "point", alone)
    bars = marks.bars(names, kinds, "cosine similarity", besides).properties(width=230)
    chart = alt.hconcat(heat, bars).resolve_scale(color="independent")
    return style.titled(
        chart, opened.title, "classes predicted on pure colours against label distributions; dashed: means"
    )
