"""Analyses of what is on record, which need no model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from analysed import made

from promptfed import UserError
from promptfed.analysis import Options
from promptfed.analysis import recorded as analyses
from promptfed.analysis.opened import Opened


def recorded(folder: Path, out: Path) -> Path:
    """A copy of a run without models, with how far its clients moved."""
    for name in ("config.toml", "partition.json", "result.json"):
        shutil.copy(folder / name, out / name)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    moved = [
        [{"client": 0, "roles": {"private": 1.0, "body": 0.5}}, {"client": 2, "roles": {"private": 3.0, "body": 0.5}}],
        [{"client": 1, "roles": {"private": 0.5, "body": 0.25}}],
    ]
    for line, values in zip(lines, moved, strict=True):
        line["moved"] = values
    (out / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def test_drift_is_what_rounds_say(finished, tmp_path):
    folder = recorded(finished("pfedpt"), tmp_path)
    rows = made(folder, "drift", tmp_path / "analysis")
    assert list(rows[0]) == ["round", "client", "role", "moved"]
    private = [(row["round"], row["client"], float(row["moved"])) for row in rows if row["role"] == "private"]
    assert private == [("1", "0", 1.0), ("1", "2", 3.0), ("2", "1", 0.5)]
    text = json.loads((tmp_path / "analysis" / "drift.json").read_text())["text"]
    assert "private 2 in round 1, 0.5 in round 2" in text  # means
    assert len(made(folder, "drift", tmp_path / "analysis", Options((2,)))) == 2


def test_clients_of_all_stages(finished, tmp_path):
    rows = made(finished("pfedpt"), "clients", tmp_path)
    result = json.loads((finished("pfedpt") / "result.json").read_text())["clients"]
    assert {row["stage"] for row in rows} == {"aggregated", "after_local", "after_local_all"} == set(result)
    for stage, clients in result.items():
        own = [float(row["accuracy"]) for row in rows if row["stage"] == stage]
        assert own == [one["accuracy"] for one in clients]


def test_bars_of_clients_go_to_a_hundred_per_cent(finished):
    chart = analyses.clients(Opened(finished("pfedpt")), Options()).picture
    assert chart.to_dict()["layer"][0]["encoding"]["y"]["scale"] == {"domain": [0, 100]}


def test_a_client_that_does_not_exist_is_named(finished):
    with pytest.raises(UserError, match=r"^--client = 4 must be 0 to 3$"):
        analyses.clients(Opened(finished("pfedpt")), Options((4,)))


def test_partition(finished, tmp_path):
    rows = made(finished("pfedpt"), "partition", tmp_path)
    opened = Opened(finished("pfedpt"))
    for split in ("train", "val", "test"):
        counts = np.array([int(row[split]) for row in rows]).reshape(4, 10)
        np.testing.assert_array_equal(counts, opened.federation.label_counts(split))
