"""check_method: what every method must hold, tried on a federation small enough for a unit test.

from promptfed.testing import check_method
check_method("my_module:MyMethod")
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from . import Dataset, Federation, Method, Model, Params, State, UserError, methods, models
from . import params as P
from .clients.base import Clients
from .clients.host import Host
from .clients.local import LocalClients
from .clients.messages import Answer, Ask, Request, read_update
from .clients.store import Store
from .clients.wire import unpack
from .data import Site
from .data.augment import Augment
from .method import split_once
from .runs import config as C
from .secure import Secure
from .secure.site import Masker
from .server import Line, Plan, Recorder, run
from .training import Work, train

SIZES = (13, 7, 10, 1, 6)  # training samples: unequal, one client with a single one
NAMES = ("circle", "square", "star", "ring")
LONER, BLIND = 3, 4  # the client with one sample, the one without validation and test data


def check_method(
    name: str,
    backbone: str | None = None,
    size: int | None = None,
    over: type[Case] | None = None,
    **settings: Any,
) -> None:
    """Runs all checks on images of size x size; an AssertionError says which one does not hold. By default on the
    smallest embedded backbone that the method runs on. `over`: a kind of case with another engine."""
    short = {"epochs": 2, "batch_size": 4, "prompt_epochs": 1, "head_epochs": 1, "iterations": 12, "finetune_epochs": 1}
    known = {key for key, field in methods.fields(name).items() if field.default}  # 0 epochs stay so
    method = methods.create(name, {**{key: n for key, n in short.items() if key in known}, **settings})
    if backbone is None:
        kind = methods.backbones(method)
        backbone = "cnn" if kind == "any" else "vit-mini" if kind == "transformers" else "clip-mini"
    size = size or (32 if backbone in ("vit-mini", "clip-mini") else 16)
    # What the checks cache stays out of the user's own cache.
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, PROMPTFED_CACHE=f"{folder}/cache"):
        model = models.build(backbone, (3, size, size), 4, 5, NAMES)
        case = (over or Case)(method, model, tiny_federation(Path(folder), size=size))
        for check in CHECKS:
            try:
                check(case)
            except UserError as error:  # what a run would be refused with
                raise AssertionError(str(error)) from None
    check_settings(name, method)


def tiny_federation(folder: Path, sizes: Sequence[int] = SIZES, size: int = 16) -> Federation:
    """Clients of unequal sizes: one with a single sample, one of a single class without test data."""
    g = np.random.default_rng(7)
    sites, labels, at = [], [], 0
    for client, n in enumerate(sizes):
        held = 0 if client == BLIND else 3
        labels += [g.integers(0, 4, n + 2 * held) if client != BLIND else np.full(n, 2)]
        index = np.arange(at, at + n + 2 * held)
        at = index[-1] + 1
        sites.append(Site(f"site {client}", index[:n], index[n : n + held], index[n + held :]))
    y = np.concatenate(labels).astype(np.int64)
    # A class is a patch of brightness: learnable, so that training moves something.
    x = g.integers(0, 120, (len(y), 3, size, size))
    for i, label in enumerate(y):
        x[i, :, 4 * label : 4 * label + 4] += 120
    half = (0.5,) * 3
    data = Dataset.from_arrays("tiny", x.astype(np.uint8), y, NAMES, mean=half, std=half, path=folder / "data")
    return Federation(data, tuple(sites), {"name": "tiny"})


@dataclass
class Case:
    method: Method
    model: Model
    federation: Federation
    seed: int = 11
    augment: Augment | None = None
    secure: Secure = field(default_factory=Secure)

    @property
    def init(self) -> Params:
        return self.method.tuning.init(self.model, self.seed)

    @contextmanager
    def clients(
        self,
        block: int = 1,
        folder: Path | None = None,
        tap: Callable[[Answer], None] | None = None,
        frozen_bytes: float = 1e9,
    ) -> Iterator[tuple[Clients, Host]]:
        with tempfile.TemporaryDirectory() as scratch:
            store = Store(folder or Path(scratch))
            masker = Masker(self.secure, self.seed, store.path / "secure") if self.secure.aggregation else None
            host = Host(
                method=self.method,
                model=self.model,
                federation=self.federation,
                store=store,
                seed=self.seed,
                device=torch.device("cpu"),
                block=block,
                frozen_bytes=frozen_bytes,
                augment=self.augment,
                masker=masker,
            )

            def answer(request: Request, blobs: list[bytes]) -> Answer:
                said = host(request, blobs)
                if tap:
                    tap(said)
                return said

            yield self.engine(host, answer), host
            host.close()

    def engine(self, host: Host, answer: Ask) -> Clients:
        """Clients that answer so: on this machine. Another engine is checked by another kind of case."""
        sizes = {i: len(site.train) for i, site in enumerate(self.federation.sites)}
        return LocalClients(sizes, [answer], host.block)

    def run(
        self,
        rounds: int = 2,
        fraction: float = 1.0,
        recorder: Memory | None = None,
        score_all: bool = True,
        **where: Any,
    ) -> Memory:
        """`score_all`: at the end all clients are also scored after a round of local training that is thrown away."""
        recorder = recorder or Memory()
        with self.clients(**where) as (clients, _):
            plan = self.plan(rounds, fraction, after_local="all" if score_all else "participants")
            run(self.method, self.model, self.init, clients, plan, recorder)
        return recorder

    def plan(self, rounds: int, fraction: float = 1.0, **settings: Any) -> Plan:
        return Plan(rounds, fraction, self.seed, secure=self.secure, **settings)

    @cached_property
    def whole(self) -> tuple[Memory, list[Answer], list[bytes]]:
        """A run's record, all that clients said, and the private values they ended with."""
        with tempfile.TemporaryDirectory() as folder:
            said: list[Answer] = []
            recorder = self.run(folder=Path(folder), tap=said.append)
            store = Store(Path(folder))
            states = [store.get(client, as_of=99) for client in range(len(self.federation.sites))]
            store.close()
        return recorder, said, [value for state in states for value in private_values(state)]


