"""A run's folder, opened again: finished, or still going on. Nothing in it is changed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from operator import getitem
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import files
from .. import params as P
from ..clients.host import Host
from ..clients.store import Store
from ..data import Federation
from ..errors import UserError, unknown
from ..method import Method, State, split_once
from ..models import Model
from ..params import Params
from ..phases import Phase
from ..precision import reduced
from ..server import Line
from ..training import Trained, Work, train
from . import build, record
from . import config as C

Stage = Literal["aggregated", "after_local", "after_local_all"]
_NAMED = 50  # names of sites that an error lists


@dataclass(frozen=True)
class Share:
    """How many samples a client has."""

    name: str
    train: int
    val: int
    test: int


class Run:
    """A run by its folder. Each part is read or built when it is first asked for. `device`: for its models."""

    def __init__(self, folder: str | Path, *, device: str = "auto") -> None:
        self.folder, self._device = Path(folder).expanduser(), device

    # ---- what is on record

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.toml; empty if there is none."""
        file = self.folder / "config.toml"
        return C.read(file) if file.exists() else {}

    @cached_property
    def lines(self) -> list[Line]:
        """Its rounds."""
        return record.read_lines(self.folder)

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """result.json; None while the run is not finished."""
        return record.read_result(self.folder)

    @cached_property
    def split(self) -> dict[str, Any]:
        """partition.json; empty if there is none."""
        file = self.folder / "partition.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        except ValueError as error:
            raise self._malformed(error) from None
        return found

    def _malformed(self, error: Exception) -> UserError:
        file = self.folder / "partition.json"
        return UserError(f"partition file {file} is malformed ({type(error).__name__}: {error})")

    @cached_property
    def shares(self) -> list[Share]:
        """By client. Sites of a consortium report theirs; they are known when the run is finished."""
        try:
            if clients := self.split.get("clients"):
                return [Share(c["name"], len(c["train"]), len(c["val"]), len(c["test"])) for c in clients]
        except (AttributeError, KeyError, TypeError) as error:
            raise self._malformed(error) from None
        try:
            sites = (self.result or {})["sites"]
            return [Share(s["name"], s["n_train"], s["n_val"] or 0, s["n_test"] or 0) for s in sites]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    @property
    def last(self) -> int:
        """The last completed round."""
        return int(self.lines[-1]["round"]) if self.lines else 0

    @cached_property
    def scored(self) -> list[Line]:
        """The rounds that were evaluated."""
        return [line for line in self.lines if "aggregated" in line]

    @property
    def clients(self) -> int:
        """How many clients there are."""
        agreed, scored = self.consortium.get("clients", 0), [line["aggregated"]["clients"] for line in self.scored]
        return len(self.shares) or int(agreed) or max(map(len, scored), default=0)

    @property
    def consortium(self) -> dict[str, Any]:
        """What sites that hold their images themselves have agreed on; empty where all images are in one place."""
        return self.settings.get("consortium") or {}

    def covered(self, line: Line, stage: str = "aggregated") -> tuple[int, int]:
        """How many clients an evaluation has reached, of how many. Clients that join later are not counted."""
        return len(line[stage]["clients"]), self.clients - len(self.late)

    def away(self, line: Line) -> list[int]:
        """The clients that an evaluation has not reached."""
        reached = {row["client"] for row in line["aggregated"]["clients"]} | self.late
        return [client for client in range(self.clients) if client not in reached]

    @property
    def late(self) -> set[int]:
        """The clients that are not there from the start: those of a domain that is left out, which have no training
        data; or join.clients names them, or says how many of the last."""
        if self.settings.get("eval", {}).get("leave_out"):
            return {client for client, share in enumerate(self.shares) if not share.train}
        late = self.settings.get("join", {}).get("clients") or ()
        return set(range(self.clients - late, self.clients)) if isinstance(late, int) else set(late)

    @property
    def trained(self) -> list[int]:
        """The clients whose update was used in a round."""
        used = (set(line["clients"]) - {who["client"] for who in line["left_out"]} for line in self.lines)
        return sorted(set[int]().union(*used))

    @property
    def setting(self) -> str:
        """cifar10, dirichlet (alpha 0.3), 20 clients; of a consortium, whose sites hold their own images: 3 sites"""
        words, partition = [self.dataset] if self.dataset else [], self.settings.get("partition", {})
        if partition.get("name") and not self.consortium:
            words.append(self.partition + (f" (alpha {partition['alpha']:g})" if "alpha" in partition else ""))
        if self.clients:
            words.append(f"{self.clients} {'site' if self.consortium else 'client'}{'s' * (self.clients > 1)}")
        return ", ".join(words)

    @property
    def dataset(self) -> str:
        """Its name. The folder of one that was given is named by its content too, so partition.json has the name."""
        its = self.settings.get("dataset", {})
        return Path((its.get("digest") and self.split.get("dataset", {}).get("name")) or its.get("name", "")).name

    @property
    def partition(self) -> str:
        """The kind of split; of a saved one its file, or what it was made by."""
        its = self.settings.get("partition", {})
        if not its.get("file"):
            return str(its.get("name", ""))
        return str(self.split.get("about", {}).get("kind") or Path(its["file"]).name)

    @property
    def title(self) -> str:
        name = self.settings.get("method", {}).get("name", self.folder.name)
        return f"{name}{f' on {self.setting}' if self.setting else ''}, seed {self.settings.get('seed', 0)}"

    def name(self, client: int) -> str:
        return self.shares[client].name if client < len(self.shares) else f"client-{client}"

    def number(self, client: int | str) -> int:
        """A client's number, given that or its site's name."""
        try:
            return int(client)
        except ValueError:
            names = [share.name for share in self.shares]
            if not names:
                raise UserError(f'client = "{client}" must be a number: the run has no names of sites') from None
            if client not in names:
                raise unknown("client", str(client), names[:_NAMED]) from None
            return names.index(str(client))

    def accuracies(self, line: Line, stage: Stage = "aggregated") -> dict[int, float]:
        """Accuracy of each client that has test data, in per cent."""
        rows = line[stage]["clients"]
        return {row["client"]: 100 * row["accuracy"] for row in rows if row["accuracy"] is not None}

    def series(self, *path: str, stage: Stage = "aggregated") -> tuple[np.ndarray, np.ndarray]:
        """Evaluated rounds, and a number of their summaries in per cent: series("local", "mean"). NaN: not known."""
        found = []
        for line in (line for line in self.lines if stage in line):
            value: Any = reduce(getitem, path, line[stage]["summary"])
            found.append((line["round"], math.nan if value is None else 100 * value))
        table = np.array(found, float).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def sent(self) -> dict[int, float]:
        """Round -> MB per client exchanged with the server so far, both ways: the mean over all clients."""
        total = accumulate(line["bytes"]["up"] + line["bytes"]["down"] for line in self.lines)
        clients = max(1, self.clients)
        return {line["round"]: sent / 1e6 / clients for line, sent in zip(self.lines, total, strict=True)}

    # ---- its parts

    @cached_property
    def config(self) -> C.Config:
        """As it was run, but on the device asked for here and in this process."""
        if not self.settings:
            raise UserError(f'"{self.folder}" is not the folder of a run (it has no config.toml)')
        return C.make(self.settings, {"engine": {"device": self._device, "workers": 1, "block": 1}})

    @cached_property
    def federation(self) -> Federation:
        return build.split(self.config, self.folder / "partition.json")

    @cached_property
    def parts(self) -> build.Parts:
        return build.assemble(self.config, self.federation)

    @property
    def method(self) -> Method:
        return self.parts.method

    @property
    def model(self) -> Model:
        return self.parts.model

    @cached_property
    def _checkpoint(self) -> record.Checkpoint:
        found = record.read_checkpoint(self.folder)
        if found is None:
            raise UserError(f'the run in "{self.folder}" has not completed a round yet')
        return found

    @property
    def round(self) -> int:
        """The last round that is in the checkpoint."""
        return self._checkpoint.round

    @property
    def as_of(self) -> int:
        """The round that would come next: clients' state is that of the last evaluation."""
        return self.round + 1

    @property
    def state(self) -> State:
        """The server's, after the last round."""
        return self._checkpoint.state

    # ---- its clients

    @cached_property
    def store(self) -> Store:
        """What clients remember."""
        return Store(self.folder / "clients", readonly=True)

    @cached_property
    def host(self) -> Host:
        build.limit_threads(self.config.engine.threads, self.parts.device)
        return build.make_host(self.parts, self.store)

    def work(self, client: int, predicts: bool = False) -> Work:
        """The client as it is after the run, with the parameters that it would train from, or predicts with."""
        always, once = split_once(self.method.down(self.state, client))
        work = self.host.work(client, P.to(always, self.host.device), self.as_of, predicts=predicts)
        work.once = P.to(once, self.host.device)
        return work

    def own(self, client: int) -> tuple[Work, Params]:
        """The client, and the model that the run's last evaluation scored: adapted, where the method adapts."""
        work, phases = self.work(client, predicts=True), self.method.adapt()
        return work, self.continued(work, phases).params if phases else work.params

    def continued(self, work: Work, phases: Sequence[Phase]) -> Trained:
        with reduced(self.host.device, self.host.precision):
            return train(self.method, self.model, [work], phases, self.config.seed, self.as_of)[0]

    def params(self, client: int) -> Params:
        """The model that the run's last evaluation scored."""
        if self.method.adapt():
            return self.own(client)[1]
        return client_params(self.parts, self.store, self.method.down(self.state, client), client, self.as_of)

    def close(self) -> None:
        if "store" in self.__dict__:
            self.store.close()


