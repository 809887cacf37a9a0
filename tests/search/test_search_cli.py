"""tune, choose and compare --tune as a user meets them: real processes, and a kill."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from limits import HANG
from promptfed.cli.main import main
from promptfed.runs import record

TINY = ["dataset.limit=90", "dataset.size=16", "partition=iid", "partition.clients=2", "method.epochs=1"]


@pytest.fixture
def promptfed(tmp_path_factory, tmp_path):
    env = {**os.environ, "PROMPTFED_CACHE": str(tmp_path_factory.getbasetemp() / "cache"), "COLUMNS": "200"}

    def start(*words):
        command = [sys.executable, "-m", "promptfed", *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)

    return start


def test_a_search_that_is_killed_goes_on_and_its_comparison_says_the_budget(promptfed, tmp_path):
    words = ["compare", "--methods", "head-tune", "--tune", 2, "--out", "out", "rounds=3", *TINY]
    first, until = promptfed(*words), time.monotonic() + HANG
    trial = tmp_path / "out" / "tuning" / "head-tune" / "trial-000"
    while not record.read_lines(trial) and time.monotonic() < until:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    lock = tmp_path / "out" / "tuning" / "study.journal.lock"  # Optuna's, if the kill came while it wrote
    lock.unlink(missing_ok=True)
    lock.symlink_to("out/tuning/study.journal")
    said, wrong = promptfed(*words).communicate(timeout=HANG)
    assert "tuned: 2 trials per row on validation data" in said, wrong
    assert "Tuned: 2 trials per row on validation data." in (tmp_path / "out" / "table.md").read_text()
    assert [line["round"] for line in record.read_lines(trial)] == [1, 2, 3]
    assert len(json.loads((tmp_path / "out" / "table.json").read_text())) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tune", "--methods", "local", "--space", "method.mu=0.1..1"], "--space: method.mu is not a setting of any"),
        (["compare", "--methods", "local", "--tune", 0], "--tune = 0 must be at least 1"),
        (["choose", "--minutes", 0], "--minutes = 0 must be greater than 0"),
    ],
)
def test_bad_input_is_one_sentence(monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["promptfed", *map(str, words), *TINY])
    with pytest.raises(SystemExit) as left:
        main()
    assert str(left.value.code).startswith(f"promptfed: {says}")  # Python prints it and exits with 1
    assert "\n" not in str(left.value.code)
    assert not list(tmp_path.iterdir())
