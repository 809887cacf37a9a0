"""Predictors of a run's clients, of its global model, and of a site of a consortium."""

from __future__ import annotations

from dataclasses import asdict

from .. import params as P
from ..clients.store import Store
from ..clients.wire import unpack
from ..errors import UserError
from ..flower.site import RECEIVED, SiteFolder
from ..params import Params
from ..runs import build, record
from ..runs.opened import Run, client_params
from . import exported
from .predictor import Predictor


def of_client(run: Run, client: int) -> Predictor:
    """The model that the run's evaluation scored: as received, with what is private, adapted if the method adapts."""
    parts, sites = run.parts, run.federation.sites
    if not 0 <= client < len(sites):
        raise UserError(f"client = {client} must be 0 to {len(sites) - 1}, the clients of the run")
    joins = parts.config.join.round
    if client in parts.newcomers and joins > run.round and not parts.method.serves:
        raise UserError(f"client = {client} has no model yet: it joins in round {joins}")
    metrics = _metrics(run, client)
    if parts.config.consortium:
        return predictor(parts, _sent(run, client), {"client": client, "metrics": metrics, "round": run.round})
    about = {"client": client, "site": sites[client].name, "n_train": len(sites[client].train), "metrics": metrics}
    return predictor(parts, run.params(client), {**about, "round": run.round})


def _sent(run: Run, client: int) -> Params:
    """A model of which the site keeps nothing to itself."""
    method, init = run.method, run.parts.init
    if method.adapt() or method.kept(init):
        raise UserError(
            f"client = {client} has its model at its site, with parameters that never leave it: use it there, "
            "by the site's own folder"
        )
    return method.start(init, method.down(run.state, client), {}, {})


def of_all(run: Run) -> Predictor:
    """The global model."""
    method = run.method
    down = method.common(run.state)
    if down is None:
        if method.personal:
            name = run.config.method.name
            raise UserError(f'"{name}" has no global model: its clients have models of their own, ask for one')
        down = method.down(run.state, 0)
    about = {"client": None, "metrics": _metrics(run, None), "round": run.round}
    return predictor(run.parts, method.start(run.parts.init, down, {}, {}), about)


def _metrics(run: Run, client: int | None) -> exported.Card:
    """What the run measured of this model, if it evaluated after its last round."""
    line = next((line for line in run.lines if line["round"] == run.round), {})
    if client is None:
        stage = "common" if "common" in line else "aggregated"
        return {stage: line[stage]["summary"]} if stage in line else {}
    rows = {
        stage: next((row for row in line[stage]["clients"] if row["client"] == client), None)
        for stage in record.STAGES
        if stage in line
    }
    return {stage: row for stage, row in rows.items() if row}


def predictor(parts: build.Parts, params: Params, about: exported.Card) -> Predictor:
    """Parameters with all that they need to predict."""
    config, data = parts.config, parts.federation.dataset
    channels, height, width = parts.model.image
    scale = parts.model.preprocess or data  # as frozen.normalisation() has it
    card: exported.Card = {
        "format": exported.FORMAT,
        "method": config.method.complete(),
        "backbone": {"name": config.backbone.name, "part": config.backbone.part},
        "seed": config.seed,
        "classes": list(data.classes),
        "image": [channels, height, width],
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


# ---- at a site


def of_site(place: SiteFolder, name: str | None, device: str) -> Predictor:
    """A site's own model as it was last scored in a run (none: the latest): what it was sent, with what is private."""
    found = sorted((place.folder / "runs").glob(f"{name or '*'}/{RECEIVED}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(f'"{place.folder}" has no model yet: none has been evaluated here')
    down, note = unpack(found[-1].read_bytes())
    parts, client = place.parts(device), place.settings.client
    store = Store(found[-1].parent / "clients")
    try:
        params = client_params(parts, store, down, client, note["as_of"])
    finally:
        store.close()
    site = parts.federation.sites[client]
    about = {"client": client, "site": site.name, "n_train": len(site.train)}
    return predictor(parts, params, {**about, "round": note["as_of"] - 1, "metrics": note["metrics"]})
