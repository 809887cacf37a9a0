"""Event files, read back by hand; and by TensorBoard where it is installed."""

import struct
from pathlib import Path

import pytest
from handmade import line, stage

from promptfed.report import tensorboard
from promptfed.report.tensorboard import EventFile, Views
from promptfed.runs.api import run
from promptfed.runs.record import read_lines


def fields(blob: bytes):
    """(number, value) of a protocol buffer."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = blob[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(blob):
        key = varint()
        kind = key & 7
        if kind == 0:
            value = varint()
        elif kind == 2:
            size = varint()
            value, at = blob[at : at + size], at + size
        else:
            size = 8 if kind == 1 else 4
            (value,) = struct.unpack("<d" if kind == 1 else "<f", blob[at : at + size])
            at += size
        yield key >> 3, value


def read(path: Path):
    """Step -> tag -> value, of all events."""
    first, *rest = tensorboard.records(path.read_bytes())
    assert dict(fields(first))[3] == b"brain.Event:2"
    found = {}
    for blob in rest:
        event = dict(fields(blob))
        values = [dict(fields(value)) for _, value in fields(event[5])]
        assert event[2] not in found
        found[event[2]] = {value[1].decode(): value[2] for value in values}
    return found


def rounds():
    return [
        line(1, [0, 1], loss=2.0, sent=700),
        line(300, [0, 1], left_out=[1], loss=None, aggregated=stage([0.25, 0.75], None), common=stage([0.5, 0.5], 0.5)),
    ]


def test_checksums_are_those_of_the_format():
    # RFC 3720's CRC-32C of 32 zeros is 8a9136aa; TFRecords rotate it and add a constant.
    crc = 0x8A9136AA
    assert tensorboard.checksum(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    with pytest.raises(ValueError, match="damaged"):
        list(tensorboard.records(tensorboard.frame(b"abc").replace(b"b", b"x")))


def test_scalars_come_back(tmp_path):
    view = EventFile(tmp_path)
    for one in rounds():
        view.begin(one["round"], one["clients"])
        view.end(one)
    found = read(view.path)
    assert list(found) == [1, 300]
    assert found[1]["train/loss"] == 2.0
    assert (found[1]["bytes/up"], found[1]["bytes/down"]) == (700, 700)
    last = found[300]
    assert (last["aggregated/local"], last["aggregated/worst"], last["common/global"]) == (0.5, 0.25, 0.5)
    assert last["train/left_out"] == 1
    assert "aggregated/global" not in last, "an unknown number is left out"
    assert "train/loss" not in last


def test_a_resumed_run_has_all_its_rounds_once(tmp_path):
    tiny = {"dataset": {"name": "digits", "limit": 60}, "partition": {"name": "iid", "clients": 2}, "method": "fedavg"}
    out = tmp_path / "run"
    run(out=out, rounds=1, view=EventFile(out), engine={"workers": 1}, **tiny)
    run(out=out, rounds=2, resume=True, view=Views(EventFile(out)))
    found = read(out / tensorboard.NAME)
    assert list(found) == [1, 2]
    for one in read_lines(out):
        assert found[one["round"]]["train/loss"] == pytest.approx(one["train_loss"])


def test_tensorboard_reads_it(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    view = EventFile(tmp_path)
    for one in rounds():
        view.end(one)
    events = list(loader.LegacyEventFileLoader(str(view.path)).Load())
    assert [event.step for event in events[1:]] == [1, 300]
    assert {value.tag: value.simple_value for value in events[1].summary.value}["train/loss"] == 2.0
