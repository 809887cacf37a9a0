"""TensorBoard event files of a run, without the tensorboard package: TFRecords that hold hand-encoded protocol buffers.

Event:   1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary
Summary: 1 value (repeated);  Value: 1 tag (string), 2 simple_value (float)
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import files
from ..clients.base import Notice
from ..runs import record
from ..runs.record import STAGES, View
from ..server import Line

NAME = "events.out.tfevents.0.promptfed"  # TensorBoard takes a file for its own by the second and third word
_SUMMARY = {  # tag -> path in a stage's summary
    "local": ("local", "mean"),
    "worst": ("local", "worst"),
    "global": ("global",),
    "macro_f1": ("macro_f1",),
    "loss": ("loss",),
}


class EventFile(View):
    """A View that keeps one event file in a run's folder. A resumed run's earlier rounds are in it too."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.path = folder, folder / NAME
        self._open = False

    def begin(self, round: int, clients: Sequence[int]) -> None:
        if not self._open:
            past = [line for line in record.read_lines(self._folder) if line["round"] < round]
            files.write(self.path, b"".join([head(), *map(event, past)]))
            self._open = True

    def end(self, line: Line) -> None:
        self.begin(line["round"], line["clients"])
        with self.path.open("ab") as file:
            file.write(event(line))


class Views(View):
    """Several views as one."""

    def __init__(self, *views: View) -> None:
        self._views = views

    def begin(self, round: int, clients: Sequence[int]) -> None:
        for view in self._views:
            view.begin(round, clients)

    def on_notice(self, notice: Notice) -> None:
        for view in self._views:
            view.on_notice(notice)

    def end(self, line: Line) -> None:
        for view in self._views:
            view.end(line)


def scalars(line: Line) -> dict[str, float]:
    """Tag -> value, of all that is known of a round."""
    found = {
        "train/loss": line["train_loss"],
        "train/passes": line["passes"],
        "train/seconds": line["seconds"]["train"],
        "train/left_out": len(line["left_out"]),
        "bytes/up": line["bytes"]["up"],
        "bytes/down": line["bytes"]["down"],
    }
    for stage in STAGES:
        if stage in line:
            for tag, path in _SUMMARY.items():
                value = line[stage]["summary"]
                for key in path:
                    value = value[key]
                found[f"{stage}/{tag}"] = value
    return {tag: float(value) for tag, value in found.items() if value is not None and math.isfinite(value)}


def head() -> bytes:
    """The record every event file begins with."""
    return frame(_wall() + _bytes(3, b"brain.Event:2"))


def event(line: Line) -> bytes:
    """A round's record."""
    values = [_bytes(1, _bytes(1, tag.encode()) + b"\x15" + _float(value)) for tag, value in scalars(line).items()]
    return frame(_wall() + b"\x10" + _varint(line["round"]) + _bytes(5, b"".join(values)))


def _wall() -> bytes:
    return b"\x09" + struct.pack("<d", time.time())


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # a loss may be beyond what 32 bits hold
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def frame(content: bytes) -> bytes:
    """A TFRecord: length, its checksum, content, its checksum."""
    size = struct.pack("<Q", len(content))
    return size + struct.pack("<I", checksum(size)) + content + struct.pack("<I", checksum(content))


def records(blob: bytes) -> Iterator[bytes]:
    """The contents of a file of TFRecords; ValueError where a checksum is wrong."""
    while blob:
        (size,) = struct.unpack_from("<Q", blob)
        content, end = blob[12 : 12 + size], 16 + size
        if len(blob) < end or frame(content) != blob[:end]:
            raise ValueError("a damaged record")
        yield content
        blob = blob[end:]


def checksum(content: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecords have it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, reversed
    return value


_TABLE = tuple(map(_row, range(256)))
