"""Who helps whom, against what the next round does."""

import shutil

import numpy as np
import pytest
import torch
from analysed import made

import promptfed
from promptfed.analysis.helps import data_prompt, kind
from promptfed.analysis.opened import Opened


@pytest.mark.parametrize("name", ["dp2fl", "sealed"])
def test_weights_are_those_of_the_next_round(finished, tmp_path, name):
    rows = made(finished(name), "helps", tmp_path / "out")
    opened = Opened(finished(name))
    old = {client: data_prompt(opened.method, opened.work(client).params) for client in range(4)}
    new = {client: data_prompt(opened.method, opened.after_local(client)[1]) for client in range(4)}
    opened.close()
    shutil.copytree(finished(name), tmp_path / "copy")
    promptfed.run(out=tmp_path / "copy", resume=True, rounds=2)
    further = Opened(tmp_path / "copy")
    moved = False
    helped = {int(row["client"]) for row in rows}
    assert helped == {i for i, site in enumerate(further.federation.sites) if len(site.val)}
    for client in helped:
        prompt = old[client]
        weights = {int(row["helper"]): float(row["weight"]) for row in rows if int(row["client"]) == client}
        assert set(weights) == set(range(4)) > helped  # a client without validation data helps, too
        own = data_prompt(further.method, further.work(client).params)
        for key, p in prompt.items():
            expected = p + sum(weights[i] * (new[i][key] - p) for i in new)
            torch.testing.assert_close(own[key], expected, atol=1e-5, rtol=1e-4)
            moved |= not torch.equal(p, own[key])
    assert moved
    further.close()


def test_kinds_of_helpers():
    assert [kind(loss, 1.0, 1.2) for loss in (0.9, 1.0, 1.19, 1.2, np.inf)] == [
        "positive", "retained", "retained", "discarded", "discarded",
    ]  # fmt: skip
