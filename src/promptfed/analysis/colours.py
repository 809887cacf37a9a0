"""What prompts alone say: models of different clients on images of one colour each (pFedPT, Fig. 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..report import style
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
        f"t-SNE of what the head sees of {len(images)} images of one colour each, through the models of "
        f"{len(clients)} clients. Silhouette of the clients in feature space: {apart:.2f} (1: far apart, 0: mixed)."
    )
    figure = style.blank(5.2)
    axes = figure.subplots()
    looks = style.looks(opened.names(clients))
    for k, (name, one) in enumerate(looks.items()):
        x, y = places[owner == k].T
        axes.scatter(x, y, s=20, c=one.colour, marker=one.marker, label=style.plain(name), alpha=0.7, linewidth=0)
    style.dress(axes, x="t-SNE 1", y="t-SNE 2", grid="both")
    axes.tick_params(labelbottom=False, labelleft=False, length=0)
    figure.legend(loc="outside right upper", title="client", fontsize=9, title_fontsize=9, frameon=False)
    style.title(figure, f"{opened.title}\n{len(images)} pure colours under each client's model; silhouette {apart:.2f}")
    return Found(figure, rows, title, text)


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
        raise UserError(f"pure colours compare clients: there must be at least two, and there is {len(clients)}")
    return clients


def _others(near: np.ndarray) -> np.ndarray:
    """Of each row the mean outside the diagonal."""
    return np.asarray((near.sum(1) - near.diagonal()) / (len(near) - 1))


def _similarities(
    opened: Opened, clients: Sequence[int], near: np.ndarray, alone: Sequence[float | None] | None
) -> Figure:
    """Similarities of all pairs as a heat map; beside it each client's with its own labels and with others'."""
    names, place = opened.names(clients), np.arange(len(clients))
    figure = style.blank(float(np.clip(1.9 + 0.36 * len(clients), 3.6, 8)), gap=0.04)
    heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=[1.15, 1])
    drawn = heat.imshow(near, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for k in place:
        for j in place if len(place) <= 12 else ():
            colour = "w" if near[k, j] > 0.6 else "k"
            weight = "bold" if k == j else "normal"
            heat.text(j, k, f"{near[k, j]:.2f}", ha="center", va="center", fontsize=7, color=colour, weight=weight)
    tilted = max(map(len, names)) * len(names) > 40
    heat.set_xticks(place, [style.plain(n) for n in names], fontsize=8, rotation=90 if tilted else 0)
    heat.set_yticks(place, [style.plain(n) for n in names], fontsize=8)
    heat.set_xlabel("labels of client", fontsize=10)
    heat.set_ylabel("model of client", fontsize=10)
    heat.tick_params(length=2)
    figure.colorbar(drawn, ax=heat, label="cosine similarity", pad=0.02).ax.tick_params(labelsize=8)
    bars.barh(place - 0.2, near.diagonal(), height=0.38, color=style.BLUE, label="own labels")
    bars.barh(place + 0.2, _others(near), height=0.38, color="0.72", label="others' labels, mean")
    if alone is not None:
        at = [(value, y - 0.2) for y, value in enumerate(alone) if value is not None]
        look = {"color": "white", "markeredgecolor": "0.1", "markersize": 6, "zorder": 4}
        bars.plot(*zip(*at, strict=True), "o", label="own labels, without prompt", **look)
    style.dress(bars, x="cosine similarity", grid="x")
    bars.tick_params(axis="y", labelleft=False, length=0)
    bars.set_xlim(0, 1.02)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=9, frameon=False)
    style.title(figure, f"{opened.title}\nclasses predicted on pure colours against label distributions", size=10)
    return figure
