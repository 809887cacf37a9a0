"""A model by the place where it is, and written to a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import params as P
from ..data import Federation
from ..errors import UserError
from ..flower.site import SETTINGS, SiteFolder
from ..runs import build
from ..runs.opened import reading
from . import exported
from .predictor import Predictor
from .runs import of_all, of_client, of_site


def load(
    path: str | Path,
    *,
    client: int | str | None = None,
    common: bool = False,
    backbone: str | None = None,
    device: str = "auto",
    trust: bool = False,
    federation: Federation | None = None,
) -> Predictor:
    """The model of a run's client, a run's global model (`common`), or an exported one, by its file or folder; or at a
    site of a consortium its own, by the site's folder.

    `client`: its number, or its site's name. `backbone`: where an exported model finds its pre-trained weights, if not
    where it was trained. `trust`: import the module of a method that is not promptfed's own. `federation`: of a run
    that was given one.
    """
    path = Path(path).expanduser()
    if client is not None and common:
        raise UserError(f"client = {client} and the global model cannot both be asked for")
    if not path.exists():
        raise UserError(f'"{path}" does not exist; allowed: the folder of a run, or an exported {exported.SUFFIX} file')
    if (path / "config.toml").exists():
        with reading(path, device=device, federation=federation) as run:
            if client is None and not common and run.method.personal:
                count = len(run.federation.sites)
                raise UserError(
                    f'client must be given, 0 to {count - 1}: "{run.config.method.name}" has personal models'
                )
            return of_all(run) if client is None else of_client(run, run.number(client))
    at = next((folder for folder in (path, path.parent.parent) if (folder / SETTINGS).exists()), None)
    if at and path.is_dir():
        made = of_site(SiteFolder.open(at), path.name if at != path else None, device)
    else:
        where = build.pick_device(device)
        card, tuning, model, params = exported.read(exported.find(path), backbone, trust)
        made = Predictor(card, tuning, model.to(where), P.to(params, where), where)
    held = made.card["client"]
    if (client is not None and str(client) not in (str(held), made.card.get("site"))) or (common and held is not None):
        raise UserError(f'"{path}" holds {"the global model" if held is None else f"the model of client {held}"} only')
    return made


def export(
    run: str | Path, out: str | Path | None = None, *, client: int | str | None = None, common: bool = False, **how: Any
) -> Path:
    """Writes one model of a run to a file of its own (default: in the run's folder, below exports/); -> the file."""
    made = load(run, client=client, common=common, **how)
    held = made.card["client"]
    name = f"{'global' if held is None else f'client-{held}'}{exported.SUFFIX}"
    path = Path(out).expanduser() if out else Path(run).expanduser() / "exports" / name
    return made.save(path / name if path.is_dir() else path)
