"""A run's folder and its result, on lines made by hand."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.clients.wire import unpack
from promptfed.errors import UserError
from promptfed.runs.opened import Run
from promptfed.runs.record import Busy, Folder, read_checkpoint, read_lines, result
from promptfed.server import Line


def stage(test: float | None, val: float | None, passes: int = 0) -> dict[str, Any]:
    summary = {"local": {"mean": test, "worst": None}, "global": None if test is None else test / 2, "val": val}
    return {"summary": summary, "passes": passes, "clients": [{"client": 0, "accuracy": test}]}


def line(round: int, test: float | None = None, val: float | None = None, **changes: Any) -> Line:
    """A round; evaluated where a test accuracy is given."""
    found: Line = {
        "round": round,
        "clients": [0, 1],
        "left_out": [],
        "passes": 10,
        "seconds": {"train": 1.0},
        "bytes": {"clients": 2, "up": 100, "down": 60, "parameters_up": 24, "parameters_down": 14},
    }
    if test is not None:
        found["aggregated"] = stage(test, val, passes=round)
        found["seconds"]["evaluate"] = 0.5
    return {**found, **changes}


def metrics(lines: Sequence[Line], which: str = "aggregated") -> dict[str, Any]:
    return result(lines, {})["metrics"][which]


# ---- result


def test_the_last_evaluation_and_the_mean_of_the_last_ten_rounds() -> None:
    found = metrics([line(r, r / 100, 0.5) for r in range(1, 13)])
    assert found["last"]["round"] == 12
    assert found["last"]["local"]["mean"] == 0.12
    mean = found["mean_of_last_10"]
    assert mean["rounds"] == list(range(3, 13))
    assert mean["local"]["mean"] == pytest.approx(0.075)  # of .03 to .12
    assert mean["global"] == pytest.approx(0.0375)
    assert mean["local"]["worst"] is None


def test_with_evaluations_every_three_rounds_the_last_ten_rounds_hold_four() -> None:
    lines = [line(r, r / 100 if r % 3 == 0 or r == 14 else None, 0.5) for r in range(1, 15)]
    mean = metrics(lines)["mean_of_last_10"]
    assert mean["rounds"] == [6, 9, 12, 14]  # rounds 5 to 14
    assert mean["local"]["mean"] == pytest.approx((0.06 + 0.09 + 0.12 + 0.14) / 4)


def test_fewer_than_ten_rounds_are_averaged_all() -> None:
    found = metrics([line(1, 0.2, 0.5), line(2, 0.4, 0.5)])["mean_of_last_10"]
    assert found["rounds"] == [1, 2]
    assert found["local"]["mean"] == pytest.approx(0.3)


def test_the_round_is_chosen_on_validation_data_never_on_test_data() -> None:
    found = metrics([line(1, 0.9, 0.3), line(2, 0.2, 0.8), line(3, 0.6, 0.5)])["chosen_on_validation"]
    assert found["round"] == 2
    assert found["local"]["mean"] == 0.2  # though round 1 does best on test data


def test_of_equally_good_rounds_the_earliest_is_chosen() -> None:
    lines = [line(1, 0.1, 0.3), line(2, 0.2, 0.8), line(3, 0.9, 0.8), line(4, 0.95, 0.8)]
    assert metrics(lines)["chosen_on_validation"]["round"] == 2


def test_without_validation_data_no_round_is_chosen() -> None:
    assert "chosen_on_validation" not in metrics([line(1, 0.9), line(2, 0.2)])
    # Rounds without a number are passed over.
    assert metrics([line(1, 0.9), line(2, 0.2, 0.0)])["chosen_on_validation"]["round"] == 2


def test_locally_trained_models_have_numbers_of_their_own() -> None:
    lines = [
        line(1, 0.1, 0.9, after_local=stage(0.5, 0.2)),
        line(2, 0.2, 0.1),
        line(3, 0.3, 0.1, after_local=stage(0.7, 0.1)),
    ]
    found = metrics(lines, "after_local")
    assert found["last"]["local"]["mean"] == 0.7
    assert found["mean_of_last_10"]["rounds"] == [1, 3]
    assert found["mean_of_last_10"]["local"]["mean"] == pytest.approx(0.6)
    assert found["chosen_on_validation"]["local"]["mean"] == 0.5
    assert list(result([line(1, 0.1)], {})["metrics"]) == ["aggregated"]


def test_locally_trained_models_of_changing_clients_are_neither_averaged_nor_chosen_from() -> None:
    def trained(*clients: int) -> dict[str, Any]:
        return {**stage(0.5, 0.2), "clients": [{"client": client} for client in clients]}

    lines = [line(1, 0.1, 0.9, after_local=trained(0, 1)), line(2, 0.2, 0.1, after_local=trained(0, 2))]
    found = result(lines, {})["metrics"]
    assert list(found["after_local"]) == ["last"]
    assert set(found["aggregated"]) == {"last", "mean_of_last_10", "chosen_on_validation"}
    lines[1]["after_local"] = trained(1, 0)
    assert set(metrics(lines, "after_local")) == {"last", "mean_of_last_10", "chosen_on_validation"}


def test_numbers_tell_of_how_many_clients_they_could_have_been() -> None:
    """Of those that have test data; newcomers apart, and a site that is away may have told nothing of itself."""
    tests = [3, 0, None, 5, 4]
    sites = [{"client": client, "n_test": n} for client, n in enumerate(tests)]
    about = {"sites": sites, "newcomers": [4]}
    lines = [line(1, 0.1, 0.9, newcomers_aggregated=stage(0.2, 0.3)), line(2, 0.2, 0.1)]
    found = result(lines, about)["metrics"]
    assert {kind: m["of"] for kind, m in found["aggregated"].items()} == {
        "last": 3,
        "mean_of_last_10": 3,
        "chosen_on_validation": 3,
    }
    assert found["newcomers_aggregated"]["last"]["of"] == 1


def test_locally_trained_models_of_long_ago_have_no_mean_of_the_last_ten_rounds() -> None:
    """All clients of the last evaluated round were left out."""
    lines = [line(r, 0.1 if r in (10, 20) else None, 0.5) for r in range(1, 21)]
    lines[9]["after_local"] = stage(0.5, 0.2)
    found = result(lines, {})["metrics"]
    assert found["aggregated"]["mean_of_last_10"]["rounds"] == [20]
    assert found["after_local"]["last"]["round"] == 10


def test_communication_of_a_client_in_a_round() -> None:
    few = {"clients": 1, "up": 40, "down": 40, "parameters_up": 9, "parameters_down": 10}
    none = dict.fromkeys(few, 0)
    lines = [line(1, 0.1), line(2, 0.1, bytes=few), line(3, 0.1, bytes=none), line(4, 0.1, bytes=none)]
    found = result(lines, {})["communication"]
    assert found["client_rounds"] == 3
    assert found["total"] == {"up": 140, "down": 100, "parameters_up": 33, "parameters_down": 24}
    assert found["per_client_and_round"] == pytest.approx(
        {"up": 140 / 3, "down": 100 / 3, "parameters_up": 11, "parameters_down": 8}
    )


def test_communication_of_a_run_in_which_nobody_answered() -> None:
    none = dict.fromkeys(("clients", "up", "down", "parameters_up", "parameters_down"), 0)
    found = result([line(1, 0.1, bytes=none)], {})["communication"]
    assert found["client_rounds"] == 0
    assert set(found["per_client_and_round"].values()) == {0}


def test_the_rest_of_a_result() -> None:
    lines = [
        line(1, 0.1, left_out=[{"client": 3, "why": "no answer"}]),
        line(2),
        line(3, 0.3, left_out=[{"client": 1, "why": "bad"}, {"client": 2, "why": "worse"}]),
    ]
    found = result(lines, {"method": "fedavg"})
    assert found["method"] == "fedavg"
    assert found["rounds"] == 3
    assert found["passes"] == {"train": 30, "adapt_last": 3, "after_local_all": 0}
    assert found["seconds"] == {"train": 3.0, "evaluate": 1.0}
    assert found["left_out"] == [
        {"round": 1, "client": 3, "why": "no answer"},
        {"round": 3, "client": 1, "why": "bad"},
        {"round": 3, "client": 2, "why": "worse"},
    ]
    assert found["clients"] == {"aggregated": [{"client": 0, "accuracy": 0.3}]}
    assert found["versions"]["torch"] == torch.__version__
    json.dumps(found)


# ---- the folder


def state(value: float) -> dict[str, torch.Tensor]:
    return {"body.w": torch.tensor([value])}


def test_a_new_folder_has_nothing_to_restore(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "deep" / "run")
    assert folder.restore() is None
    assert folder.lines() == []
    folder.close()


def test_a_run_is_restored_behind_its_last_completed_round(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.restore()
    for round in (1, 2, 3):
        folder.end(line(round, 0.1), state(round))
    folder.close()
    again = Folder(tmp_path)
    restored = again.restore()
    assert restored is not None
    assert restored[0] == 3
    assert restored[1]["body.w"].item() == 3
    assert again.lines() == [line(round, 0.1) for round in (1, 2, 3)]
    again.end(line(4, 0.1), state(4))
    assert [entry["round"] for entry in read_lines(tmp_path)] == [1, 2, 3, 4]
    again.close()


def test_an_empty_state_is_restored_too(tmp_path: Path) -> None:
    """Local: the server holds nothing."""
    folder = Folder(tmp_path)
    folder.end(line(1, 0.1), {})
    assert folder.restore() == (1, {})
    folder.close()


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.end(line(1, 0.1), state(1))
    file = tmp_path / "rounds.jsonl"
    whole = json.dumps(line(2, 0.1))
    file.write_text(file.read_text() + whole[: len(whole) // 2])
    assert [entry["round"] for entry in folder.lines()] == [1]
    assert folder.restore() is not None
    # The next line does not land behind the half one.
    folder.end(line(2, 0.2), state(2))
    assert folder.lines() == [line(1, 0.1), line(2, 0.2)]
    folder.close()


def test_a_line_behind_the_checkpoint_is_written_again(tmp_path: Path) -> None:
    """Killed between line and checkpoint: the round was not completed."""
    folder = Folder(tmp_path)
    folder.end(line(1, 0.1), state(1))
    checkpoint = (tmp_path / "checkpoint.safetensors").read_bytes()
    folder.end(line(2, 0.2), state(2))
    (tmp_path / "checkpoint.safetensors").write_bytes(checkpoint)
    restored = folder.restore()
    assert restored is not None
    assert (restored[0], restored[1]["body.w"].item()) == (1, 1)
    assert folder.lines() == [line(1, 0.1)]
    folder.end(line(2, 0.3), state(2))
    assert folder.lines() == [line(1, 0.1), line(2, 0.3)]
    folder.close()


def test_a_line_without_any_checkpoint_is_dropped(tmp_path: Path) -> None:
    """Killed between the first line and the first checkpoint."""
    folder = Folder(tmp_path)
    folder.end(line(1, 0.1), state(1))
    (tmp_path / "checkpoint.safetensors").unlink()
    assert folder.restore() is None
    assert folder.lines() == []
    folder.close()


def test_several_lines_without_any_checkpoint_are_not_trained_again_in_silence(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for round in (1, 2):
        folder.end(line(round, 0.1), state(round))
    for file in tmp_path.glob("checkpoint*"):
        file.unlink()
    with pytest.raises(UserError, match=r'checkpoint.safetensors" is missing, though .*rounds.jsonl" has 2 rounds'):
        folder.restore()
    assert len(folder.lines()) == 2
    folder.close()


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1]), None])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path: Path, damage: Any) -> None:
    folder = Folder(tmp_path)
    for round in (1, 2, 3):
        folder.end(line(round, 0.1), state(round))
    file = tmp_path / "checkpoint.safetensors"
    if damage:
        file.write_bytes(damage(file.read_bytes()))
    else:
        file.unlink()
    with pytest.warns(UserWarning, match=r'checkpoint.safetensors" is (damaged|missing).* round 2 is used'):
        restored = folder.restore()
    assert restored is not None
    assert (restored[0], restored[1]["body.w"].item()) == (2, 2)
    assert [entry["round"] for entry in folder.lines()] == [1, 2]
    folder.end(line(3, 0.1), state(3))
    restored = folder.restore()  # without a warning
    assert restored is not None
    assert restored[0] == 3
    folder.close()


@pytest.mark.parametrize(
    ("old", "new", "told"), [("0.1", "0.9", "was changed"), ('"round": 2', '"round" 2', "is damaged")]
)
def test_lines_that_are_not_as_they_were_are_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    folder = Folder(tmp_path)
    for round in (1, 2, 3):
        folder.end(line(round, 0.1), state(round))
    file = tmp_path / "rounds.jsonl"
    changed = file.read_text().replace(old, new, 1)
    file.write_text(changed)
    with pytest.raises(UserError, match=rf'rounds.jsonl" {told} since round 3'):
        folder.restore()
    assert file.read_text() == changed  # nothing is lost
    folder.close()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.end(line(1), state(1.0))
    folder.close()
    file = folder.path / "checkpoint.safetensors"
    whole = file.read_bytes()
    for cut in (5, 40, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r'the checkpoint ".*/run/checkpoint.safetensors" is damaged: '):
            read_checkpoint(folder.path)
    (folder.path / "result.json").write_text("{")
    with pytest.raises(UserError, match=r'"\S*/run/result.json" is not valid JSON: .*; delete it and resume the run'):
        _ = Run(folder.path).result
    (folder.path / "partition.json").write_text('{"clients": [1]}')
    with pytest.raises(UserError, match=r"partition file .*/run/partition.json is malformed"):
        _ = Run(folder.path).shares


def test_the_checkpoint_holds_the_state_of_the_round_it_names(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.end(line(7, 0.1), state(7))
    tensors, note = unpack((tmp_path / "checkpoint.safetensors").read_bytes())
    assert (tensors["body.w"].item(), note["round"]) == (7, 7)
    folder.close()


class Watching:
    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[tuple[Any, ...]]()

    def begin(self, round: int, clients: Sequence[int]) -> None:
        self.seen.append(("begin", round, list(clients)))

    def end(self, line: Line) -> None:
        # By now the round is on disk.
        self.seen.append(
            ("end", line["round"], unpack((self.path / "checkpoint.safetensors").read_bytes())[1]["round"])
        )


def test_a_view_is_told_of_rounds_once_they_are_on_disk(tmp_path: Path) -> None:
    view = Watching(tmp_path)
    folder = Folder(tmp_path, [view])
    folder.begin(1, [4, 5])
    folder.end(line(1, 0.1), state(1))
    assert view.seen == [("begin", 1, [4, 5]), ("end", 1, 1)]
    folder.close()


def test_a_folder_in_use_is_busy_until_it_is_closed(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    with pytest.raises(Busy, match="in use by another run"):
        Folder(tmp_path)
    first.close()
    Folder(tmp_path).close()


def test_a_run_that_did_not_begin_leaves_no_trace_and_one_that_did_loses_nothing(tmp_path: Path) -> None:
    Folder(tmp_path / "never").close()
    assert list(tmp_path.iterdir()) == []
    for content in ("config.toml", "something of the user's"):
        path = tmp_path / content
        folder = Folder(path)
        (path / content).write_text("")
        folder.close()
        assert (path / content).exists()


def test_a_folder_in_use_by_another_process_is_busy_and_free_once_that_is_gone(tmp_path: Path) -> None:
    code = f"""
import fcntl
lock = open({str(tmp_path / ".lock")!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("ok", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == b"ok\n"
    with pytest.raises(Busy):
        Folder(tmp_path)
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    Folder(tmp_path).close()


def test_a_path_that_cannot_be_a_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Folder(tmp_path / "file")