@dataclass
class Memory(Recorder):
    """A recorder that keeps everything at hand."""

    lines: list[Line] = field(default_factory=list)
    state: State | None = None

    def restore(self) -> tuple[int, State] | None:
        return (len(self.lines), self.state) if self.state is not None else None

    def begin(self, round: int, clients: Sequence[int]) -> None: ...

    def end(self, line: Line, state: State) -> None:
        self.lines.append(line)
        self.state = state

    @property
    def scores(self) -> list[Any]:
        return [line["aggregated"] for line in self.lines]


def equal(a: State | None, b: State | None) -> bool:
    assert a is not None
    assert b is not None
    # Of public keys only the shape counts: they must be other ones in every run.
    same = (a[n].shape == b[n].shape if n.endswith(".key") else torch.equal(a[n], b[n]) for n in a)
    return a.keys() == b.keys() and all(same)


def check_stacked(case: Case) -> None:
    """Clients stacked in a block train as they do one by one."""
    with case.clients() as (clients, host):
        state = begun(case, clients)
        work = [first_work(case, host, state, client) for client in range(len(SIZES))]
        alone = [train(case.method, case.model, [w], case.method.schedule(1), case.seed, 1)[0] for w in work]
        stacked = train(case.method, case.model, work, case.method.schedule(1), case.seed, 1)
    for client, (a, b) in enumerate(zip(alone, stacked, strict=True)):
        assert a.passes == b.passes
        for name in a.params:
            distance = float((a.params[name] - b.params[name]).abs().max())
            assert distance <= 1e-5, f"client {client}: {name} differs by {distance:.1e} when clients are stacked"


def begun(case: Case, clients: Clients | None = None) -> State:
    """The server's state after the first contact with these clients, or with some that are forgotten again."""
    if clients is None:
        with case.clients() as (others, _):
            return begun(case, others)
    state = case.method.begin(case.model, case.init, case.seed)
    for client, hello in clients.enroll(clients.ids()).items():
        state = case.method.admit(state, client, hello, 0)
    return state


def first_work(case: Case, host: Host, state: State, client: int) -> Work:
    """The client at the start of round 1, with what was sent once at hand."""
    always, once = split_once(case.method.down(state, client))
    work = host.work(client, always, 1)
    work.once = once
    return work


def check_private(case: Case) -> None:
    """Only what is shared goes up, as many bytes as declared; no private value is found in anything a client says."""
    recorder, said, kept = case.whole
    shared = case.method.shared(case.init)
    if case.method.kept(case.init):
        assert kept, "the method keeps parameters private but remembers none"
    blobs = [blob for answer in said for blob in answer.blobs]
    for blob in blobs:
        up, _ = read_update(blob)
        assert up.keys() <= shared.keys(), f"{up.keys() - shared.keys()} went up"
        for value in kept:
            assert value not in blob, "a private value was found in a message"
    notes = repr([answer.results for answer in said])
    assert "private" not in notes
    for line in recorder.lines:
        declared = sum(P.numel(case.method.uploads(shared, client)) for client in line["clients"])
        assert line["bytes"]["parameters_up"] == declared, "more or less goes up than the method's uploads()"
    sent = [unpack(blob)[0] for blob in blobs]
    assert sum(map(P.nbytes, sent)) <= sum(map(len, blobs)) <= sum(map(P.nbytes, sent)) + 20_000 * len(blobs)


