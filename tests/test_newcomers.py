"""Clients that come later, tensors that travel once, and second messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import promptfed
from promptfed import methods, models
from promptfed.clients.messages import Answer
from promptfed.clients.wire import unpack
from promptfed.errors import UserError
from promptfed.method import Method, State
from promptfed.models import Model
from promptfed.params import Params
from promptfed.phases import Batch, Context, Holdings, Update
from promptfed.runs import config as C
from promptfed.server import Plan, run
from promptfed.testing import NAMES, Case, Memory, tiny_federation

SMALL: dict[str, Any] = {
    "dataset": {"name": "digits", "limit": 200},
    "partition": {"name": "iid", "clients": 5},
    "backbone": "cnn",
    "rounds": 3,
    "engine": {"workers": 1},
}


def case_of(method: Method, folder: Path, backbone: str = "cnn", size: int = 16) -> Case:
    model = models.build(backbone, (3, size, size), 4, 0, NAMES)
    return Case(method, model, tiny_federation(folder, size=size))


def run_with(case: Case, plan: Plan) -> Memory:
    recorder = Memory()
    with case.clients() as (clients, _):
        run(case.method, case.model, case.init, clients, plan, recorder)
    return recorder


# ---- joining


def test_newcomers_take_part_from_their_round_on_and_are_reported_apart(tmp_path: Path) -> None:
    case = case_of(methods.create("fedper", {"epochs": 1}), tmp_path)
    lines = run_with(case, Plan(3, 1.0, 0, newcomers=(1, 2), join_round=2)).lines
    assert [line["clients"] for line in lines] == [[0, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    # A personal method has nothing for them before they join.
    assert "newcomers_aggregated" not in lines[0]
    for line in lines[1:]:
        assert [row["client"] for row in line["newcomers_aggregated"]["clients"]] == [1, 2]
        assert [row["client"] for row in line["newcomers_after_local"]["clients"]] == [1, 2]
        assert [row["client"] for row in line["aggregated"]["clients"]] == [0, 3, 4]


def test_a_client_that_never_trains_is_served_by_a_global_model(tmp_path: Path) -> None:
    case = case_of(methods.create("fedavg", {"epochs": 1}), tmp_path)
    plan = Plan(2, 1.0, 0, newcomers=(2,), after_local="all")
    lines = run_with(case, plan).lines
    assert all(line["clients"] == [0, 1, 3, 4] for line in lines)
    assert all([row["client"] for row in line["newcomers_aggregated"]["clients"]] == [2] for line in lines)
    assert [row["client"] for row in lines[-1]["after_local_all"]["clients"]] == [0, 1, 3, 4]
    assert "newcomers_after_local_all" not in lines[-1]


def test_a_client_that_never_trains_is_served_without_an_own_part(tmp_path: Path) -> None:
    """Its own context is not the initial one, which nobody has trained, but the shared one."""
    settings = {"epochs": 1, "context": 2, "lr": 0.5}
    case = case_of(methods.create("promptfolio", settings), tmp_path, backbone="clip-mini", size=32)
    line = run_with(case, Plan(1, 1.0, 0, newcomers=(2,))).lines[-1]
    served, common = (line[f"newcomers_{stage}"]["summary"]["loss"] for stage in ("aggregated", "common"))
    assert served == common
    assert line["aggregated"]["summary"]["loss"] != line["common"]["summary"]["loss"]


def test_without_newcomers_nothing_is_said_of_them(tmp_path: Path) -> None:
    case = case_of(methods.create("fedavg", {"epochs": 1}), tmp_path)
    assert not any("newcomers" in key for line in run_with(case, Plan(1, 1.0, 0)).lines for key in line)


def test_a_run_reports_newcomers_and_resumes_across_their_joining(tmp_path: Path) -> None:
    settings = {**SMALL, "method": {"name": "fedavg", "epochs": 1}, "join": {"clients": 2, "round": 2}}
    whole = promptfed.run(**settings, out=tmp_path / "whole")
    promptfed.run(**{**settings, "rounds": 2}, out=tmp_path / "part")
    resumed = promptfed.run(out=tmp_path / "part", resume=True, rounds=3)
    assert whole.numbers["metrics"] == resumed.numbers["metrics"]
    found = whole.numbers["metrics"]["newcomers_aggregated"]["last"]
    assert found["clients"] == 2
    assert whole.metrics["clients"] == 3
    assert [row["client"] for row in whole.numbers["clients"]["newcomers_aggregated"]] == [3, 4]


@pytest.mark.parametrize(
    ("join", "sentence"),
    [
        ({"clients": [1], "round": 9}, r"join.round = 9 is later than the last of rounds = 3"),
        ({"round": 2}, r"join.round = 2 needs join.clients"),
        ({"clients": [9], "round": 2}, r"join.clients = \(9,\) must be different clients out of 0 to 4"),
        ({"clients": 5, "round": 2}, r"join.clients = 5 must be .* not all of them"),
        ({"clients": -1, "round": 2}, r"join.clients = -1 must be different clients out of 0 to 4"),
        ({"clients": [1]}, r'join.round = 0: "fedper" has no model for a client that never trains'),
    ],
)
def test_impossible_joining_is_one_sentence(join: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        promptfed.run(**SMALL, method="fedper", join=join, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_join_survives_toml() -> None:
    config = C.make({"join": {"clients": [1, 2], "round": 2}})
    assert C.make(C.tomllib.loads(C.dump(config.complete()))).join == config.join


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "moon", "head-tune", "fedvpt", "promptfl", "tpfl", "atpfl"])
def test_methods_with_one_global_model_serve_strangers(name: str) -> None:
    assert methods.create(name).serves


@pytest.mark.parametrize("name", ["local", "fedper", "fedrep", "pfedpt", "fedbabu", "perfedavg", "pfedpg", "fedavg+ft"])
def test_personal_methods_do_not(name: str) -> None:
    assert not methods.create(name).serves


# ---- what travels once, and second messages


class Chatty(Method):
    """Hands a large tensor to everyone once; afterwards tells each client a number, which it keeps with its secret."""

    seen: ClassVar[list[Tensor]] = []

    def secrets(self) -> Params:
        return {"secret": torch.arange(8.0)}

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        rows = [batch.y for batch in own.train()]
        assert torch.equal(own.private["secret"], torch.arange(8.0))
        return {"labels": torch.cat(rows), "val": torch.tensor(sum(len(batch.y) for batch in own.val()))}

    def begin(self, model: Model, init: Params, seed: int) -> State:
        return {**super().begin(model, init, seed), "large": torch.arange(100_000.0)}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        return {**state, f"hello.{client}": hello["labels"]}

    def down(self, state: State, client: int) -> Params:
        shared = {name: p for name, p in state.items() if name.startswith(("body.", "head."))}
        return {**shared, "once.large": state["large"]}

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        return {"large": ctx.once["large"].sum(), "settled": ctx.private.get("settled", torch.tensor(-1.0))}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        assert ctx.once["large"].shape == (100_000,)
        return super().loss(model, params, batch, ctx)

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        return {"n": ctx.n.float()}

    def aggregate(self, state: State, updates: list[Update]) -> State:
        type(self).seen.append(torch.stack([u.stats["settled"] for u in updates]))
        assert all(u.stats["large"] == torch.arange(100_000.0).sum() for u in updates)
        return super().aggregate(state, updates)

    def send_second(self, state: State, updates: list[Update]) -> dict[int, Params]:
        return {u.client: {"number": torch.tensor(float(u.client))} for u in updates if u.client != 1}

    def receive_second(self, received: Params, private: Params) -> Params:
        return {**private, "settled": received["number"]}


def chatty_run(folder: Path, rounds: int, tap: Any = None, block: int = 1) -> tuple[Memory, dict[int, Params]]:
    Chatty.seen.clear()
    case = case_of(Chatty(epochs=1, batch_size=4), folder)
    recorder = Memory()
    with case.clients(tap=tap, block=block) as (clients, host):
        run(case.method, case.model, case.init, clients, Plan(rounds, 1.0, 0), recorder)
        kept = {client: host.remembers(client, 99)[0] for client in clients.ids()}
    return recorder, kept


@pytest.mark.parametrize("block", [1, 3])
def test_a_large_tensor_travels_once_and_is_there_every_round(tmp_path: Path, block: int) -> None:
    recorder, _ = chatty_run(tmp_path, 3, block=block)
    down = [line["bytes"]["down"] for line in recorder.lines]
    model = 4 * sum(p.numel() for p in case_of(Chatty(), tmp_path).init.values())
    assert down[0] - down[1] > 5 * 400_000
    assert down[1] == down[2] < 5 * (model + 5_000)


def test_a_second_message_is_remembered_with_everything_else(tmp_path: Path) -> None:
    recorder, kept = chatty_run(tmp_path, 2)
    assert Chatty.seen[0].tolist() == [-1] * 5
    assert Chatty.seen[1].tolist() == [0, -1, 2, 3, 4]
    assert kept[0].keys() == {"secret", "n", "settled"}
    assert kept[1].keys() == {"secret", "n"}
    assert kept[0]["n"] == 13
    # It is counted: one number and its frame for each of four clients.
    assert recorder.lines[0]["bytes"]["parameters_down"] % 5 == 4


def test_a_secret_never_leaves_and_enrolment_sees_the_data(tmp_path: Path) -> None:
    said: list[Answer] = []
    recorder, _ = chatty_run(tmp_path, 2, tap=said.append)
    blobs: Sequence[bytes] = [blob for answer in said for blob in answer.blobs]
    assert not any(torch.arange(8.0).numpy().tobytes() in blob for blob in blobs)
    hello = [unpack(blob)[0] for blob in blobs if "labels" in unpack(blob)[0]]
    assert [len(h["labels"]) for h in sorted(hello, key=lambda h: -len(h["labels"]))] == [13, 10, 7, 6, 1]
    assert recorder.state is not None
    assert len(recorder.state["hello.0"]) == 13


def test_only_the_first_gradient_of_a_step_is_recorded(tmp_path: Path) -> None:
    class Twice(Method):
        def step(self, grad: Any, params: Params, phase: Any, normal: Any) -> Params:
            grad({name: torch.zeros_like(p).requires_grad_() for name, p in params.items()})
            return grad(params)

        def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
            return super().loss(model, params, batch, ctx)[0], {"seen": torch.ones(len(batch.y)).sum()}

    case = case_of(Twice(epochs=1), tmp_path)
    with case.clients() as (clients, _):
        update = clients.train({0: case.init}, 1, score=False)[0][0]
    assert update.stats["seen"] == 13
    assert update.loss == pytest.approx(float(torch.tensor(4.0).log()))  # of zero weights
