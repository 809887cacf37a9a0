"""How far classes lie apart in features."""

import numpy as np
import pytest
from analysed import made

from promptfed import UserError
from promptfed.analysis import Options, make
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
