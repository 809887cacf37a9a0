"""How far parameters move, which is on record and needs no model."""

import json
import shutil
from pathlib import Path

import pytest
from analysed import made

from promptfed.analysis import Options
from promptfed.analysis.drift import settling


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


def test_the_last_third_is_compared_with_the_second_client_by_client():
    moved = {1: (9.0, 9.0), 2: (9.0, 9.0), 3: (2.0, 3.0), 4: (4.0, 3.0), 5: (1.0, None), 6: (2.0, 2.5)}
    rows = [
        {"round": round, "client": client, "value": value}
        for round, values in moved.items()
        for client, value in enumerate(values)
        if value is not None
    ]
    (text,) = settling(rows)
    assert float(text.split()[0]) == pytest.approx(-1.0)  # of -1.5 and -0.5
    assert settling([{"round": 2, "client": 0, "value": 1.0}]) == []
