"""What a client's model tells of its labels: on images of one colour each (pFedPT, Fig. 5 and 6), where only its prompt
and its private parameters differ from others', and on balanced data, of the model that it uploads (Fig. 11)."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from sklearn.metrics.pairwise import cosine_similarity

from ..errors import UserError
from ..report import marks, style
from ..runs import statistics
from ..seeding import rng
from . import Found, Options
from .opened import Opened, unprompted

COLOURS = 100
_APART = 0.1  # silhouette from which on clients are seen apart
EACH = 50  # test images of each class, at most


def pure(count: int, image: tuple[int, int, int]) -> np.ndarray:
    """Images (count, C, H, W) uint8 of one colour each: random colours, or evenly spaced greys."""
    channels, height, width = image
    if channels == 1:
        colours = np.linspace(0, 255, count).round().astype(np.uint8)[:, None]
    else:
        colours = rng(0, "pure colours").integers(0, 256, (count, channels), np.uint8)
    return np.broadcast_to(colours[:, :, None, None], (count, channels, height, width)).copy()


def _several(opened: Opened, options: Options) -> list[int]:
    clients = opened.chosen(options)
    if len(clients) < 2:
        raise UserError(f"pure colours compare clients: at least two are needed, got {len(clients)}")
    return clients


def _label_shares(opened: Opened, clients: list[int]) -> np.ndarray:
    """Label distributions of the clients' training data, (clients, classes)."""
    counts = opened.federation.label_counts("train")[clients]
    return np.asarray(counts / counts.sum(1, keepdims=True).clip(1))


def _apart(ours: np.ndarray, theirs: np.ndarray) -> str:
    return f"difference {statistics.over_clients(ours - theirs, '+.2f')}"


def _columns(opened: Opened, **shares: np.ndarray) -> dict[str, float]:
    """A column of a CSV for each class, of each of these distributions."""
    classes = opened.federation.dataset.classes
    return {f"{word} {classes[c]}": float(value) for word, each in shares.items() for c, value in enumerate(each)}


# ---- pure colours


