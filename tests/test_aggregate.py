"""An aggregate that forgets a part of the state is refused, in a run and by the conformance suite."""

import pytest
import torch

import promptfed
from promptfed import UserError
from promptfed.method import FedAvg
from promptfed.runs import api
from promptfed.testing import check_method

TINY = {"dataset": "digits", "dataset.limit": 60, "partition": "iid", "partition.clients": 2, "backbone": "cnn-code"}


class Empty(FedAvg):
    def aggregate(self, state, updates):
        return {}


class Forgetful(FedAvg):
    def aggregate(self, state, updates):
        return {name: p for name, p in super().aggregate(state, updates).items() if not name.endswith("bias")}


class Reshaped(FedAvg):
    def aggregate(self, state, updates):
        return {name: torch.atleast_2d(p) for name, p in super().aggregate(state, updates).items()}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Empty, r"^Empty\.aggregate\(\) must return all of the state, and '[\w.]+' is missing: \{\*\*state, \.\.\.\}"),
        (Forgetful, r"^Forgetful\.aggregate\(\) must return all of the state, and '[\w.]+bias' is missing"),
        (Reshaped, r"^Reshaped\.aggregate\(\) must .* is of shape \(1, (\d+)\), not \(\1,\)$"),
    ],
)
def test_what_is_lost_is_named(method, words, tmp_path):
    with pytest.raises(UserError, match=words):
        promptfed.run(method=method, rounds=1, out=tmp_path / "run", progress=False, engine={"workers": 1}, **TINY)
    with pytest.raises(AssertionError, match=words):
        check_method(api.class_name(method))
