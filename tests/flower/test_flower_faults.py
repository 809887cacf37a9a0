"""Nodes that fail, fall silent or answer what cannot be used are left out, with a reason."""

import math
import pickle
import time

import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import FEW, case_of, go, looped

from limits import HANG
from promptfed import UserError
from promptfed.clients.wire import pack, unpack
from promptfed.testing import SIZES, begun, equal


class Edited:
    """A host, some of whose answers are replaced."""

    def __init__(self, host, edit):
        self._host, self._edit = host, edit

    def __getattr__(self, name):
        return getattr(self._host, name)

    def __call__(self, note, blobs):
        return self._edit(note, lambda: self._host(note, blobs))


def test_a_client_that_fails_is_recorded_and_the_run_goes_on(tmp_path):
    def edit(note, said):
        if note["ask"] == "train" and note["clients"] == [1] and note["round"] == 1:
            raise ValueError("a secret of the site")
        if note["ask"] == "train" and note["clients"] == [2]:
            raise UserError("the disk of this site is full")
        return said()

    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, grid):
        lines = go(case, clients).lines
    why = [{entry["client"]: entry["why"] for entry in line["left_out"]} for line in lines]
    assert why[0][1].startswith("ValueError in test_flower_faults.py, line")
    assert why == [{1: why[0][1], 2: "the disk of this site is full"}, {2: "the disk of this site is full"}]
    assert not any(b"a secret of the site" in said for said in grid.said)
    assert all(len(line["aggregated"]["clients"]) == len(SIZES) for line in lines)


def test_a_client_that_does_not_answer_in_time_is_left_out(tmp_path):
    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", timeout=0.3) as (clients, grid):
        state = begun(case)
        grid.silent.add(3)
        begun_at = time.monotonic()
        updates, _ = clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
        assert 0.25 < time.monotonic() - begun_at < HANG
        assert [u.client for u in updates] == [0, 1, 2, 4]
        assert clients.send_second({3: state}, 1) == {}
        assert [s.client for s in clients.evaluate({3: state, 4: state}, 1, False, False)] == [4]
        with pytest.raises(UserError, match="client 3 cannot be enrolled: no answer"):
            clients.enroll([2, 3])


def test_in_a_simulation_it_is_an_error_if_everybody_fails(tmp_path):
    def edit(note, said):
        raise ZeroDivisionError

    case = case_of("fedavg", tmp_path)
    with (
        looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit), strict=True) as (clients, _),
        pytest.raises(UserError, match="every client failed; the first with: ZeroDivisionError in test_flower"),
    ):
        clients.train(dict.fromkeys(range(5), begun(case)), 1, score=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "client": 4}]}, blobs), "it answers for client 4"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "n": "many"}]}, blobs), "valid integer"),
        (lambda note, blobs: ({"clients": []}, blobs), "malformed message"),
        (lambda note, blobs: (note, []), "0 blobs in place of 1"),
        (lambda note, blobs: (note, [blobs[0][:-4]]), "do not fill it"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "loss": 1e308}]}, blobs), "non-finite update"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "moved": {"x": math.inf}}]}, blobs), "non-finite"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "error": "a\x1b[31m\nb"}]}, blobs), "a?[31m b"),
        (lambda note, blobs: (note, [pickle.dumps({"up/head.bias": 1})]), "malformed blob"),
        (lambda note, blobs: (note, [pack({"up/head.bias": torch.zeros(9)})]), "other names or shapes"),
        (lambda note, blobs: (note, [changed(blobs[0], lambda p: p.double())]), "other types"),
        (lambda note, blobs: (note, [changed(blobs[0], lambda p: p * float("nan"))]), "non-finite update"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_with_its_reason(change, why, tmp_path):
    def edit(note, said):
        return change(*said()) if note["ask"] == "train" and note["clients"] == [0] else said()

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


def changed(blob, how):
    return pack({name: how(p) for name, p in unpack(blob)[0].items()})


def test_what_is_said_to_be_nothing_is_not_said(tmp_path):
    def edit(note, said):
        answer, blobs = said()
        if note["ask"] in ("train", "evaluate"):
            nothing = {"after_local": None} if note["ask"] == "train" else {"groups": None, "global": None}
            answer["clients"][0] |= nothing
        return answer, blobs

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert not line["left_out"]
    assert len(line["aggregated"]["clients"]) == 5


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("dp2fl", lambda stats: {}, "losses on other validation sets"),
        ("dp2fl", lambda stats: {**stats, "stats/total": torch.tensor([-3.0])}, "losses that are none"),
        ("dp2fl", lambda stats: {**stats, "stats/total": torch.ones(3)}, "losses that are none"),
        ("sgpt", lambda stats: {"stats/selected": torch.ones(2)}, "expected counts for 3 groups"),
        ("sgpt", lambda stats: {"stats/selected": -torch.ones(3)}, "expected counts for 3 groups"),
    ],
)
def test_stats_that_cannot_be_aggregated_are_refused(name, change, why, tmp_path):
    def edit(note, said):
        answer, blobs = said()
        if note["ask"] == "train" and note["clients"] == [0]:
            params = unpack(blobs[0])[0]
            up = {key: p for key, p in params.items() if key.startswith("up/")}
            blobs = [pack({**up, **change({key: p for key, p in params.items() if key not in up})})]
        return answer, blobs

    case = case_of(name, tmp_path, FEW)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


def test_scores_of_other_classes_are_refused(tmp_path):
    def edit(note, said):
        answer = said()
        if note["ask"] == "evaluate" and note["clients"] == [0]:
            answer[0]["clients"][0]["test"]["tp"].append(1)
        return answer

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        found = clients.evaluate(dict.fromkeys(range(5), begun(case)), 1, False, False)
    assert [s.client for s in found] == [1, 2, 3, 4]


def test_what_a_node_has_lost_is_sent_again(tmp_path):
    case = case_of("dp2fl", tmp_path, FEW)
    with looped(case, tmp_path / "clients") as (clients, _):
        state = begun(case)
        down = {client: case.method.down(state, client) for client in clients.ids()}
        first, _ = clients.train(down, 1, score=False)
        for file in (tmp_path / "clients" / "once").iterdir():
            file.unlink()
        lost, _ = clients.train(down, 1, score=False)
        assert any(u.error.startswith("FileNotFoundError") for u in lost)
        again, _ = clients.train(down, 1, score=False)
        assert not any(u.error for u in again)
        assert all(equal(a.up, b.up) for a, b in zip(first, again, strict=True))