def private_values(state: Params) -> list[bytes]:
    """As bytes, those long enough not to occur by chance."""
    values = (p.numpy().tobytes() for name, p in state.items() if name.startswith("private/"))
    return [value for value in values if len(value) >= 12 and any(value)]


def check_phases(case: Case) -> None:
    """In each phase only the roles that it trains move, and those do if the model has them; frozen weights stay."""
    before = {name: p.clone() for name, p in case.model.weights.items()}
    with case.clients() as (clients, host):
        work = first_work(case, host, begun(case, clients), 0)
        for phase in case.method.schedule(1):
            done = train(case.method, case.model, [work], (phase,), case.seed, 1)[0]
            roles = {name: case.method.tuning.role(name) for name in done.params}
            moved = {role for name, role in roles.items() if not torch.equal(done.params[name], work.params[name])}
            trained = set(phase.train) & set(roles.values())
            assert moved == trained, f'phase "{phase.name}" trains {trained} but moved {moved}'
    assert equal(before, case.model.weights), "the model's own weights changed"


def check_resumed(case: Case) -> None:
    """Same seed, same result, to the last bit: also of a run that was stopped after a round and started anew, even if
    a round had been trained but not recorded, and if all clients had been trained once more for their scores."""
    whole = case.run(rounds=3, fraction=0.6, score_all=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = case.run(rounds=1, fraction=0.6, folder=folder)
        assert whole.scores[:1] == part.scores, "two runs with the same seed score differently"
        ahead = Memory(list(part.lines), part.state)
        case.run(rounds=2, fraction=0.6, score_all=False, folder=folder, recorder=ahead)  # trained, and then lost
        resumed = case.run(rounds=3, fraction=0.6, score_all=False, folder=folder, recorder=part)
    assert equal(whole.state, resumed.state), "a resumed run ends with other parameters"
    assert whole.scores == resumed.scores, "a resumed run scores differently"


def check_newcomer(case: Case) -> None:
    """A client that was not there at the start joins in mid-training: admitted, served, trained and aggregated; before
    that it is served where the method has a model for strangers."""
    newcomer, recorder = len(SIZES) - 3, Memory()
    with case.clients() as (clients, _):
        plan = case.plan(2, newcomers=(newcomer,), join_round=2)
        run(case.method, case.model, case.init, clients, plan, recorder)
    first, second = recorder.lines
    assert newcomer not in first["clients"]
    assert ("newcomers_aggregated" in first) is case.method.serves, "serves strangers, or does not, unlike it says"
    assert newcomer in second["clients"]
    assert not second["left_out"], f"left out: {second['left_out']}"
    assert [row["client"] for row in second["newcomers_aggregated"]["clients"]] == [newcomer]
    assert recorder.state is not None
    assert P.finite(recorder.state)


def check_odd_clients(case: Case) -> None:
    """A client with one sample, one class or no test data is served like the others."""
    line = case.whole[0].lines[-1]
    assert not line["left_out"], f"left out: {line['left_out']}"
    rows = {row["client"]: row for row in line["aggregated"]["clients"]}
    assert len(rows) == len(SIZES)
    assert rows[BLIND]["accuracy"] is None
    assert rows[LONER]["accuracy"] is not None
    assert line["aggregated"]["summary"]["local"]["mean"] is not None


def check_aggregation(case: Case) -> None:
    """What the server makes does not depend on the order of updates beyond rounding, and stays finite."""
    with replace(case, secure=Secure()).clients() as (clients, _):  # it sees them
        state = begun(case, clients)
        down = {client: case.method.down(state, client) for client in clients.ids()}
        updates, _ = clients.train(down, 1, score=False)
    forward, backward = case.method.aggregate(state, updates), case.method.aggregate(state, updates[::-1])
    for name, p in forward.items():
        torch.testing.assert_close(p, backward[name], rtol=1e-4, atol=1e-5)
    assert P.finite(forward)


def check_settings(name: str, method: Method) -> None:
    """Hyper-parameters survive TOML."""
    text = C.dump({"method": {"name": name, **methods.settings(method)}})
    table = tomllib.loads(text)["method"]
    assert methods.create(table.pop("name"), table) == method, "settings change when written to TOML and read back"


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_stacked,
    check_private,
    check_phases,
    check_resumed,
    check_newcomer,
    check_odd_clients,
    check_aggregation,
)
__all__ = ["CHECKS", "Case", "Memory", "check_method", "tiny_federation"]
