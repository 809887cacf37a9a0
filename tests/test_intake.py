"""A round's updates, as they come: added up or held, the result is that of the whole list."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from promptfed import Update
from promptfed import params as P
from promptfed.errors import UserError
from promptfed.intake import Intake, Spool
from promptfed.method import FedAvg, Method, State
from promptfed.methods import create
from promptfed.params import Params

SHARED = {"body.w": torch.zeros(3, 5), "head.b": torch.zeros(7)}
SIZES = {2: 3, 5: 17, 6: 1, 9: 8}


def updates() -> list[Update]:
    g = torch.Generator().manual_seed(0)
    drawn = ({name: torch.randn(p.shape, generator=g) for name, p in SHARED.items()} for _ in SIZES)
    return [Update(client, SHARED, up, n) for (client, n), up in zip(SIZES.items(), drawn, strict=True)]


def aggregated(method: Method, state: State, came: list[Update]) -> tuple[State, list[Update]]:
    intake = Intake(method, state, SHARED, SIZES)
    kept = sorted((intake.take(update) for update in came), key=lambda u: u.client)
    used = [update for update in kept if not update.error]
    return intake.aggregate(used), used


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(p, b[name]) for name, p in a.items())


class Median(FedAvg):
    """Needs all updates at once."""

    def aggregate(self, state: State, updates: list[Update]) -> State:
        return {name: torch.stack([u.up[name] for u in updates]).median(0).values for name in state}


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam", "fedprox"])
def test_updates_added_up_in_any_order_are_bit_identical_to_the_list(name: str) -> None:
    method = create(name)
    state = {**SHARED, **P.nested("momentum", SHARED), **P.nested("second", SHARED)}
    listed = method.aggregate(state, updates())
    for came in permutations(updates()):
        made, kept = aggregated(method, state, list(came))
        assert same(made, listed)
        assert all(not update.up and not update.stats for update in kept), "they are not held"


def test_updates_that_come_in_order_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "hold", lambda spool, update: pytest.fail("held"))
    made, _ = aggregated(FedAvg(), SHARED, updates())
    assert same(made, FedAvg().aggregate(SHARED, updates()))


def test_a_method_with_an_aggregation_of_its_own_gets_the_whole_list() -> None:
    assert create("fedavg").streams
    assert not Median().streams
    assert not create("dp2fl", {"privacy": "sealed"}).streams, "its second message needs the updates"
    made, kept = aggregated(Median(), SHARED, updates()[::-1])
    assert same(made, Median().aggregate(SHARED, updates()))
    assert len(kept) == len(SIZES)


def test_updates_that_cannot_be_used_or_do_not_come_do_not_count() -> None:
    came = updates()
    came[1].up["head.b"][0] = float("nan")
    made, kept = aggregated(FedAvg(), SHARED, [came[3], came[1], came[0]])  # client 6 does not answer
    assert [update.client for update in kept] == [2, 9]
    listed = FedAvg().aggregate(SHARED, [came[0], came[3]])
    for name, p in made.items():
        torch.testing.assert_close(p, listed[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", [FedAvg(), Median(), create("sgpt"), create("dp2fl"), create("fedem")])
def test_stats_that_the_method_does_not_know_are_refused_by_name_and_not_held(method: Method) -> None:
    sent = replace(updates()[0], stats={"ballast\n": torch.zeros(9)})
    state = {**SHARED, "counts": torch.zeros(3)}
    kept = Intake(method, state, SHARED, SIZES).take(sent)
    assert kept.error == "unknown stats: 'ballast\\n'"
    assert not kept.stats


def test_held_updates_are_the_same_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path))
    sent = [replace(update, stats={"s": update.up["head.b"] + 1}) for update in updates()]
    sent.append(Update(11, {}, {"e": torch.zeros(0, 3)}, 1, stats={"i": torch.arange(3)}))
    first = P.nbytes(sent[0].up) + P.nbytes(sent[0].stats)
    spool = Spool(memory=first)
    held = [spool.hold(update) for update in sent]
    assert held[0] is sent[0]
    assert held[1].up is not sent[1].up
    for update, kept in zip(sent, held, strict=True):
        assert same(update.up, kept.up)
        assert same(update.stats, kept.stats)
        assert (update.client, update.n) == (kept.client, kept.n)
    assert not list(tmp_path.iterdir()), "nothing is left behind, whatever happens"


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r'^PROMPTFED_CACHE: the updates of a round cannot be held in ".*file" \('):
        Spool(memory=0).hold(updates()[0])


def test_memory_of_updates_that_were_added_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path))
    first, second = updates()[:2]
    spool = Spool(memory=P.nbytes(first.up) + P.nbytes(first.stats))
    assert spool.hold(first) is first
    assert spool.hold(second) is not second
    spool.release(first.client)
    assert spool.hold(second) is second
