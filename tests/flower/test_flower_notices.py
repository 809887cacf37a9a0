"""Flower's nodes are heard of as clients of this machine are, and those that fall silent too."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import FEW, case_of, looped

from promptfed.flower.server import told
from promptfed.runs.record import Folder, read_lines
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


def test_who_could_not_be_evaluated_and_why_is_on_record(tmp_path):
    case = case_of("fedavg", tmp_path, FEW)
    with looped(case, tmp_path / "clients", timeout=0.2) as (clients, grid):
        folder = Folder(tmp_path / "run")
        clients.watch(folder.on_notice)
        folder.begin(1, [0, 1, 2])
        grid.silent = {2}
        del grid.nodes[next(node for node, client in grid.nodes.items() if client == 1)]
        clients.evaluate(dict.fromkeys(range(3), begun(case)), as_of=2, pooled=False, after_local=False)
        line = {"round": 1, "clients": [0, 1, 2], "left_out": [], "train_loss": None, "seconds": {"train": 1.0}}
        folder.end(line, begun(case))
        folder.close()
    (line,) = read_lines(tmp_path / "run")
    absent = "no answer: its node is not connected"
    assert line["not_scored"] == [{"client": 1, "why": absent}, {"client": 2, "why": "no answer"}]
    assert f"client 1 is not evaluated: {absent}" in told(line)


def test_an_error_of_a_node_is_heard(tmp_path):
    case = case_of("fedavg", tmp_path, FEW, lr=1e30)
    heard = []
    with looped(case, tmp_path / "clients") as (clients, _):
        clients.watch(heard.append)
        updates, _ = clients.train({0: begun(case)}, 1, score=False)
    assert heard[-1].error == updates[0].error != ""
