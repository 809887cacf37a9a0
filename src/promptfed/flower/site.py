"""A site of a consortium, in a folder of its own: what it has agreed to, where its images are, and what it keeps.

site.toml        which client it is, where its images and weights are
consortium.toml  what all have agreed on: the server's own file, word for word
runs/NAME/       per run: private state (clients/), and what the site last received (received.safetensors)
asked.jsonl      all that was asked of the site and all that left it (audit.py), with asked.head
released.json    number of updates released under differential privacy, over all runs
cache/           its images, decoded

The folder is for its owner alone. Only what a method shares is ever sent.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

from .. import files, models
from ..clients.host import Host
from ..clients.messages import Answer, Evaluate, EvaluateResult, Request, Train
from ..clients.store import DATA, Store
from ..clients.wire import pack, unpack
from ..data import Dataset, DatasetConfig, Federation, load, site_images
from ..errors import UserError, nearest, one_sentence
from ..method import Method
from ..params import Params, digest
from ..privacy import Privacy, accounting, epsilon
from ..runs import build
from ..runs import config as C
from ..runs.sections import Consortium
from ..server import Plan
from ..training import Work
from .agreement import Agreement
from .audit import AuditLog

SETTINGS, AGREED, RECEIVED, RELEASED = "site.toml", "consortium.toml", "received.safetensors", "released.json"
_EMPTY = 100_000  # bytes of a run that has not started
KEY = "site.key"
_log = logging.getLogger("flwr")  # a node's own
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


INTEGERS, _UPDATES = TypeAdapter(dict[int, int]), TypeAdapter(dict[float, int])
_Numbers = TypeVar("_Numbers", dict[int, int], dict[float, int])


def read_numbers(file: Path, kind: TypeAdapter[_Numbers], key: str, value: str) -> _Numbers | None:
    """A JSON file that holds a number for each node, client or noise; None: there is no such file."""
    if not file.exists():
        return None
    try:
        return kind.validate_json(file.read_bytes())
    except ValidationError:
        raise UserError(f'"{file}" is damaged: it must hold {{"{key}": {value}, ...}}') from None


# ---- the folder


def run_name(name: Any) -> str:
    """A run's name, checked: it becomes a folder's name at the server and at every site."""
    if not isinstance(name, str) or not _RUN.fullmatch(name):
        raise UserError(f'the run\'s name "{str(name)[:100]}" must be letters, digits, "-", "_" and ".", 100 at most')
    return name


class Settings(BaseModel):
    """site.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    client: int = Field(ge=0, description="which client of the consortium this is")
    data: str = Field(description="its images: class/*.jpg")
    backbone: str | None = Field(None, description="path of the weights at this site; none: the agreed name is used")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    threads: int = Field(0, ge=0, description="threads on a CPU; 0: torch's default")
    runs_gb: float = Field(20.0, gt=0, description="disk space for all runs together, in GB")
    modules: tuple[str, ...] = Field((), description="modules of this site that the agreed method may be imported from")
    fetch: bool = Field(False, description="whether weights may be fetched from the hub")
    heartbeat: float = Field(
        10.0, ge=6, le=300, description="seconds between signs of life; after twice as many the server goes on without"
    )
    epsilon: float | None = Field(None, gt=0, description="limit of what the site's updates may reveal, over all runs")


def read_settings(folder: Path) -> Settings:
    table = C.read(folder / SETTINGS)
    for key in table:
        if key not in Settings.model_fields:
            allowed = ", ".join(Settings.model_fields)
            raise UserError(
                f"{key} in {SETTINGS} is not a setting{nearest(key, Settings.model_fields)}; allowed: {allowed}"
            )
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        raise one_sentence(error, SETTINGS) from None


def read_agreed(folder: Path) -> tuple[C.Config, Consortium]:
    """consortium.toml, of a server or of a site."""
    if not (folder / AGREED).exists():
        raise UserError(f'"{folder}" is not the folder of a consortium (it has no {AGREED})')
    config = C.make(C.read(folder / AGREED))
    if config.consortium is None:
        raise UserError(f'"{folder / AGREED}" has no [consortium]')
    return config, config.consortium


