"""DP2FL's settings, its server's rule against NumPy, newcomers, and the conformance suite."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp2fl_toy import MODEL, SIZES, method_of, toy_state, toy_updates

from promptfed.clients.messages import Answer, TrainResult, read_update
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.dp2fl import Dp2fl
from promptfed.phases import Update
from promptfed.server import Plan, run
from promptfed.testing import Case, Memory, check_method, tiny_federation
from promptfed.tunings.maple import Maple
from promptfed.tunings.pixels import PixelPrompt

# ---- settings


def test_dp2fl_takes_no_plug_in() -> None:
    with pytest.raises(UserError, match=r"has a tuning of its own, and takes no other$"):
        create("promptfed.methods.dp2fl:Dp2fl+pt")
    with pytest.raises(ValueError, match="instance of Maple"):
        Dp2fl(tuning=PixelPrompt(inner=Maple()))


def test_published_settings_are_the_defaults() -> None:
    method = Dp2fl()
    assert (method.lr, method.batch_size, method.epochs, method.optimizer) == (0.035, 4, 5, "sgd")
    assert (method.alpha, method.beta, method.tuning.context, method.tuning.depth) == (1.2, 0.2, 2, 9)


# ---- the server


def test_aggregation_against_numpy() -> None:
    method = method_of()
    state = toy_state(method)
    updates = toy_updates(method, state)
    found = method.aggregate(state, updates)
    totals = np.array([1.5, 1.5, 6.05])
    weights = (totals.sum() - totals) / (totals.sum() * 2)
    for name in updates[0].up:  # numbers of samples play no part
        expected = sum(w * u.up[name].double().numpy() for w, u in zip(weights, updates, strict=True))
        np.testing.assert_allclose(found[name], expected, atol=1e-6)
    # Client 0: .4 and .9 are improvements, 5 is discarded. Client 1: .6 is one, 1.05 and 1.1 are retained.
    for client, losses in ((0, [0.4, 0.9, 5.0]), (1, [1.1, 0.6, 1.05])):
        old = {n: p.double().numpy() for n, p in state.items() if n.startswith("map.")}
        apart = [math.sqrt(sum(np.square(u.up[n].double().numpy() - p).sum() for n, p in old.items())) for u in updates]
        raw = [(1 - loss) / (d + 1e-5) for loss, d in zip(losses, apart, strict=True)]
        if client == 0:
            f = [raw[0], raw[1], 0]
        else:
            nearest = max(raw[0], raw[2])
            f = [raw[1] * nearest / raw[0], raw[1], raw[1] * nearest / raw[2]]
        for name, p in old.items():
            expected = p + sum(w / sum(f) * (u.up[name].double().numpy() - p) for w, u in zip(f, updates, strict=True))
            np.testing.assert_allclose(found[f"own.{client}.{name}"], expected, atol=1e-6)
    assert not any(name.startswith("own.2.") for name in found)


def test_who_takes_no_part_keeps_its_data_prompt() -> None:
    method = method_of()
    state = method.aggregate(toy_state(method), toy_updates(method, toy_state(method)))
    after = method.aggregate(state, toy_updates(method, state, (1,)))
    for name in ("map.0.weight", "map.1.bias"):
        assert torch.equal(after[f"own.0.{name}"], state[f"own.0.{name}"])
        assert not torch.equal(after[f"own.1.{name}"], state[f"own.1.{name}"])
    assert torch.equal(after["context"], toy_updates(method, state, (1,))[0].up["context"])  # K = 1


def test_clients_receive_the_global_task_prompt_and_their_own_data_prompt() -> None:
    method = method_of()
    state = method.aggregate(toy_state(method), toy_updates(method, toy_state(method)))
    for client in (0, 1):
        down = method.down(state, client)
        assert torch.equal(down["map.1.weight"], state[f"own.{client}.map.1.weight"])
        assert torch.equal(down["context"], state["context"])
        assert torch.equal(down["deep.1"], state["deep.1"])
    assert torch.equal(
        method.down(state, 2)["map.1.weight"], state["map.1.weight"]
    )  # no validation data: the global one
    common = method.common(state)
    assert all(torch.equal(common[name], state[name]) for name in method.tuning.init(MODEL, 0))
    assert method.personal
    assert method.serves


def test_without_any_validation_data_clients_weigh_the_same(tmp_path: Path) -> None:
    federation = tiny_federation(tmp_path, SIZES, 32)
    none = replace(federation, sites=tuple(replace(site, val=site.val[:0]) for site in federation.sites))
    method = method_of(privacy="sealed")
    said: list[Answer] = []
    memory = Case(method, MODEL, none).run(rounds=1, tap=said.append)
    ups = [read_update(blob)[0] for a in said if isinstance(a.results[0], TrainResult) for blob in a.blobs if blob]
    assert memory.state is not None
    assert len(ups) == len(SIZES)
    torch.testing.assert_close(memory.state["context"], torch.stack([up["context"] for up in ups]).mean(0))


# ---- newcomers


@pytest.mark.parametrize("privacy", ["embeddings", "sealed"])
@pytest.mark.parametrize(("mode", "task", "data"), [("global", 1, 1), ("initglo", 1, 0), ("init", 0, 0)])
def test_what_newcomers_start_from(mode: Any, task: int, data: int, privacy: Any) -> None:
    """Served only, admitted, and trained once; client 7 was not there at the start."""
    method = method_of(newcomer=mode, privacy=privacy)
    init = method.tuning.init(MODEL, 0)
    began = toy_state(method)
    state = method.aggregate(began, toy_updates(method, began))
    key = {"key": torch.full((32,), 9, dtype=torch.uint8)} if privacy == "sealed" else {}
    admitted = method.admit(state, 7, {"x": torch.zeros(1, 17, 128), "y": torch.tensor([0]), **key}, 2)
    for served in (state, admitted):
        down = method.down(served, 7)
        for name, is_global in (("context", task), ("deep.1", task), ("map.0.weight", data), ("map.1.bias", data)):
            assert torch.equal(down[name], (state if is_global else init)[name]), name
    for old in range(3):
        assert torch.equal(method.down(admitted, old)["context"], state["context"])
    sets = [name for name in method.down(admitted, 0) if name.startswith("once.") and name.endswith(".x")]
    assert len(sets) == 3
    took_part = Update(7, down, {n: down[n] + 1 for n in init}, 1, {"total": torch.tensor(1.0, dtype=torch.float64)})
    after = method.aggregate(admitted, [took_part])
    assert torch.equal(method.down(after, 7)["context"], after["context"])
    assert any(name.startswith("init.") for name in after) is (mode != "global")


@pytest.mark.parametrize("mode", ["global", "initglo", "init"])
def test_newcomers_join_alike_in_every_mode(mode: Any, tmp_path: Path) -> None:
    found = []
    for privacy in ("embeddings", "sealed"):
        case = Case(method_of(newcomer=mode, privacy=privacy), MODEL, tiny_federation(tmp_path / privacy, SIZES, 32))
        memory = Memory()
        with case.clients() as (clients, _):
            plan = Plan(2, 1.0, case.seed, newcomers=(2,), join_round=2)
            run(case.method, case.model, case.init, clients, plan, memory)
        found.append(memory)
    one, other = (memory.lines for memory in found)
    assert [line["clients"] for line in one] == [[0, 1, 3, 4], [0, 1, 2, 3, 4]]
    for stage in ("aggregated", "newcomers_aggregated", "common", "newcomers_common"):
        assert [line[stage] for line in one] == [line[stage] for line in other]
    assert one[0]["newcomers_aggregated"]["clients"][0]["client"] == 2


# ---- the conformance suite


@pytest.mark.parametrize("given", [{"privacy": "embeddings"}, {"privacy": "sealed", "newcomer": "initglo"}], ids=str)
def test_conformance(given: dict[str, Any]) -> None:
    check_method("promptfed.methods.dp2fl:Dp2fl", backbone="clip-mini", size=32, depth=2, epochs=1, **given)
