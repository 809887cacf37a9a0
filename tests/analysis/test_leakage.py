"""What an upload tells of a client's labels, against what the run's own engine uploads."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from analysed import columns, cos, differences, made

from promptfed.analysis.labels import inferred
from promptfed.analysis.opened import Opened
from promptfed.clients.wire import unpack
from promptfed.runs import build
from promptfed.runs import config as C

KEYS = ("upload", "uniform", "complete")


def uploads(folder: Path, out: Path) -> dict[int, dict[str, torch.Tensor]]:
    """What clients send in the round after the last, by the run's own engine on a copy."""
    shutil.copytree(folder, out)
    parts = build.assemble(C.make(C.read(out / "config.toml")), partition=out / "partition.json")
    state, note = unpack((out / "checkpoint.safetensors").read_bytes())
    clients = build.clients(parts, out)
    sent = {client: parts.method.down(state, client) for client in clients.ids()}
    updates, _ = clients.train(sent, note["round"] + 1, score=False)
    clients.close()
    return {update.client: update.up for update in updates}


@pytest.mark.parametrize("name", ["pfedpt", "fedavg"])
def test_leakage_is_that_of_what_is_uploaded(finished, tmp_path, name):
    rows = made(finished(name), "leakage", tmp_path / "out")
    sent = uploads(finished(name), tmp_path / "copy")
    opened = Opened(finished(name))
    data = opened.federation.dataset
    index = np.sort(np.concatenate([site.test for site in opened.federation.sites]))
    x = opened.samples(data.images[index]).images(slice(None))
    counts = opened.federation.label_counts("train")
    for row in rows:
        client = int(row["client"])
        with torch.no_grad():
            up = sent[client]
            said = opened.model.classify(up, opened.model.features(up, x)).softmax(1).numpy()
        guess = np.mean([said[data.labels[index] == c].mean(0) for c in np.unique(data.labels[index])], axis=0)
        np.testing.assert_allclose(columns(row, "upload"), guess, atol=1e-5)
        assert float(row["similarity_upload"]) == pytest.approx(cos(guess, counts[client]), abs=1e-5)
        assert float(row["similarity_uniform"]) == pytest.approx(cos(np.ones(10), counts[client]), abs=1e-6)
        same = row["similarity_complete"] == row["similarity_upload"]
        assert same is (name == "fedavg")  # which has nothing private
    opened.close()
    seen, blind, whole = (np.array([float(row[f"similarity_{key}"]) for row in rows]) for key in KEYS)
    means = [(blind - seen).mean(), (whole - seen).mean()]
    told = differences(tmp_path / "out" / "leakage.json")
    assert told == pytest.approx(means if name == "pfedpt" else means[:1], abs=0.006)


def test_every_class_counts_alike():
    said = np.array([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    np.testing.assert_allclose(inferred(said, np.array([3, 3, 3, 7])), [0.5, 0.5])
