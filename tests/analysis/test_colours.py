"""What clients see in pure colours, against the models themselves."""

import numpy as np
import pytest
import torch
from analysed import columns, cos, differences, made

from promptfed import analysis
from promptfed.analysis import Options, labels
from promptfed.analysis.labels import pure
from promptfed.analysis.opened import Opened
from promptfed.clients.frozen import normalisation

KEYS = ("own", "others", "own_without_prompt")


def test_pure_colours():
    colours = pure(5, (3, 4, 6))
    assert colours.shape == (5, 3, 4, 6)
    assert (colours == colours[:, :, :1, :1]).all()
    assert len(np.unique(colours[:, :, 0, 0], axis=0)) == 5
    assert pure(3, (1, 2, 2))[:, 0, 0, 0].tolist() == [0, 128, 255]


def test_features_of_pure_colours(finished, tmp_path):
    rows = made(finished("pfedpt"), "colours-tsne", tmp_path, Options((0, 2, 3), 6))
    assert list(rows[0]) == ["client", "colour", "x", "y"]
    assert [row["client"] for row in rows] == ["0"] * 6 + ["2"] * 6 + ["3"] * 6
    assert all(np.isfinite([float(row["x"]), float(row["y"])]).all() for row in rows)


def test_a_cloud_of_mixed_clients_is_left_out_unless_it_is_named(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "ANALYSES", {"colours-tsne": analysis.ANALYSES["colours-tsne"]})
    for apart, drawn in ((-1.0, ["colours-tsne"]), (1.0, [])):  # no silhouette is below -1 or above 1
        monkeypatch.setattr(labels, "_APART", apart)
        made_ = analysis.make(finished("pfedpt"), out=tmp_path / str(apart), options=Options((0, 2), 4))
        assert (list(made_.files), list(made_.left_out)) == (drawn, ["colours-tsne"][len(drawn) :])


def test_similarity_of_predicted_classes_and_own_labels(finished, tmp_path):
    rows = made(finished("pfedpt"), "colours-labels", tmp_path, Options(images=7))
    opened = Opened(finished("pfedpt"))
    counts = opened.federation.label_counts("train")
    mean, std = normalisation(opened.model, opened.federation.dataset, torch.device("cpu"))
    x = (torch.from_numpy(pure(7, opened.model.image)).float() - mean) / std
    own = [columns(row, "labels") for row in rows]
    for client, row in enumerate(rows):
        np.testing.assert_allclose(own[client], counts[client] / counts[client].sum())
        _, params = opened.own(client)
        canvas = opened.method.tuning.canvas(opened.model, params, torch.zeros(2))
        said = opened.model.classify(params, opened.model.features(params, x + canvas)).softmax(1).mean(0).numpy()
        np.testing.assert_allclose(columns(row, "predicted"), said, atol=1e-6)
        others = [cos(said, own[j]) for j in range(4) if j != client]
        assert float(row["similarity_own"]) == pytest.approx(cos(said, own[client]), abs=1e-5)
        assert float(row["similarity_others"]) == pytest.approx(np.mean(others), abs=1e-5)
        bare = opened.model.classify(params, opened.model.features(params, x)).softmax(1).mean(0).numpy()
        assert float(row["similarity_own_without_prompt"]) == pytest.approx(cos(bare, own[client]), abs=1e-5)
    opened.close()
    ours, others, bare = (np.array([float(row[f"similarity_{key}"]) for row in rows]) for key in KEYS)
    assert differences(tmp_path / "colours-labels.json") == pytest.approx(
        [(ours - others).mean(), (bare - ours).mean()], abs=0.006
    )
