"""Where classes come apart in a transformer."""

import numpy as np
import pytest
import torch
from analysed import made, read

from promptfed import UserError
from promptfed.analysis import Options, make
from promptfed.analysis.layers import alike, class_tokens
from promptfed.analysis.opened import Opened
from promptfed.tuning import as_vit


def test_neighbours_by_hand() -> None:
    states = np.array([[0.0], [1.0], [1.5], [9.0]])
    assert (
        alike(states, np.array([0, 0, 1, 1])) == 0.5
    )  # 0 -> 1 and 3 -> 2 are of the same class, 1 -> 2 and 2 -> 1 not


def test_layers_of_a_run(finished, tmp_path):
    rows = made(finished("sgpt"), "layers", tmp_path, Options(images=10))
    every = read(tmp_path / "layers-all.csv")
    assert [int(row["layer"]) for row in every] == list(range(1, len(every) + 1))
    drawn = {int(row["layer"]) for row in rows}
    assert {1, len(every)} <= drawn
    assert len(rows) == 10 * len(drawn)
    assert all(0 <= float(row["nearest_of_same_class"]) <= 1 for row in every)


def test_the_last_state_is_what_the_head_reads(finished) -> None:
    opened = Opened(finished("sgpt"))
    images, model = opened.federation.dataset.images[:3], as_vit(opened.model)
    states = torch.from_numpy(class_tokens(opened, model, images)[-1])
    expected = model.features(model.weights, torch.from_numpy(np.array(images)) / 127.5 - 1)
    assert torch.allclose(model.norm(model.weights, states), expected, atol=1e-5)
    opened.close()


def test_a_cnn_has_none(finished, tmp_path):
    with pytest.raises(UserError, match='layers: backbone "cnn" is not a transformer'):
        make(finished("pfedpt"), ["layers"], tmp_path)