def _read_at_site(folder: Path, settings: Settings) -> tuple[C.Config, Consortium]:
    """consortium.toml of a site. It comes from others, so it may name only code that the site allows to be run."""
    method = C.read(folder / AGREED).get("method", {})
    name = str(method.get("name", "") if isinstance(method, dict) else method)
    module = name.partition(":")[0]
    if ":" in name and module not in settings.modules:
        raise UserError(
            f'method.name = "{name}" in {AGREED} would run code of the module "{module}", which modules = '
            f"{list(settings.modules)} in {SETTINGS} does not allow; read the module, then add its name there"
        )
    return read_agreed(folder)


class Ledger:
    """The site's own count of the updates it has released under differential privacy, over all runs. The server counts
    too, and states its count in the result; with this a site need not trust it.

    `most` returns the epsilon that the site must not exceed; it is called every time, since it may change while a
    node is running. None: only count.
    `logged` returns the numbers of updates in the site's log: of the two counts, the larger is right, since either file
    may have been lost or changed.
    """

    def __init__(
        self,
        file: Path,
        privacy: Privacy,
        most: Callable[[], float | None] = lambda: None,
        logged: Callable[[], Mapping[float, int]] = dict,
    ) -> None:
        self._file, self._privacy, self._most, self._logged = file, privacy, most, logged

    def answers(self) -> dict[float, int]:
        """Number of updates per noise."""
        held, logged = read_numbers(self._file, _UPDATES, "noise", "updates") or {}, self._logged()
        return {noise: max(held.get(noise, 0), logged.get(noise, 0)) for noise in {**held, **logged}}

    def epsilon(self, more: int = 0) -> float:
        """What they reveal, together with `more` updates at the present noise."""
        held, noise = self.answers(), self._privacy.noise
        return epsilon({**held, noise: held.get(noise, 0) + more}, self._privacy.delta)

    def check(self) -> None:
        """Raises UserError if another update is not allowed."""
        most = self._most()
        if most is not None and self.epsilon(more=1) > most:
            raise UserError(
                f"epsilon = {most:g} in site.toml allows no more updates: "
                f"one more would bring what they reveal to {self.epsilon(more=1):.3g}"
            )

    def told(self) -> str:
        """What they reveal, in one sentence. Raises UserError if that exceeds the limit."""
        most, spent, n = self._most(), self.epsilon(), sum(self.answers().values())
        if most is not None and spent > most:
            raise UserError(f"{n} updates released so far reveal epsilon {spent:.3g}, and site.toml allows {most:g}")
        limit = "site.toml sets no limit" if most is None else f"site.toml allows {most:g}"
        return f"updates released so far: {n}, which reveal epsilon {spent:.3g}; {limit}"

    def entry(self) -> dict[str, Any]:
        """What the site's log says of it."""
        return {"epsilon": self.epsilon(), "updates": {str(noise): n for noise, n in self.answers().items()}}

    def count(self) -> None:
        """Counts an update, before it is sent."""
        held, noise = self.answers(), self._privacy.noise
        files.write(self._file, json.dumps({**held, noise: held.get(noise, 0) + 1}).encode())


