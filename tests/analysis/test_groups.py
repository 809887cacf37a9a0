"""Which groups samples select, against the keys themselves, and over rounds."""

import json
import shutil

import numpy as np
import pytest
from analysed import made, read
from torch.nn import functional as F

from promptfed import UserError
from promptfed.analysis import Options, make
from promptfed.analysis.groups import assigned
from promptfed.analysis.opened import Opened

# ---- groups


def test_groups_of_a_run(finished, tmp_path):
    folder = finished("sgpt")
    rows = made(folder, "groups", tmp_path)
    opened = Opened(folder)
    data, keys = opened.federation.dataset, F.normalize(opened.state["keys"], dim=1)
    counts = np.zeros((5, len(data.domains)), int)
    for site in opened.federation.sites:
        x = opened.samples(data.images[site.test]).images(slice(None))
        query = opened.model.features(opened.model.weights, x)
        for group, domain in zip((query @ keys.T).argmax(1).tolist(), data.domain[site.test], strict=True):
            counts[group, domain] += 1
    assert [int(row["test_samples"]) for row in rows] == counts.ravel().tolist()
    text = json.loads((tmp_path / "groups.json").read_text())["text"]
    summary = json.loads((folder / "result.json").read_text())["metrics"]["aggregated"]["last"]
    assert f"Clustering accuracy against domains: {100 * summary['clustering']:.1f} %" in text
    stability = read(tmp_path / "groups-stability.csv")
    assert [row["client"] for row in stability] == [str(client) for client in range(8)]
    assert all(0 <= float(row["kept"]) <= 1 for row in stability)
    opened.close()


# ---- selection over rounds


def selecting(tmp_path, tables, of):
    """A folder with what clients selected, by round: tables[round][client]."""
    folder = shutil.copytree(of, tmp_path / "run")
    lines = [
        {"round": round, "aggregated": {"clients": [{"client": c, "groups": g} for c, g in chosen.items()]}}
        for round, chosen in tables.items()
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_selections_over_rounds(finished, tmp_path):
    tables = {2: {0: [4, 0, 6], 1: [3]}, 4: {0: [2, 8], 1: [0, 3]}, 6: {0: [2, 7, 1], 1: [0, 3]}}
    rows = made(selecting(tmp_path, tables, of=finished("sgpt")), "selection", tmp_path / "out")
    first = [(int(row["group"]), float(row["mean"]), float(row["std"])) for row in rows if row["client"] == "0"]
    assert first == [
        (0, pytest.approx(8 / 3), pytest.approx(np.sqrt(8 / 9))),
        (1, 5.0, pytest.approx(np.sqrt(38 / 3))),
        (2, pytest.approx(7 / 3), pytest.approx(np.sqrt(62 / 9))),
    ]
    changes = read(tmp_path / "out" / "selection-changes.csv")
    found = {(row["client"], row["round"]): float(row["changed_at_least"]) for row in changes}
    expected = {("0", "4"): 0.8, ("0", "6"): 0.1, ("1", "4"): 1.0, ("1", "6"): 0.0}
    assert found == pytest.approx(expected)  # 2 leave the first group and 6 the third; then one goes back
    assert [row["majority_group"] for row in changes] == ["1", "1", "1", "1"]
    text = json.loads((tmp_path / "out" / "selection.json").read_text())["text"]
    assert "at least 47.5 % of a client's test samples" in text
    assert "at the last one 5.0 %" in text
    assert "50 % of the clients have another group" in text


def test_selections_of_one_client_and_of_one_that_is_not_on_record(finished, tmp_path):
    folder = selecting(tmp_path, {1: {0: [4], 1: [3], 2: [1]}, 2: {0: [2, 2], 1: [3]}}, of=finished("sgpt"))
    rows = made(folder, "selection", tmp_path / "out", Options(clients=(1,)))
    assert {row["client"] for row in rows} == {"1"}
    with pytest.raises(UserError, match=r"--client = 2 must be one that was evaluated at least twice \(0, 1\)"):
        make(folder, ["selection"], tmp_path / "out", Options(clients=(2,)))


def test_what_is_recorded_of_selections_are_the_final_ones_of_the_run(finished, tmp_path):
    opened = Opened(finished("sgpt"))
    for one in opened.lines[-1]["aggregated"]["clients"]:
        groups = assigned(opened, *opened.own(one["client"]))
        assert one["groups"] == np.bincount(groups).tolist()
    opened.close()
