"""Whole rounds: the mean is that of plain updates, also if clients are lost, and is refused if too few are left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from masked import ON, SIZES, federation, trained

from promptfed import UserError
from promptfed import params as P
from promptfed.clients import messages as M
from promptfed.clients.messages import split_update
from promptfed.method import State
from promptfed.methods import create
from promptfed.params import Params
from promptfed.privacy import Privacy
from promptfed.secure import Secure, neighbours, ring
from promptfed.secure.site import Masker
from promptfed.server import Plan, run, step
from promptfed.testing import Memory
from tiny import SEED, linear

OFF = Secure()
FEW = Secure(aggregation=True, neighbours=2)


def close(a: State, b: State) -> None:
    """Each client rounds to half a unit of 64 / 2^30."""
    torch.testing.assert_close(a, b, rtol=0, atol=5e-7)


@pytest.mark.parametrize("secure", [ON, FEW, Secure(aggregation=True, neighbours=4)], ids=["all", "two", "four"])
@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedavgm", "fedadam"])
def test_the_mean_is_that_of_plain_updates(tmp_path: Path, name: str, secure: Secure) -> None:
    method = create(name, {"epochs": 1, "batch_size": 4})
    plain, _ = trained(tmp_path / "plain", OFF, method=method)
    found, line = trained(tmp_path / "masked", secure, method=method)
    assert line["left_out"] == []
    close(found, plain)
    assert not P.equal(found, plain), "or nothing was rounded"


def test_a_second_round_begins_where_the_first_ended(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", OFF, rounds=3, fraction=0.6)
    found, _ = trained(tmp_path / "masked", rounds=3, fraction=0.6)
    again, _ = trained(tmp_path / "again", rounds=3, fraction=0.6)
    close(found, plain)
    assert P.equal(found, again), "masks are new, and leave nothing in the sum"


@pytest.mark.parametrize("secure", [ON, FEW], ids=["all", "two"])
@pytest.mark.parametrize("ask", ["keys", "shares", "train"])
def test_a_round_without_a_client_is_that_of_the_others(tmp_path: Path, ask: str, secure: Secure) -> None:
    plain, _ = trained(tmp_path / "plain", OFF, lost={"train": [2]})
    found, line = trained(tmp_path / "masked", secure, lost={ask: [2]})
    close(found, plain)
    assert line["left_out"] == [{"client": 2, "why": "no answer"}]


def test_any_process_of_a_client_may_answer_its_next_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = trained(tmp_path / "kept", lost={"train": [2]})
    answer = Masker.answer

    def forgetful(masker: Masker, task: M.SecureTask, received: dict[int, Params]) -> list[Params]:
        """What it knows is on disk alone."""
        said = answer(masker, task, received)
        masker.close()
        vars(masker).pop("_store")
        return said

    monkeypatch.setattr(Masker, "answer", forgetful)
    found, _ = trained(tmp_path / "forgotten", lost={"train": [2]})
    assert P.equal(kept, found)


def test_a_round_of_two_clients_is_refused(tmp_path: Path) -> None:
    plan = Plan(1, 0.4, SEED, secure=ON)
    refused = pytest.raises(UserError, match=r"^secure.aggregation = true needs 3 clients in a round, and 2 take part$")
    with federation(tmp_path) as (clients, method, init), refused:
        run(method, linear(), init, clients, plan, Memory())


def test_clients_may_be_lost_at_every_step_of_a_round(tmp_path: Path) -> None:
    sizes, lost = (*SIZES, *SIZES, 4, 6), {"keys": [1], "shares": [4], "train": [6, 7], "unmask": [0]}
    plain, _ = trained(tmp_path / "plain", OFF, lost={"train": [1, 4, 6, 7]}, sizes=sizes)
    found, line = trained(tmp_path / "masked", lost=lost, sizes=sizes)
    close(found, plain)
    assert [row["client"] for row in line["left_out"]] == [1, 4, 6, 7]
    assert line["bytes"]["clients"] == 8, "the update of a client that is lost in the end is in the sum"


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        ("keys", "2 of 5 clients made keys, and secure.threshold = 0.6 needs 3"),
        ("shares", "2 of 5 clients shared their secrets, and secure.threshold = 0.6 needs 3"),
        ("train", "2 of 5 clients answered, and secure.threshold = 0.6 needs 3"),
        ("unmask", "2 shares of client 0 came, and secure.threshold = 0.6 needs 3"),
    ],
)
def test_a_round_with_too_few_clients_changes_nothing(tmp_path: Path, ask: str, why: str) -> None:
    with federation(tmp_path / "begun") as (_, method, init):
        before = method.shared(init)
    state, line = trained(tmp_path / "masked", lost={ask: [0, 2, 4]} if ask != "unmask" else {ask: [2, 3, 4]})
    assert P.equal(state, before)
    assert {row["why"] for row in line["left_out"]} <= {why, "no answer"}
    assert [row["why"] for row in line["left_out"]].count(why) == (5 if ask == "unmask" else 2)
    assert line["bytes"]["clients"] == 0


def test_a_value_beyond_the_range_leaves_its_client_out_and_says_why(tmp_path: Path) -> None:
    _, line = trained(tmp_path, Secure(aggregation=True, range=0.5))
    assert len(line["left_out"]) == len(SIZES)
    assert line["left_out"][0]["why"].startswith("secure.range = 0.5: body.weight has a value of ")


def test_what_goes_up_is_random_and_neither_update_nor_loss(tmp_path: Path) -> None:
    plan = Plan(99, 1.0, SEED, eval_every=99, after_local="none", secure=ON)
    with federation(tmp_path, ON, sizes=(40, 40, 40)) as (clients, method, init):
        state = method.shared(init)
        for _ in range(2):  # a round that is trained again
            _, line, _ = step(method, init, clients, plan, state, 1)
    assert line["train_loss"] is None
    first, second = (split_update(reply.tensors)[0] for reply in clients.said["train"] if reply.client == 1)
    for name, p in first.items():
        assert p.dtype == torch.int32
        assert (p == second[name]).float().mean() < 0.1, "the same update has other masks"
    flat = torch.cat([p.flatten() for p in first.values()]).double()
    assert abs(flat.mean()) < 2**31 / 8  # uniform over all of 2^32
    assert abs(flat.std() / 2**32 * 12**0.5 - 1) < 0.1


def test_noise_is_added_before_the_masks(tmp_path: Path) -> None:
    def one(path: Path, secure: Secure) -> State:
        plan = Plan(99, 1.0, SEED, eval_every=99, after_local="none", secure=secure)
        with federation(path, secure) as (clients, method, init):
            (host,) = clients._all
            host.privacy, host.noise_seed = Privacy(clip=0.1, noise=1.0), 7  # type: ignore[attr-defined]
            return step(method, init, clients, plan, method.shared(init), 1)[0]

    plain, _ = trained(tmp_path / "without", OFF)
    noised = one(tmp_path / "plain", OFF)
    close(one(tmp_path / "masked", ON), noised)
    assert P.sqdist(plain, noised) > 0.01


def test_clients_add_the_noise_of_one_together(tmp_path: Path) -> None:
    """Deviation of the mean: that of the largest client's noise alone, times its weight; more if more clients answer
    than the threshold needs, here three of four."""
    secure, sizes, private = Secure(aggregation=True, threshold=0.7), (10, 40, 20, 30), Privacy(clip=0.1, noise=2.0)
    for lost, answers in (([], 4), ([2], 3)):
        noise = []
        plan = Plan(99, 1.0, SEED, eval_every=99, after_local="none", secure=secure)
        settings = {"secure": secure, "sizes": sizes, "lost": {"train": lost}}
        with federation(tmp_path / str(answers), **settings) as (clients, method, init):
            (host,) = clients._all
            state = method.shared(init)
            for seed in range(12):
                host.noise_seed = seed  # type: ignore[attr-defined]
                made = []
                for each in (private.model_copy(update={"together": True}), private.model_copy(update={"noise": 0.0})):
                    host.privacy = each  # type: ignore[attr-defined]
                    made.append(step(method, init, clients, plan, state, 1)[0])
                noise += [(made[0][name] - p).flatten() for name, p in made[1].items()]
        alone = 2.0 * 0.1 * 40 / (100 - sum(sizes[client] for client in lost))
        assert torch.cat(noise).std() == pytest.approx(alone * (answers / 3) ** 0.5, rel=0.15)


@pytest.mark.parametrize("changed", ["model", "total"])
def test_a_server_that_tells_clients_different_things_learns_nothing(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then masks do not cancel: what is left of the sum is random, over the whole range."""
    plan = Plan(99, 1.0, SEED, eval_every=99, after_local="none", secure=ON)
    with federation(tmp_path, sizes=(40,) * 4) as (clients, method, init):
        state, exchange = method.shared(init), type(clients).exchange

        def lie(self: Any, task: M.Task, sent: dict[int, Params], order: list[int]) -> Any:
            for client in order:
                given, said = sent[client], task
                if isinstance(task, M.Train) and client == 1:
                    assert task.masks
                    if changed == "model":
                        given = {name: p + 1e-6 for name, p in given.items()}
                    else:
                        said = task.model_copy(update={"masks": M.Masks(clients=[0, 1, 2, 3], total=161, largest=40)})
                yield from exchange(self, said, {client: given}, [client])

        monkeypatch.setattr(type(clients), "exchange", lie)
        made, line, _ = step(method, init, clients, plan, state, 1)
    assert line["left_out"] == []
    flat = torch.cat([p.flatten() for p in made.values()])
    assert flat.abs().mean() > 20, "a uniform number within +-128 has a mean size of 64"


def test_neighbours_are_mutual_and_others_in_each_round() -> None:
    clients = [3, 5, 8, 9, 12, 20, 31]
    for count in (2, 4, 0, 6, 8):
        order = ring(clients, 0, 1)
        beside = {client: neighbours(order, client, count) for client in clients}
        assert {len(found) for found in beside.values()} == {count if 0 < count < 6 else 6}
        assert all(client in beside[other] for client in clients for other in beside[client])
    assert {tuple(ring(clients, 0, round)) for round in range(1, 6)} != {tuple(ring(clients, 0, 1))}
