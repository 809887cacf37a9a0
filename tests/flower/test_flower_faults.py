"""Nodes that fail, fall silent or answer what cannot be used are left out, with a reason."""

import errno
import json
import math
import pickle
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import FEW, case_of, go, looped

from limits import HANG
from promptfed import UserError
from promptfed.clients.messages import Evaluate, Train
from promptfed.clients.wire import pack, unpack
from promptfed.testing import SIZES, begun, equal


class Edited:
    """A host, some of whose answers are replaced."""

    def __init__(self, host, edit):
        self._host, self._edit = host, edit

    def __getattr__(self, name):
        return getattr(self._host, name)

    def __call__(self, request, blobs):
        return self._edit(request, lambda: self._host(request, blobs))


def trains(request, client):
    return isinstance(request.task, Train) and request.clients[0].client == client


def test_a_client_that_fails_is_recorded_and_the_run_goes_on(tmp_path):
    def edit(request, said):
        if trains(request, 1) and request.task.round == 1:
            raise ValueError("a secret of the site")
        if trains(request, 2):
            raise UserError("the images of this site are gone")
        if trains(request, 3) and request.task.round == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "/home/someone/site")
        return said()

    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, grid):
        lines = go(case, clients).lines
    why = [{entry["client"]: entry["why"] for entry in line["left_out"]} for line in lines]
    assert why[0][1].startswith("ValueError in test_flower_faults.py, line")
    gone, full = "the images of this site are gone", "no space is left at the site; the node's log says more"
    assert why == [{1: why[0][1], 2: gone, 3: full}, {2: gone}]
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
        assert [s.client for s in evaluated(clients, {3: state, 4: state})] == [4]
        with pytest.raises(UserError, match="client 3 cannot be enrolled: no answer"):
            clients.enroll([2, 3])


def test_in_a_simulation_it_is_an_error_if_everybody_fails(tmp_path):
    def edit(request, said):
        raise ZeroDivisionError

    case = case_of("fedavg", tmp_path)
    with (
        looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit), strict=True) as (clients, _),
        pytest.raises(UserError, match="every client failed; the first with: ZeroDivisionError in test_flower"),
    ):
        clients.train(dict.fromkeys(range(5), begun(case)), 1, score=False)


def evaluated(clients, sent):
    return clients.evaluate(sent, as_of=2, pooled=False, after_local=False)


def result(**changes):
    return lambda said: replace(said, results=[said.results[0].model_copy(update=changes)])


def blobs(change):
    return lambda said: replace(said, blobs=change(said.blobs[0]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (result(client=4), "it answers for client 4"),
        (result(loss=1e308), "non-finite update"),
        (result(n=1 << 53, loss=0.0), "9007199254740992 training samples, and was introduced with "),
        (result(moved={"x": math.inf}), "non-finite"),
        (result(error="a\x1b[31m\nb"), "a?[31m b"),
        (blobs(lambda blob: []), "0 blobs in place of 1"),
        (blobs(lambda blob: [blob[:-4]]), "file not fully covered"),
        (blobs(lambda blob: [pickle.dumps({"up/head.bias": 1})]), "malformed blob"),
        (blobs(lambda blob: [pack({"up/head.bias": torch.zeros(9)})]), "names or shapes differ"),
        (blobs(lambda blob: [changed(blob, lambda p: p.double())]), "other types"),
        (blobs(lambda blob: [changed(blob, lambda p: p * float("nan"))]), "non-finite update"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_with_its_reason(change, why, tmp_path):
    def edit(request, said):
        return change(said()) if trains(request, 0) else said()

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


@contextmanager
def rewritten(case, folder, change):
    """Nodes whose answers to train and evaluate have another head: change(client, head)."""
    with looped(case, folder) as (clients, grid):
        app = grid.app

        def answer(message, context):
            reply = app(message, context)
            if message.metadata.message_type in ("train.round", "evaluate.round"):
                head = json.loads(reply.content["promptfed"]["json"])
                reply.content["promptfed"]["json"] = json.dumps(change(context.node_config["partition-id"], head))
            return reply

        grid.app = answer
        yield clients


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"result": {"client": 0, "n": "many", "passes": 0}}, "valid integer"),
        ({"result": {"client": 0, "n": 1, "passes": 0, "more": 1}}, "not permitted"),
        ({"result": None}, "either a result or an error"),
        ({"error": "also"}, "either a result or an error"),
    ],
)
def test_an_answer_that_does_not_fit_the_schema_is_refused(changes, why, tmp_path):
    case = case_of("fedavg", tmp_path)
    change = lambda client, head: head if client or "scores" in head["result"] else {**head, **changes}  # noqa: E731
    with rewritten(case, tmp_path / "clients", change) as clients:
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


def changed(blob, how):
    return pack({name: how(p) for name, p in unpack(blob)[0].items()})


def test_what_is_said_to_be_nothing_is_not_said(tmp_path):
    def change(client, head):
        nothing = {"groups": None} if "scores" in head["result"] else {"after_local": None}
        return {**head, "result": {**head["result"], **nothing}}

    case = case_of("fedavg", tmp_path)
    with rewritten(case, tmp_path / "clients", change) as clients:
        line = go(case, clients, rounds=1).lines[0]
    assert not line["left_out"]
    assert len(line["aggregated"]["clients"]) == 5


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("dp2fl", lambda stats: {}, "no losses on some of the validation sets"),
        (
            "dp2fl",
            lambda stats: {**stats, "stats/total": torch.tensor([-3.0])},
            "losses must be single non-negative numbers",
        ),
        ("dp2fl", lambda stats: {**stats, "stats/total": torch.ones(3)}, "losses must be single non-negative numbers"),
        ("sgpt", lambda stats: {"stats/selected": torch.ones(2)}, "expected counts for 3 groups"),
        ("sgpt", lambda stats: {"stats/selected": -torch.ones(3)}, "expected counts for 3 groups"),
    ],
)
def test_stats_that_cannot_be_aggregated_are_refused(name, change, why, tmp_path):
    def edit(request, said):
        answer = said()
        if not trains(request, 0):
            return answer
        params = unpack(answer.blobs[0])[0]
        up = {key: p for key, p in params.items() if key.startswith("up/")}
        return replace(answer, blobs=[pack({**up, **change({key: p for key, p in params.items() if key not in up})})])

    case = case_of(name, tmp_path, FEW)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


def test_scores_of_other_classes_are_refused(tmp_path):
    def edit(request, said):
        answer = said()
        if isinstance(request.task, Evaluate) and request.clients[0].client == 0:
            answer.results[0].scores.test.tp.append(1)
        return answer

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        found = evaluated(clients, dict.fromkeys(range(5), begun(case)))
    assert [s.client for s in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: scores["test"]["tp"].__setitem__(0, scores["test"]["n"] + 1),
        lambda scores: scores["test"].update(n=scores["test"]["n"] + 1),
        lambda scores: scores["test"].update(loss=-1.0),
        lambda scores: scores["val"]["fn"].__setitem__(0, scores["val"]["fn"][0] + 1),
    ],
)
def test_scores_that_no_model_can_have_are_refused(change, tmp_path):
    def edit(client, head):
        if client == 0:
            change(head["result"]["scores"])
        return head

    case = case_of("fedavg", tmp_path)
    with rewritten(case, tmp_path / "clients", edit) as clients:
        found = evaluated(clients, dict.fromkeys(range(5), begun(case)))
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
        assert any("is damaged" in u.error for u in lost)
        again, _ = clients.train(down, 1, score=False)
        assert not any(u.error for u in again)
        assert all(equal(a.up, b.up) for a, b in zip(first, again, strict=True))