@dataclass(frozen=True)
class SiteFolder:
    """A site's folder, read."""

    folder: Path
    settings: Settings
    config: C.Config
    agreed: Consortium

    @classmethod
    def open(cls, folder: Path) -> SiteFolder:
        folder = folder.expanduser().absolute()
        if not (folder / SETTINGS).exists():
            raise UserError(f'"{folder}" is not the folder of a site (it has no {SETTINGS})')
        settings = read_settings(folder)
        config, agreed = _read_at_site(folder, settings)
        if settings.client >= agreed.clients:
            last = agreed.clients - 1
            raise UserError(f"client = {settings.client} must be 0 to {last}, the clients of the consortium")
        if settings.epsilon is not None:
            accounting()
            if not config.privacy.noise:
                raise UserError(f"epsilon = {settings.epsilon:g} in {SETTINGS} needs privacy.noise above 0 in {AGREED}")
        return cls(folder, settings, config, agreed)

    def ledger(self) -> Ledger | None:
        """What it has released, where there is differential privacy."""
        privacy = self.config.privacy
        if not privacy.on:
            return None
        return Ledger(self.folder / RELEASED, privacy, lambda: self.now().epsilon, self.log().updates)

    def log(self) -> AuditLog:
        return AuditLog(self.folder)

    def now(self) -> Settings:
        """site.toml as it is now: what a site allows may be changed while its node is running."""
        return read_settings(self.folder) if (self.folder / SETTINGS).exists() else self.settings

    def plan(self) -> Plan:
        """The agreed rounds and evaluations, as consortium.toml is now: rounds may be added while a node is running."""
        there = (self.folder / AGREED).exists()
        config = _read_at_site(self.folder, self.settings)[0] if there else self.config
        return build.rounds(config, (), ())

    def private(self) -> None:
        """Raises UserError if other accounts of this machine can read the site's private files."""
        for path, mode in ((self.folder, "700"), (self.folder / KEY, "600")):
            if path.exists() and path.stat().st_mode & 0o077:
                raise UserError(f'"{path}" can be read by others: chmod {mode} {path}')

    def dataset(self) -> Dataset:
        """Its images, decoded once, with the consortium's classes and normalisation."""
        if not self.settings.fetch:
            os.environ["HF_HUB_OFFLINE"] = "1"
        agreed = build.placeholder_federation(self.config).dataset
        path = Path(self.settings.data).expanduser().absolute()
        known = np.array(site_images.class_indices(path, site_images.read(path).classes, agreed.classes))
        channels, size, _ = agreed.images.shape[1:]
        os.environ["PROMPTFED_CACHE"] = str(self.folder / "cache")  # decoded images are private too
        given = DatasetConfig(name=str(path), size=size, channels=channels, mean=agreed.mean, std=agreed.std)
        held = load(given, models.resize(self.settings.backbone or self.config.backbone.name))
        held.verify()  # once for each start of a node
        return replace(held, labels=known[held.labels], classes=agreed.classes)

    def parts(self, device: str | None = None) -> build.Parts:
        """As at the server, with the images of this site."""
        settings, agreed = self.settings, self.config.backbone.name
        here = {"device": device or settings.device, "threads": settings.threads, "workers": 1, "block": 1}
        config = C.make(self.config.complete(), {"engine": here, "backbone": {"name": settings.backbone or agreed}})
        dataset = self.dataset()
        everyone = list(build.placeholder_federation(config).sites)
        own = site_images.split(dataset, config.seed)
        everyone[settings.client] = replace(own, name=everyone[settings.client].name)
        parts = build.assemble(config, Federation(dataset, tuple(everyone), {"name": "site"}))
        parts.model.name = agreed
        return parts

    def run(self, name: str) -> Path:
        """The folder of a run, by the name that the server gives it."""
        return self.folder / "runs" / run_name(name)

    def host(self, name: str, parts: build.Parts | None = None) -> SiteHost:
        """What answers for the site in a run."""
        folder, parts = self.run(name), parts or self.parts()
        self.room(_EMPTY if not folder.exists() else 0)
        build.limit_threads(self.settings.threads, parts.device)
        if not folder.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.log().append(kind="begun", run=name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = {"run": name, "by": sha256(self.agreed.key.encode()).hexdigest()[:16] if self.agreed.key else ""}
        agreement = Agreement.of(self.log(), self.plan, parts.method, parts.model, parts.init, **about)
        made = partial(SiteHost, folder=folder, room=self.room, ledger=self.ledger(), agreement=agreement)
        return cast(SiteHost, build.make_host(parts, Store(folder / "clients"), made))

    def room(self, more: int) -> None:
        """Raises UserError if `more` bytes would exceed runs_gb: a server must not fill the site's disk."""
        held = 0
        for file in (self.folder / "runs").rglob("*"):
            with suppress(FileNotFoundError):  # another process of the site may have deleted it
                held += file.lstat().st_blocks * 512
        most = self.now().runs_gb
        if held + more > most * 1e9:
            raise UserError(
                f"runs_gb = {most:g} in {SETTINGS}: {(held + more) / 1e9:.3g} GB would be needed; folders of finished "
                "runs can be deleted"
            )


@dataclass(kw_only=True)
class SiteHost(Host):
    """A host that keeps what its site is sent, so that its model can be used where it is."""

    folder: Path = Path()
    room: Callable[[int], None] = lambda more: None
    ledger: Ledger | None = None
    agreement: Agreement | None = None
    run: int = 0  # Flower's number of the run: a later one may begin with round 1 again

    def __call__(self, request: Request, blobs: list[bytes]) -> Answer:
        self.room(sum(map(len, blobs)))
        task = request.task
        if self.agreement:
            self.agreement.admit(self.run, task, unpack(blobs[request.clients[0].blob])[0], sum(map(len, blobs)))
        if isinstance(task, Train):
            if self.ledger:
                self.ledger.check()
            if task.round > 1 and self._begins(request.clients[0].client, task.round):
                if self.agreement and self.agreement.trained():
                    raise UserError(
                        f'"{self.folder / "clients" / DATA}" is missing or empty, and with it private parameters: '
                        f"put it back from a copy, or delete {self.folder}, with which the run begins anew here"
                    )
                _log.warning(
                    "run %s is in round %d; private parameters begin anew here, as in a first round",
                    self.folder.name,
                    task.round,
                )
        answer = super().__call__(request, blobs)
        if isinstance(task, Evaluate) and not task.after_local:
            self._keep(blobs[request.clients[0].blob], task.as_of, answer)
        if self.privacy:
            _drop_losses(answer)
        if self.agreement:
            self.agreement.left(self.run, task, answer, **(self.ledger.entry() if self.ledger else {}))
        return answer

    def _begins(self, client: int, round: int) -> bool:
        """Whether it keeps something and remembers nothing: it trains for the first time, or its folder is gone."""
        keeps = bool(self.method.kept(self.init)) or type(self.method).keep is not Method.keep
        return keeps and not self.store.get(client, round)

    def released(self, work: Work, up: Params, stats: Params, task: Train) -> Params:
        sent = super().released(work, up, stats, task)
        if self.ledger:
            self.ledger.count()
        return sent

    def _keep(self, blob: bytes, as_of: int, answer: Answer) -> None:
        """The first model that is scored after a round is the site's own; a common one may follow."""
        file, turn = self.folder / RECEIVED, {"run": self.run, "as_of": as_of}
        with suppress(UserError):  # there is none, or it is damaged
            last = read_received(file)[1]
            if {key: last.get(key) for key in turn} == turn:
                return
        (result,) = answer.results
        assert isinstance(result, EvaluateResult)
        test = result.scores.test
        metrics = {"aggregated": {"n_test": test.n, "accuracy": test.score().accuracy}}
        params = unpack(blob)[0]
        files.write(file, pack(params, {**turn, "metrics": metrics, "digest": digest(params)}))


def read_received(file: Path) -> tuple[Params, dict[str, Any]]:
    """What the site last received in a run, and what it notes of that."""
    try:
        params, note = unpack(file.read_bytes())
        if note["digest"] == digest(params):
            return params, note
        why = "its checksum is wrong"
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        why = str(error)
    raise UserError(f'"{file}" is damaged ({why}): the next evaluation of the run writes it again')


def _drop_losses(answer: Answer) -> None:
    """Under differential privacy: a loss is exact to many digits, and would tell more of the data than counts do."""
    for result in answer.results:
        scores = result.scores if isinstance(result, EvaluateResult) else getattr(result, "after_local", None)
        for split in (scores.val, scores.test) if scores else ():
            split.loss = None
