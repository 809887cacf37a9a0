"""What was trained, put to use: predict with a client's model, and export it as one file.

import promptfed
model = promptfed.load("runs/pfedpt-cifar10-seed0", client=3)  # or an exported file, which needs no run
print(model.predict("photos/").labels)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import build
from .. import params as P
from ..data import Federation
from ..errors import UserError
from ..sites import SETTINGS, Place
from . import files
from .images import Images
from .predictor import Predictions, Predictor
from .runs import of_site, trained

__all__ = ["Images", "Predictions", "Predictor", "export", "load"]


def load(
    path: str | Path,
    *,
    client: int | None = None,
    common: bool = False,
    backbone: str | None = None,
    device: str = "auto",
    trust: bool = False,
    federation: Federation | None = None,
) -> Predictor:
    """The model of a run's client, a run's global model (`common`), or an exported one, by its file or folder; or at a
    site of a consortium its own, by the site's folder.

    `backbone`: where an exported model finds its pre-trained weights, if not where it was trained. `trust`: import the
    module of a method that is not promptfed's own. `federation`: of a run that was given one.
    """
    path = Path(path).expanduser()
    if client is not None and common:
        raise UserError(f"client = {client} and the global model cannot both be asked for")
    if not path.exists():
        raise UserError(f'"{path}" does not exist; allowed: the folder of a run, or an exported {files.SUFFIX} file')
    if (path / "config.toml").exists():
        with trained(path, federation, device) as run:
            if client is None and not common and run.parts.method.personal:
                count = len(run.parts.federation.sites)
                raise UserError(
                    f'client must be given, 0 to {count - 1}: "{run.parts.config.method.name}" has personal models'
                )
            return run.common() if client is None else run.client(client)
    at = next((folder for folder in (path, path.parent.parent) if (folder / SETTINGS).exists()), None)
    if at and path.is_dir():
        made = of_site(Place.open(at), path.name if at != path else None, device)
    else:
        where = build.pick_device(device)
        card, tuning, model, params = files.read(files.find(path), backbone, trust)
        made = Predictor(card, tuning, model.to(where), P.to(params, where), where)
    if (client is not None and client != made.card["client"]) or (common and made.card["client"] is not None):
        held = made.card["client"]
        raise UserError(f'"{path}" holds {"the global model" if held is None else f"the model of client {held}"} only')
    return made


def export(
    run: str | Path, out: str | Path | None = None, *, client: int | None = None, common: bool = False, **how: Any
) -> Path:
    """Writes one model of a run to a file of its own (default: in the run's folder, below exports/); -> the file."""
    made = load(run, client=client, common=common, **how)
    held = made.card["client"]
    name = f"{'global' if held is None else f'client-{held}'}{files.SUFFIX}"
    path = Path(out).expanduser() if out else Path(run).expanduser() / "exports" / name
    return made.save(path / name if path.is_dir() else path)
