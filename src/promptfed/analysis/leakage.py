"""What a client's upload tells about its labels (pFedPT, Fig. 11).

Whoever has the model that a client uploads can run it on balanced data, and take what it predicts for the client's label
distribution. With a private prompt he has to do without it. The upload is made again by one more round of local training
on a copy, which nobody hears of.
"""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from ..seeding import rng
from .base import Found, Options
from .opened import Opened, cosine, unprompted

IMAGES = 50  # at most, of each class


def leakage(opened: Opened, options: Options) -> Found:
    method, init = opened.method, opened.host.init
    if not method.shared(init) or not method.schedule(opened.round):
        raise UserError(f'leakage: under "{opened.config.method.name}" clients upload nothing that they have trained')
    clients = opened.clients(options)
    index = balanced(opened, options.images or IMAGES)
    samples = opened.host.samples(index)
    images = opened.samples(opened.federation.dataset.images[index])
    labels = opened.federation.dataset.labels[index]
    hides = bool(method.kept(init))
    shares = opened.shares()[clients]
    upload, complete = [], []
    for client in clients:
        work, params = opened.trained(client)
        known = {**init, **method.shared(params)}  # what stays with the client has the value that everyone begins with
        outside = images if _prompted(opened) else samples
        upload.append(inferred(opened.probabilities(work, known, outside, unprompted(method.tuning)), labels))
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
        f"Cosine of a client's label distribution with the mean prediction of its upload on {len(index)} balanced test "
        f"images: {seen.mean():.2f} (mean over {len(clients)} clients); a uniform guess reaches {blind.mean():.2f}."
    )
    if hides:
        text += f" With {_hidden(opened)}, which nobody else has: {whole.mean():.2f}."
    return Found(_draw(opened, clients, seen, whole if hides else None, blind), rows, title, text)


def balanced(opened: Opened, most: int) -> np.ndarray:
    """Indices of test samples of all clients, equally many of each class that there is."""
    sites, labels = opened.federation.sites, opened.federation.dataset.labels
    pool = np.concatenate([site.test for site in sites])
    if not len(pool):
        raise UserError("leakage: there are no test data to try uploads on")
    by_class = [pool[labels[pool] == label] for label in np.unique(labels[pool])]
    count = min(most, *(len(part) for part in by_class)) if len(by_class) > 1 else min(most, len(pool))
    g = rng(0, "balanced")
    return np.sort(np.concatenate([g.choice(part, count, replace=False) for part in by_class]))


def inferred(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, classes) -> the mean over classes of the samples of the mean over their samples: (classes,)"""
    return np.asarray(np.mean([probabilities[labels == label].mean(0) for label in np.unique(labels)], axis=0))