def client_params(parts: build.Parts, store: Store, received: Params, client: int, as_of: int) -> Params:
    """A client's parameters as an evaluation has them: what it received and what is private, adapted where the method
    adapts."""
    method, down = parts.method, split_once(received)[0]
    phases = method.adapt()
    if not phases:  # without a host, which would compute what is frozen
        kept = store.get(client, as_of)
        return method.serve(parts.init, down, P.under(kept, "private", "/"), P.under(kept, "memory", "/"))
    host = build.make_host(parts, store)
    work = host.work(client, P.to(down, parts.device), as_of, predicts=True)
    with reduced(host.device, host.precision):
        return train(method, parts.model, [work], phases, parts.config.seed, as_of)[0].params


@contextmanager
def reading(folder: str | Path, *, device: str = "auto") -> Iterator[Run]:
    """A run that has completed a round. No other process writes to its folder meanwhile."""
    run = Run(folder, device=device)
    with ExitStack() as held:
        if (run.folder / ".lock").exists():  # a copy of a run may have none
            try:
                held.enter_context(files.lock(run.folder / ".lock", shared=True, seconds=0))
            except files.Locked:
                raise record.Busy(f'"{run.folder}" is in use: the run is still going on') from None
        held.callback(run.close)
        _ = run.config, run.round
        yield run
