"""Following a run by its files."""

import fcntl
import io
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from test_progress import line

from limits import HANG
from promptfed import UserError, files
from promptfed.runs import config as C
from promptfed.runs.progress import Followed, watch
from promptfed.runs.record import Folder, at_work


def folder(path: Path, rounds: int = 4) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(C.dump(C.make({"rounds": rounds, "eval": {"every": 2}}).complete()))
    return path


def add(path: Path, *rounds: int) -> None:
    with (path / "rounds.jsonl").open("a") as file:
        file.writelines(json.dumps(line(round, 1.0, 1.0 if round % 2 == 0 else None)) + "\n" for round in rounds)


def said(path: Path) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    watch(path, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_are_read_as_they_come_and_half_a_line_waits(tmp_path: Path) -> None:
    run = Followed(folder(tmp_path))
    assert run.look() == []
    add(tmp_path, 1)
    assert ["round 1/4" in text for text in run.look()] == [True]
    whole = json.dumps(line(2, 1.0, 1.0)) + "\n"
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(whole[:30])
        file.flush()
        assert run.look() == []
        file.write(whole[30:])
    assert ["round 2/4" in text for text in run.look()] == [True]
    assert run.look() == []


def test_a_resumed_run_drops_a_line_and_no_round_is_told_twice(tmp_path: Path) -> None:
    run = Followed(folder(tmp_path))
    add(tmp_path, 1, 2, 3)
    assert len(run.look()) == 3
    new = tmp_path / "new"
    new.write_text("".join(json.dumps(line(round, 1.0)) + "\n" for round in (1, 2)))
    new.replace(tmp_path / "rounds.jsonl")
    folder(tmp_path, rounds=9)
    assert run.look() == []
    assert (run.status.done, run.status.rounds) == (2, 9)
    add(tmp_path, 3, 4)
    assert ["round 4/9" in text for text in run.look()] == [True]


def test_a_finished_run_and_a_stopped_one_are_told_apart(tmp_path: Path) -> None:
    add(folder(tmp_path), 1, 2)
    found = said(tmp_path)
    assert len(found) == 4
    assert found[2].startswith(f"stopped: {tmp_path.name} after round 2 of 4")
    assert found[3].strip() == f"promptfed run --resume --out {tmp_path}"
    (tmp_path / "result.json").write_text("{}")
    assert said(tmp_path)[2] == f"done: {tmp_path}"


def test_it_follows_until_the_run_lets_go_of_its_folder(tmp_path: Path) -> None:
    add(folder(tmp_path), 1)
    held = Folder(tmp_path)
    assert at_work(tmp_path)

    def finish() -> None:
        time.sleep(0.8)
        add(tmp_path, 2, 3, 4)
        (tmp_path / "result.json").write_text("{}")
        held.close()

    other = threading.Thread(target=finish)
    other.start()
    found = said(tmp_path)
    other.join()
    assert ["round 4/4" in text for text in found[-2:]] == [True, False]
    assert found[-1] == f"done: {tmp_path}"
    assert not at_work(tmp_path)


def test_a_comparison_goes_on_from_run_to_run(tmp_path: Path) -> None:
    add(folder(tmp_path / "a"), 1, 2, 3, 4)
    (tmp_path / "a" / "result.json").write_text("{}")
    add(folder(tmp_path / "b"), 1)
    held = Folder(tmp_path / "b")

    def finish() -> None:
        time.sleep(0.8)
        held.close()
        (tmp_path / "c").mkdir()
        next_ = Folder(tmp_path / "c")  # is being prepared
        time.sleep(2.5)
        add(folder(tmp_path / "c"), 1)
        next_.close()

    other = threading.Thread(target=finish)
    other.start()
    found = said(tmp_path)
    other.join()
    assert [text.split()[0] for text in found[:-3]] == ["a", "a", "a", "a", "b", "c"]
    assert found[-3] == "stopped: b after round 1 of 4, c after round 1 of 4; go on with:"
    assert [text.strip() for text in found[-2:]] == [f"promptfed run --resume --out {tmp_path / run}" for run in "bc"]


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match="holds neither a run nor a comparison"):
            watch(path, Console(file=io.StringIO()))


def test_looking_keeps_nobody_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at_work() does, for an instant: here until the first wait."""
    folder(tmp_path)
    looking = (tmp_path / ".lock").open("w")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(files.time, "sleep", lambda _: looking.close())
    Folder(tmp_path).close()
    assert looking.closed


def test_ctrl_c_ends_it_quietly_and_leaves_the_run_alone(tmp_path: Path) -> None:
    add(folder(tmp_path), 1)
    held = Folder(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "promptfed", "watch", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert "round 1/4" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=HANG)[0] == ""
    assert process.returncode == 130
    held.close()
