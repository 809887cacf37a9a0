"""Predictors of a run's clients, of its global model, of a site of a consortium, and of an exported file."""

from __future__ import annotations

import warnings
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import params as P
from ..clients.store import Store
from ..errors import UserError
from ..flower.site import RECEIVED, SETTINGS, SiteFolder, read_received
from ..method import Method
from ..params import Params
from ..runs import build, record
from ..runs.opened import Run, client_params, reading
from . import exported
from .peft import write as write_peft
from .predictor import Predictor


def load(
    path: str | Path,
    *,
    client: int | str | None = None,
    common: bool = False,
    backbone: str | None = None,
    device: str = "auto",
    trust: bool = False,
) -> Predictor:
    """The model of a run's client, a run's global model (`common`), or an exported one, by its file or folder; or at a
    site of a consortium its own, by the site's folder.

    `client`: its number, or its site's name. `backbone`: where an exported model finds its pre-trained weights, if not
    where it was trained. `trust`: import the module of a method that is not promptfed's own.
    """
    path, where = Path(path).expanduser(), build.pick_device(device, "--device")
    if client is not None and common:
        raise UserError(f"client = {client} and the global model cannot both be asked for")
    if not path.exists():
        raise UserError(f'"{path}" does not exist; allowed: the folder of a run, or an exported {exported.SUFFIX} file')
    if (path / "config.toml").exists():
        with reading(path, device=device) as run:
            if run.round < run.config.rounds:
                warnings.warn(f'"{path}" is not finished: round {run.round} of {run.config.rounds}', stacklevel=2)
            if client is not None:
                return _of_client(run, run.number(client))
            if run.method.personal and not common:
                allowed, name = f"0 to {len(run.federation.sites) - 1}", run.config.method.name
                raise UserError(f'client must be given, {allowed}: "{name}" has personal models')
            return _of_all(run)
    at = next((folder for folder in (path, path.parent.parent) if (folder / SETTINGS).exists()), None)
    if at and path.is_dir():
        made = _of_site(SiteFolder.open(at), path.name if at != path else "*", device)
    else:
        card, tuning, model, params = exported.read(exported.find(path), backbone, trust)
        made = Predictor(card, tuning, model.to(where), P.to(params, where), where)
    held = made.card["client"]
    if (client is not None and str(client) not in (str(held), made.card.get("site"))) or (common and held is not None):
        raise UserError(f'"{path}" holds {"the global model" if held is None else f"the model of client {held}"} only')
    return made


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    client: int | str | None = None,
    common: bool = False,
    peft: bool = False,
    **how: Any,
) -> Path:
    """Writes one model of a run to a file of its own (default: in the run's folder, below exports/); -> the file.
    `peft`: LoRA or text prompts in the format of the peft library instead, in a folder."""
    made = load(run, client=client, common=common, **how)
    held = made.card["client"]
    stem = "global" if held is None else f"client-{held}"
    if peft:
        return write_peft(made, Path(out or Path(run) / "exports" / f"{stem}-peft").expanduser())
    name = f"{stem}{exported.SUFFIX}"
    path = Path(out).expanduser() if out else Path(run).expanduser() / "exports" / name
    return made.save(path / name if path.is_dir() else path)


# ---- of a run


def _of_client(run: Run, client: int) -> Predictor:
    """The model that the run's evaluation scored: as received, with what is private, adapted if the method adapts."""
    parts, count = run.parts, len(run.federation.sites)
    if not 0 <= client < count:
        raise UserError(f"client = {client} must be 0 to {count - 1}, the clients of the run")
    joins = parts.config.join.round
    if client in parts.newcomers and joins > run.round and not parts.method.serves:
        raise UserError(f"client = {client} has no model yet: it joins in round {joins}")
    about = {"round": run.round, "metrics": _metrics(run, client)}
    if parts.config.consortium:
        return predictor(parts, _sent(run, client), {"client": client, **about})
    return predictor(parts, run.params(client), {**described(parts, client), **about})


def _sent(run: Run, client: int) -> Params:
    """A model of which the site keeps nothing to itself."""
    method, init = run.method, run.parts.init
    if method.adapt() or method.kept(init) or type(method).serve is not Method.serve:
        raise UserError(
            f"client = {client} has its model at its site, with parameters that never leave it: use it there, "
            "by the site's own folder"
        )
    return method.serve(init, method.down(run.state, client), {}, {})


def _of_all(run: Run) -> Predictor:
    """The global model."""
    method = run.method
    down = method.common(run.state) if method.serves else None
    if down is None:
        if method.personal:
            name = run.config.method.name
            raise UserError(f'"{name}" has no global model: its clients have models of their own, ask for one')
        down = method.down(run.state, 0)
    about = {"client": None, "round": run.round, "metrics": _metrics(run, None)}
    return predictor(run.parts, method.serve(run.parts.init, down, {}, {}), about)


def _metrics(run: Run, client: int | None) -> exported.Card:
    """What the run measured of this model, if it evaluated after its last round."""
    line = next((line for line in run.lines if line["round"] == run.round), {})
    if client is None:
        stage = "common" if "common" in line else "aggregated"
        return {stage: line[stage]["summary"]} if stage in line else {}
    stages = [stage for stage in record.STAGES if stage in line]
    return {stage: row for stage in stages for row in line[stage]["clients"] if row["client"] == client}


# ---- at a site


def _of_site(place: SiteFolder, name: str, device: str) -> Predictor:
    """A site's own model as it was last scored in a run (*: the latest): what it was sent, with what is private."""
    found = sorted((place.folder / "runs").glob(f"{name}/{RECEIVED}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(f'"{place.folder}" has no model yet: none has been evaluated here')
    down, note = read_received(found[-1])
    parts, client = place.parts(device), place.settings.client
    with closing(Store(found[-1].parent / "clients")) as store:
        params = client_params(parts, store, down, client, note["as_of"])
    about = {"round": note["as_of"] - 1, "metrics": note["metrics"]}
    return predictor(parts, params, {**described(parts, client), **about})


# ---- of both


def described(parts: build.Parts, client: int) -> exported.Card:
    site = parts.federation.sites[client]
    return {"client": client, "site": site.name, "n_train": len(site.train)}


def predictor(parts: build.Parts, params: Params, about: exported.Card) -> Predictor:
    """Parameters with all that they need to predict."""
    config, data = parts.config, parts.federation.dataset
    channels = parts.model.image[0]
    scale = parts.model.preprocess or data  # as frozen.normalisation() has it
    card: exported.Card = {
        "format": exported.FORMAT,
        "method": config.method.complete(),
        "backbone": {"name": config.backbone.name, "part": config.backbone.part},
        "seed": config.seed,
        "classes": list(data.classes),
        "image": list(parts.model.image),
        "preprocessing": {"channels": "grey" if channels == 1 else "RGB", **asdict(parts.model.resize)},
        "normalisation": {
            "of": "dataset" if scale is data else "backbone",
            "mean": list(scale.mean),
            "std": list(scale.std),
        },
        "dataset": data.name,
        **about,
        "versions": record.versions(),
    }
    return Predictor(card, parts.method.tuning, parts.model.to(parts.device), P.to(params, parts.device), parts.device)
