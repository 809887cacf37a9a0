"""What a client's upload tells about its labels (pFedPT, Fig. 11).

Whoever has the model that a client uploads can run it on balanced data, and take what it predicts for the client's
label distribution; a private prompt is not among what is uploaded. The upload is made again by one more round of local
training on a copy, which nobody hears of.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..report import style
from ..seeding import rng
from .base import Found, Options
from .opened import Opened, cosine, unprompted

IMAGES = 50  # at most, of each class


def leakage(opened: Opened, options: Options) -> Found:
    method, init = opened.method, opened.host.init
    if not method.shared(init) or not method.schedule(opened.as_of):
        raise UserError(f'leakage: under "{opened.config.method.name}" clients upload nothing that they have trained')
    clients = opened.chosen(options)
    index = pooled(opened, options.images or IMAGES)
    samples = opened.host.samples(index)
    labels = opened.federation.dataset.labels[index]
    hides = bool(method.kept(init))
    shares = opened.label_shares()[clients]
    upload, complete = [], []
    for client in clients:
        work, params = opened.after_local(client)
        known = {**init, **method.shared(params)}  # what stays with the client has the value that everyone begins with
        upload.append(inferred(opened.probabilities(work, known, samples, unprompted(method.tuning)), labels))
        complete.append(inferred(opened.probabilities(work, params, samples), labels))
    seen, whole = (cosine(np.stack(d), shares).diagonal() for d in (upload, complete))
    blind = cosine(np.full((1, shares.shape[1]), 1.0), shares)[0]
    classes = opened.federation.dataset.classes
    rows = [
        {
            "client": client,
            "similarity_upload": float(seen[k]),
            "similarity_complete": float(whole[k]),
            "similarity_uniform": float(blind[k]),
            **{f"labels {name}": float(shares[k, c]) for c, name in enumerate(classes)},
            **{f"upload {name}": float(upload[k][c]) for c, name in enumerate(classes)},
            **{f"complete {name}": float(complete[k][c]) for c, name in enumerate(classes)},
        }
        for k, client in enumerate(clients)
    ]
    title = "Label distributions inferred from uploaded models"
    text = (
        f"Cosine of a client's label distribution with the mean prediction of its upload on {len(index)} test images, "
        f"every class counting alike: {seen.mean():.2f} (mean over {len(clients)} clients); a uniform guess reaches "
        f"{blind.mean():.2f}."
    )
    if hides:
        text += f" With {hidden(opened)}, which nobody else has: {whole.mean():.2f}."
    return Found(draw(opened, clients, seen, whole if hides else None, blind), rows, title, text)


def pooled(opened: Opened, most: int) -> np.ndarray:
    """Indices of test samples of all clients, at most so many of each class."""
    sites, labels = opened.federation.sites, opened.federation.dataset.labels
    pool = np.concatenate([site.test for site in sites])
    if not len(pool):
        raise UserError("leakage: there are no test data to try uploads on")
    mixed = rng(0, "balanced").permutation(pool)
    parts = [mixed[labels[mixed] == label][:most] for label in np.unique(labels[pool])]
    return np.sort(np.concatenate(parts))


def inferred(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, classes), (n,) -> the mean prediction (classes,), in which every class of samples counts alike."""
    return np.asarray(np.mean([probabilities[labels == label].mean(0) for label in np.unique(labels)], axis=0))


def hidden(opened: Opened) -> str:
    """What stays with a client, in words."""
    roles = {opened.method.tuning.role(name) for name in opened.method.kept(opened.host.init)}
    words = {"private": "prompt", "head": "head"}
    return f"its private {' and '.join(sorted(words.get(role, role) for role in roles))}"


def draw(
    opened: Opened, clients: Sequence[int], seen: np.ndarray, whole: np.ndarray | None, blind: np.ndarray
) -> Figure:
    figure = style.blank(float(np.clip(1.9 + 0.36 * len(clients), 3.2, 8)))
    axes = figure.subplots()
    place, names = np.arange(len(clients)), [style.plain(name) for name in opened.names(clients)]
    wide = 0.38 if whole is not None else 0.7
    shift = wide / 2 if whole is not None else 0.0
    bars = [(place - shift, seen, style.VERMILION, "from the upload")]
    if whole is not None:
        bars.append((place + shift, whole, "0.72", f"with {hidden(opened)}"))
    for at, values, colour, label in bars:
        axes.barh(at, values, height=wide, color=colour, label=label)
        axes.axvline(values.mean(), color=colour if colour != "0.72" else "0.5", linestyle="--", linewidth=1.2)
    axes.plot(blind, place, "|", color="0.1", markersize=14, markeredgewidth=1.6, label="a uniform guess")
    axes.plot([], [], color="0.4", linestyle="--", linewidth=1.2, label="mean")
    axes.set_yticks(place, names)
    axes.invert_yaxis()
    style.dress(axes, x="cosine similarity of inferred and true label distribution", y="client", grid="x")
    axes.set_xlim(0, 1.02)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    style.title(figure, f"{opened.title}\nlabel distributions inferred on balanced data, after one more local round")
    return figure
