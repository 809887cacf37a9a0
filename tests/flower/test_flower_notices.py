"""Flower's nodes are heard of as clients of this machine are, and those that fall silent too."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import FEW, case_of, looped

from promptfed.testing import begun


def test_nodes_are_heard_of_as_they_are_asked_and_answer_or_do_not(tmp_path):
    case = case_of("fedavg", tmp_path, FEW)
    heard = []
    with looped(case, tmp_path / "clients", timeout=0.2) as (clients, grid):
        clients.watch(heard.append)
        grid.silent = {2}
        clients.train(dict.fromkeys(range(3), begun(case)), 1, score=False)
    asked = {n.client: n.samples for n in heard if n.seconds is None}
    answered = {n.client: n.error for n in heard if n.seconds is not None}
    assert asked == dict(enumerate(FEW))
    assert answered == {0: "", 1: "", 2: "no answer"}
    assert {(n.ask, n.asked) for n in heard} == {("train", 3)}


def test_an_error_of_a_node_is_heard(tmp_path):
    case = case_of("fedavg", tmp_path, FEW, lr=1e30)
    heard = []
    with looped(case, tmp_path / "clients") as (clients, _):
        clients.watch(heard.append)
        updates, _ = clients.train({0: begun(case)}, 1, score=False)
    assert heard[-1].error == updates[0].error != ""
