"""How far classes lie apart in features."""

from contextlib import closing

import numpy as np
import pytest
import torch
from analysed import differences, made, read

from promptfed import UserError
from promptfed.analysis import Options, make
from promptfed.analysis.opened import Opened
from promptfed.analysis.variation import within_and_between


def test_within_and_between_by_hand() -> None:
    features = np.array([[0.0, 0.0], [2.0, 0.0], [10.0, 4.0]])
    within, between = within_and_between(features, np.array([0, 0, 1]))
    assert within == 0.5  # 1 in the first class, 0 in the second
    assert between == (4.5**2 + 2**2)


def test_a_clients_classes_are_drawn(finished, tmp_path):
    rows = made(finished("pfedpt"), "variation", tmp_path, Options((1,)))
    assert {row["client"] for row in rows} == {"1"}
    assert len({row["label"] for row in rows}) > 1
    with pytest.raises(UserError, match="--client = 9 must be 0 to 3"):
        make(finished("pfedpt"), ["variation"], tmp_path, Options((9,)))


def test_the_ratio_of_all_clients_with_and_without_the_prompt(finished, tmp_path):
    folder = finished("pfedpt")
    made(folder, "variation", tmp_path, Options(everyone=True))
    rows = read(tmp_path / "variation-clients.csv")
    assert len(rows) > 1
    with closing(Opened(folder)) as opened:
        client = int(rows[-1]["client"])
        test = opened.federation.sites[client].test
        work, params = opened.own(client)
        bare = {name: torch.zeros_like(p) if name.startswith("prompt.") else p for name, p in params.items()}
        for column, weights in (("ratio", params), ("ratio_without_prompt", bare)):
            features = opened.features(work, weights, opened.host.samples(test))
            within, between = within_and_between(features, opened.federation.dataset.labels[test])
            assert float(rows[-1][column]) == pytest.approx(between / within, rel=1e-4)
    apart = [np.log(float(row["ratio"]) / float(row["ratio_without_prompt"])) for row in rows]
    assert differences(tmp_path / "variation.json") == pytest.approx([np.mean(apart)], abs=0.006)


def test_the_ratio_of_a_method_without_prompts_has_no_difference(finished, tmp_path):
    made(finished("fedavg"), "variation", tmp_path, Options(everyone=True))
    assert "ratio_without_prompt" not in read(tmp_path / "variation-clients.csv")[0]
    assert differences(tmp_path / "variation.json") == []
