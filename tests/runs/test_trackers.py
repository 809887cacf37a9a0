import sys

import pytest

from promptfed import UserError
from promptfed.runs import config as C
from promptfed.runs import trackers
from promptfed.runs.api import run
from promptfed.runs.record import read_lines

event_file = pytest.importorskip("tensorboardX.proto.event_pb2")
TINY = {"dataset": {"name": "digits", "limit": 60}, "partition": {"name": "iid", "clients": 2}, "method": "fedavg"}


def read(folder):
    """Round -> tag -> value. An event file is TFRecords: length (8 bytes), its checksum (4), content, checksum (4)."""
    (file,) = folder.glob("events.out.tfevents.*")
    blob, found = file.read_bytes(), {}
    while blob:
        size = int.from_bytes(blob[:8], "little")
        event = event_file.Event.FromString(blob[12 : 12 + size])
        for value in event.summary.value:
            assert value.tag not in found.setdefault(event.step, {})
            found[event.step][value.tag] = value.simple_value
        blob = blob[16 + size :]
    return found


def summary(mean, worst, wide):
    local = {"mean": mean, "std": 0.0, "worst": worst}
    return {"summary": {"local": local, "global": wide, "macro_f1": None, "loss": None}}


def test_numbers_of_a_round():
    line = {
        "round": 300,
        "train_loss": None,
        "passes": 1,
        "seconds": {"train": 0.1},
        "left_out": [{"client": 1, "why": "non-finite loss"}],
        "bytes": {"up": 700, "down": 800},
        "aggregated": summary(0.5, 0.25, None),
        "common": summary(0.5, 0.5, 0.5),
    }
    found = trackers.scalars(line)
    assert (found["aggregated/local"], found["aggregated/worst"], found["common/global"]) == (0.5, 0.25, 0.5)
    assert (found["bytes/up"], found["bytes/down"], found["train/left_out"]) == (700, 800, 1)
    assert "aggregated/global" not in found, "an unknown number is left out"
    assert "train/loss" not in found


def test_a_resumed_run_has_all_its_rounds_once(tmp_path):
    out = tmp_path / "run"
    run(out=out, rounds=1, engine={"workers": 1, "trackers": "tensorboard"}, **TINY)
    assert list(read(out)) == [1]
    run(out=out, rounds=2, resume=True)
    found = read(out)
    assert list(found) == [1, 2]
    for line in read_lines(out):
        assert found[line["round"]] == pytest.approx(trackers.scalars(line))


def test_trackers_are_named_in_the_configuration():
    assert C.make({"engine": {"trackers": list(trackers.TRACKERS)}}).engine.trackers == tuple(trackers.TRACKERS)
    assert C.make({"engine": {"trackers": "tensorboard, wandb"}}).engine.trackers == ("tensorboard", "wandb")
    assert C.make({"engine": {"trackers": ["mlflow"]}}).engine.trackers == ("mlflow",)
    with pytest.raises(
        UserError, match=r"engine\.trackers\.0 = 'tensorbord' should be 'tensorboard', 'mlflow', 'wandb' or 'trackio'"
    ):
        C.make({"engine": {"trackers": ["tensorbord"]}})


def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ("no_such_module", trackers.wandb))
    with pytest.raises(UserError, match=r'engine\.trackers = "wandb" needs pip install "promptfed\[wandb\]"'):
        run(out=tmp_path / "run", rounds=1, engine={"workers": 1, "trackers": "wandb"}, **TINY)
    assert not (tmp_path / "run").exists()
    assert "wandb" not in sys.modules
