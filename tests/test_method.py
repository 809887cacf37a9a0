"""The contract's own example, and its roles."""

import doctest
from pathlib import Path
from typing import ClassVar

import torch

from promptfed import method
from promptfed.method import FedAvg
from promptfed.training import train
from promptfed.tuning import FROZEN, Full
from tiny import BODY, HEAD, SEED, toy_host


def test_the_toy_in_the_contracts_docstring_runs() -> None:
    example = doctest.DocTestFinder(recurse=False).find(method.Method, "Method", globs={})[0]
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


class FixedBody(Full):
    roles: ClassVar[dict[str, str]] = {"body.": FROZEN, "head.": "head"}


def test_a_frozen_role_is_neither_trained_nor_sent_nor_kept(tmp_path: Path) -> None:
    host = toy_host(FedAvg(tuning=FixedBody(), epochs=1), tmp_path)
    rule, init = host.method, host.init
    assert rule.roles() == ("head",)
    assert set(rule.shared(init)) == set(HEAD)
    assert not rule.kept(init)
    assert not rule.personal
    state = rule.begin(host.model, init, SEED)
    assert set(state) == set(HEAD)
    start = host.work(0, rule.down(state, 0), 1)
    done = train(rule, host.model, [start], rule.schedule(1), SEED, 1)[0].params
    assert all(torch.equal(done[name], init[name]) for name in BODY)
    assert not any(torch.equal(done[name], init[name]) for name in HEAD)
