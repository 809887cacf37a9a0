"""What a client's upload reveals about its labels (pFedPT, Fig. 11).

Anyone who has the model that a client uploads can run it on balanced data, and take the mean prediction as the client's
label distribution; a private prompt is not part of the upload. The upload is made by one more round of local training
on a copy, which changes nothing in the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import UserError
from ..report import marks, style
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
        known = {**params, **method.kept(init)}  # what is never sent keeps its initial value
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
        f"all classes weighted equally: {seen.mean():.2f} (mean over {len(clients)} clients); a uniform guess reaches "
        f"{blind.mean():.2f}."
    )
    if hides:
        text += f" With {hidden(opened)}, which is never sent: {whole.mean():.2f}."
    return Found(draw(opened, clients, seen, whole if hides else None, blind), rows, title, text)


def pooled(opened: Opened, most: int) -> np.ndarray:
    """Indices of test samples of all clients, at most so many of each class."""
    sites, labels = opened.federation.sites, opened.federation.dataset.labels
    pool = np.concatenate([site.test for site in sites])
    if not len(pool):
        raise UserError("leakage: no client has test data to run uploads on")
    mixed = rng(0, "balanced").permutation(pool)
    parts = [mixed[labels[mixed] == label][:most] for label in np.unique(labels[pool])]
    return np.sort(np.concatenate(parts))


def inferred(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, classes), (n,) -> the mean prediction (classes,), all classes weighted equally."""
    return np.asarray(np.mean([probabilities[labels == label].mean(0) for label in np.unique(labels)], axis=0))


def hidden(opened: Opened) -> str:
    """What a client never sends, in words."""
    roles = {opened.method.tuning.role(name) for name in opened.method.kept(opened.host.init)}
    words = {"private": "prompt", "head": "head"}
    return f"its private {' and '.join(sorted(words.get(role, role) for role in roles))}"


def draw(
    opened: Opened, clients: Sequence[int], seen: np.ndarray, whole: np.ndarray | None, blind: np.ndarray
) -> style.Chart:
    kinds = {"from the upload": (style.VERMILION, seen)}
    if whole is not None:
        kinds[f"with {hidden(opened)}"] = (style.LIGHT, whole)
    x = "cosine similarity of inferred and true label distribution"
    chart = marks.bars(opened.names(clients), kinds, x, ("uniform guess", "tick", blind.tolist()))
    below = "label distributions inferred on balanced data, after one more local round; dashed: means"
    return style.titled(chart, opened.title, below)