def colours_tsne(opened: Opened, options: Options) -> Found:
    """Fig. 5: t-SNE of the features."""
    clients = _several(opened, options)
    images = pure(options.images or COLOURS, opened.model.image)
    samples = opened.samples(images)
    features = np.stack([opened.features(*opened.own(client), samples) for client in clients])  # (clients, n, d)
    if all(np.array_equal(features[0], one) for one in features):
        raise UserError(f'colours-tsne: under "{opened.config.method.name}" all clients have the same features')
    flat, owner = features.reshape(-1, features.shape[-1]), np.repeat(clients, len(images))
    tsne = TSNE(2, perplexity=min(30.0, (len(flat) - 1) / 3), init="pca", random_state=0, n_jobs=1)
    colours = [" ".join(map(str, image[:, 0, 0])) for image in images] * len(clients)
    rows = [
        {"client": int(client), "colour": colour, "x": float(x), "y": float(y)}
        for client, colour, (x, y) in zip(owner, colours, tsne.fit_transform(flat), strict=True)
    ]
    apart = float(silhouette_score(flat, owner))
    text = (
        f"t-SNE of the features of {len(images)} images of one colour each, under the models of "
        f"{len(clients)} clients. Silhouette of the clients in feature space: {apart:.2f} (1: far apart, 0: mixed)."
    )
    names = opened.names(clients)
    looks = marks.by_label(style.looks(names), alt.Color, alt.Shape, title="client")
    bare: dict[str, Any] = {"axis": alt.Axis(labels=False, ticks=False, grid=True), "scale": marks.NEAR}
    at = alt.X("x:Q", title="t-SNE 1", **bare), alt.Y("y:Q", title="t-SNE 2", **bare)
    points = marks.data([{**row, "label": names[i // len(images)]} for i, row in enumerate(rows)])
    chart = points.mark_point(filled=True, size=35, opacity=0.75).encode(*at, *looks).properties(height=360)
    below = f"{len(images)} pure colours under each client's model; silhouette {apart:.2f}"
    title = "Features of pure-colour images under each client's model"
    mixed = f"colours-tsne: the clients' features are mixed (silhouette {apart:.2f}, below {_APART})"
    nothing = mixed if apart < _APART else ""
    return Found(style.titled(chart, opened.title, below), rows, title, text, nothing=nothing)


def colours(opened: Opened, options: Options) -> Found:
    """Fig. 6: the mean predicted distribution over classes, against label distributions."""
    clients = _several(opened, options)
    samples = opened.samples(pure(options.images or COLOURS, opened.model.image))
    said, alone = [], []  # with and without the prompt
    for client in clients:
        work, params = opened.own(client)
        bare = opened.bare(work, params)
        said.append(opened.probabilities(work, params, samples).mean(0))
        alone.append(opened.probabilities(work, params, samples, bare).mean(0))
    if all(np.array_equal(said[0], one) for one in said):
        raise UserError(f'colours-labels: under "{opened.config.method.name}" all clients have the same model')
    shares = _label_shares(opened, clients)
    near = cosine_similarity(np.stack(said), shares)  # (clients, clients)
    own, bare_own = near.diagonal(), cosine_similarity(np.stack(alone), shares).diagonal()
    others = (near.sum(1) - own) / (len(clients) - 1)
    prompted = not np.array_equal(said, alone)
    rows = [
        {
            "client": client,
            "similarity_own": float(own[k]),
            "similarity_others": float(others[k]),
            "similarity_own_without_prompt": float(bare_own[k]) if prompted else "",
            **_columns(opened, predicted=said[k], labels=shares[k]),
        }
        for k, client in enumerate(clients)
    ]
    text = (
        f"Cosine of a client's mean prediction on {len(samples)} pure colours with label distributions: "
        f"{own.mean():.2f} with its own, {others.mean():.2f} with other clients' (means over {len(clients)} clients; "
        f"{_apart(own, others)})."
    )
    if prompted:
        text += f" Without the prompt: {bare_own.mean():.2f} with its own ({_apart(bare_own, own)})."
    kinds = {"own labels": (style.BLUE, own), "others' labels, mean": (style.LIGHT, others)}
    besides: marks.Besides = ("own labels, without the prompt", "point", bare_own.tolist())
    chart = marks.bars(opened.names(clients), kinds, "cosine similarity", besides if prompted else None)
    below = "classes predicted on pure colours against label distributions; dashed: means"
    title = "Classes predicted on pure colours, against the clients' own labels"
    return Found(style.titled(chart, opened.title, below), rows, title, text)


# ---- uploads


def leakage(opened: Opened, options: Options) -> Found:
    """Fig. 11: anyone who has an upload can run it on balanced data, and take the mean prediction as the client's label
    distribution; what is private is not part of it. Uploads are made by one more round of local training on a copy."""
    method, init = opened.method, opened.host.init
    if not method.shared(init) or not method.schedule(opened.as_of):
        raise UserError(f'leakage: under "{opened.config.method.name}" clients upload nothing that they have trained')
    clients = opened.chosen(options)
    index = balanced(opened, options.images or EACH)
    samples, labels = opened.host.samples(index), opened.federation.dataset.labels[index]
    upload, complete = [], []
    for client in clients:
        work, params = opened.after_local(client)
        known = {**params, **method.kept(init)}  # what is never sent keeps its initial value
        upload.append(inferred(opened.probabilities(work, known, samples, unprompted(method.tuning)), labels))
        complete.append(inferred(opened.probabilities(work, params, samples), labels))
    shares = _label_shares(opened, clients)
    seen, whole = (cosine_similarity(np.stack(each), shares).diagonal() for each in (upload, complete))
    blind = cosine_similarity(np.ones((1, shares.shape[1])), shares)[0]
    rows = [
        {
            "client": client,
            "similarity_upload": float(seen[k]),
            "similarity_complete": float(whole[k]),
            "similarity_uniform": float(blind[k]),
            **_columns(opened, labels=shares[k], upload=upload[k], complete=complete[k]),
        }
        for k, client in enumerate(clients)
    ]
    text = (
        f"Cosine of a client's label distribution with the mean prediction of its upload on {len(index)} test images, "
        f"all classes weighted equally: {seen.mean():.2f} (mean over {len(clients)} clients); a uniform guess reaches "
        f"{blind.mean():.2f} ({_apart(blind, seen)})."
    )
    kinds = {"from the upload": (style.VERMILION, seen)}
    roles = {method.tuning.role(name) for name in method.kept(init)}
    if roles:
        hidden = f"its private {' and '.join(sorted('prompt' if role == 'private' else role for role in roles))}"
        text += f" With {hidden}, which is never sent: {whole.mean():.2f} ({_apart(whole, seen)})."
        kinds[f"with {hidden}"] = (style.LIGHT, whole)
    x = "cosine similarity of inferred and true label distribution"
    chart = marks.bars(opened.names(clients), kinds, x, ("uniform guess", "tick", blind.tolist()))
    below = "label distributions inferred on balanced data, after one more local round; dashed: means"
    title = "Label distributions inferred from uploaded models"
    return Found(style.titled(chart, opened.title, below), rows, title, text)


def balanced(opened: Opened, most: int) -> np.ndarray:
    """Indices of test samples of all clients, at most so many of each class."""
    pool = np.concatenate([site.test for site in opened.federation.sites])
    if not len(pool):
        raise UserError("leakage: no client has test data to run uploads on")
    mixed = rng(0, "balanced").permutation(pool)
    labels = opened.federation.dataset.labels[mixed]
    return np.sort(np.concatenate([mixed[labels == label][:most] for label in np.unique(labels)]))


def inferred(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, classes), (n,) -> the mean prediction (classes,), all classes weighted equally."""
    return np.asarray(np.mean([probabilities[labels == label].mean(0) for label in np.unique(labels)], axis=0))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two distributions (classes,)."""
    return float(cosine_similarity(a[None], b[None])[0, 0])
