"""Small consortia for tests: folders of coloured images, a server's folder, sites' folders."""

from pathlib import Path

import numpy as np
from PIL import Image

from promptfed.flower import consortium as consortia
from promptfed.flower.site import AGREED, SETTINGS
from promptfed.runs import build
from promptfed.runs import config as C

NAMES = ("blue sky", "fire", "grass", "sand")
COLOURS = ((40, 80, 200), (220, 60, 20), (40, 160, 60), (210, 190, 120))
SETTINGS_OF = {
    "rounds": 2,
    "method": {"name": "pfedpg", "tokens": 2, "epochs": 1, "batch_size": 8},
    "backbone": {"name": "vit-mini"},
    "dataset": {"name": "colours", "size": 32},
    "eval": {"pooled": "never"},
}


def pictures(folder, classes=range(4), each=10, seed=0):
    """A site's images: CLASS/*.png"""
    random = np.random.default_rng(seed)
    for label in classes:
        at = Path(folder) / NAMES[label].replace(" ", "_")
        at.mkdir(parents=True)
        for i in range(each):
            noisy = np.array(COLOURS[label]) + random.normal(0, 70, (40, 36, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(at / f"{i}.png")
    return Path(folder)


def consortium(folder, clients=3, address="127.0.0.1:9092", **settings):
    """-> the server's folder, and the assembled parts"""
    agreed = {"clients": clients, "classes": NAMES, "address": address}
    config = C.make(SETTINGS_OF, {"consortium": agreed}, C.undot(settings.items()))
    consortia.create(folder / "server", config)
    return folder / "server", build.assemble(config)


def site(server, folder, client, classes=range(4), **changes):
    """-> the site's folder, complete except for its keys"""
    at = folder / f"site{client}"
    at.mkdir(mode=0o700)
    data = pictures(folder / f"images{client}", classes, seed=client)
    (at / AGREED).write_text((server / AGREED).read_text())
    (at / SETTINGS).write_text(C.dump({"client": client, "data": str(data), **changes}))
    return at
