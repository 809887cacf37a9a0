"""A run's folder, read back: the models of its clients and the global one; and a site's folder, with its own model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb

from .. import files
from .. import params as P
from ..clients.host import Host
from ..clients.store import Store
from ..clients.wire import unpack
from ..data import Federation
from ..errors import UserError, unknown
from ..flower.site import RECEIVED, Place
from ..method import State, split_once
from ..params import Params
from ..runs import build, record
from ..runs import config as C
from ..runs.record import Busy
from ..training import train
from . import exported
from .predictor import Predictor

_TOLD = 50  # names of sites that fit a sentence


@dataclass(frozen=True)
class Trained:
    """A run read back: its parts, and the server's state behind its last completed round."""

    path: Path
    parts: build.Parts
    state: State
    round: int

    def number(self, client: int | str) -> int:
        return number(client, [site.name for site in self.parts.federation.sites])

    def client(self, client: int) -> Predictor:
        """The model that the run's evaluation scored: as received, with what is private, adapted if the method does."""
        parts, sites = self.parts, self.parts.federation.sites
        if not 0 <= client < len(sites):
            raise UserError(f"client = {client} must be 0 to {len(sites) - 1}, the clients of the run")
        joins = parts.config.join.round
        if client in parts.newcomers and joins > self.round and not parts.method.serves:
            raise UserError(f"client = {client} has no model yet: it joins in round {joins}")
        if parts.config.consortium:
            return self._predictor(self._sent(client), {"client": client, "metrics": self._metrics(client)})
        store = _Kept(self.path / "clients")
        try:
            params = personal(parts, store, self.state, client, self.round + 1)
        finally:
            store.close()
        site = sites[client]
        whose = {"client": client, "site": site.name, "n_train": len(site.train)}
        return self._predictor(params, {**whose, "metrics": self._metrics(client)})

    def _sent(self, client: int) -> Params:
        """A model of which the site has nothing to itself."""
        method = self.parts.method
        if method.adapt() or len(method.shared(self.parts.init)) < len(self.parts.init):
            raise UserError(
                f"client = {client} has its model at its site, with parameters that never leave it: use it there, "
                "by the site's own folder"
            )
        return method.start(self.parts.init, method.down(self.state, client), {}, {})

    def common(self) -> Predictor:
        """The one model that everybody can use."""
        method = self.parts.method
        down = method.common(self.state)
        if down is None:
            if method.personal:
                name = self.parts.config.method.name
                raise UserError(f'"{name}" has no global model: its clients have models of their own, ask for one')
            down = method.down(self.state, 0)
        params = method.start(self.parts.init, down, {}, {})
        return self._predictor(params, {"client": None, "metrics": self._metrics(None)})

    def _predictor(self, params: Params, about: exported.Card) -> Predictor:
        return predictor(self.parts, params, {**about, "round": self.round})

    def _metrics(self, client: int | None) -> exported.Card:
        """What the run found out about this model, if it evaluated behind its last round."""
        line = next((line for line in record.read_lines(self.path) if line["round"] == self.round), {})
        if client is None:
            stage = "common" if "common" in line else "aggregated"
            return {stage: line[stage]["summary"]} if stage in line else {}
        rows = {
            stage: next((row for row in line[stage]["clients"] if row["client"] == client), None)
            for stage in record.STAGES
            if stage in line
        }
        return {stage: row for stage, row in rows.items() if row}


class _Kept(Store):
    """What a finished run's clients remember, opened such that nothing is written, not even a lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._env = lmdb.open(str(path), readonly=True, lock=False, create=False, readahead=False)
        except lmdb.Error as error:
            raise UserError(f'the clients\' state in "{path}" cannot be opened: {error}') from None


def number(client: int | str, names: Sequence[str]) -> int:
    """A client's number, given that or its site's name."""
    try:
        return int(client)
    except ValueError:
        if not names:
            raise UserError(f'client = "{client}" must be a number: sites have no names there') from None
        if client not in names:
            raise unknown("client", str(client), names[:_TOLD]) from None
        return names.index(str(client))


def personal(parts: build.Parts, store: Store, state: State, client: int, as_of: int) -> Params:
    """A client's parameters as of the start of a round, adapted where the method adapts, as in Host.evaluate()."""
    return adapted(parts, store, parts.method.down(state, client), client, as_of)


def adapted(parts: build.Parts, store: Store, received: Params, client: int, as_of: int) -> Params:
    """The same of what the client has received."""
    method = parts.method
    down = split_once(received)[0]
    phases = method.adapt()
    if not phases:
        kept = store.get(client, as_of)
        return method.start(parts.init, down, P.under(kept, "private", "/"), P.under(kept, "memory", "/"))
    config = parts.config
    host = Host(
        method=method,
        model=parts.model,
        federation=parts.federation,
        store=store,
        seed=config.seed,
        device=parts.device,
        frozen_bytes=config.engine.frozen_gb * 1e9,
    )
    work = host.work(client, P.to(down, parts.device), as_of)
    return train(method, parts.model, [work], phases, config.seed, as_of)[0].params


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


@contextmanager
def trained(path: str | Path, federation: Federation | None = None, device: str = "auto") -> Iterator[Trained]:
    """A run's folder, read and not written to; no run goes on in it meanwhile."""
    path = Path(path).expanduser()
    if not (path / "config.toml").exists():
        raise UserError(f'"{path}" is not the folder of a run (it has no config.toml)')
    if not (path / "checkpoint.safetensors").exists():
        raise UserError(f'"{path}" has not completed a round yet')
    with _shared(path):
        # Where it ran is not where it is used.
        config = C.make(C.read(path / "config.toml"), {"engine": {"device": device, "workers": 1, "block": 1}})
        split = path / "partition.json"
        held = Federation.load(split, federation.dataset) if federation else None
        parts = build.assemble(config, held, split)
        state, note = unpack((path / "checkpoint.safetensors").read_bytes())
        yield Trained(path, parts, state, int(note["round"]))


@contextmanager
def _shared(path: Path) -> Iterator[None]:
    """Others may read at the same time, nobody may write."""
    file = path / ".lock"
    if not file.exists():  # a copy of a run
        yield
        return
    try:
        with files.lock(file, shared=True, seconds=0):
            yield
    except files.Locked:
        raise Busy(f'"{path}" is in use: the run is still going on') from None


# ---- at a site


def of_site(place: Place, name: str | None, device: str) -> Predictor:
    """A site's own model as it was last scored in a run (none: the latest): what it was sent, with what is private."""
    found = sorted((place.folder / "runs").glob(f"{name or '*'}/{RECEIVED}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(f'"{place.folder}" has no model yet: none has been evaluated here')
    down, note = unpack(found[-1].read_bytes())
    parts, client = place.parts(device), place.settings.client
    store = Store(found[-1].parent / "clients")
    try:
        params = adapted(parts, store, down, client, note["as_of"])
    finally:
        store.close()
    site = parts.federation.sites[client]
    about = {"client": client, "site": site.name, "n_train": len(site.train)}
    return predictor(parts, params, {**about, "round": note["as_of"] - 1, "metrics": note["metrics"]})
