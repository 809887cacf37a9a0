"""How a request to a host, or its answer, is put into a Flower message: a JSON head, and blobs of safetensors.

The head is the one string of a ConfigRecord. Blobs are the Arrays of an ArrayRecord, which Flower cuts into chunks,
names by content and stores once for all nodes that receive them; bytes in a ConfigRecord would travel whole to each. An
Array's data are the blob as it is, under a serialisation type of our own: neither side calls numpy's reader or pickle.

All that is read here may come from a stranger. Types, lengths and sizes are checked against what was declared before
anything is parsed or allocated; whatever does not fit is Malformed, told in one sentence. (Flower itself has received
the message by then: its own limit is that of gRPC.)
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError

from ..clients.host import Message
from ..clients.wire import unpack
from ..errors import UserError
from ..params import Params

# Flower and Ray read these as they are imported. Nothing is to be sent to or fetched from anywhere but the federation.
_SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's processes are where the work is done
}
if "ray" not in sys.modules:  # else it has made up its mind, and would be refused by the processes it starts
    _SETTINGS |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402

VERSION = 1
# What is asked, as Flower's category and action.
TYPES = {
    "identify": "query.identify",
    "enroll": "query.enroll",
    "train": "train.round",
    "second": "train.second",
    "evaluate": "evaluate.round",
}
_HEAD, _JSON, _BLOBS, _STYPE = "promptfed", "json", "blobs", "safetensors"


class Malformed(UserError):
    """A message that is not what it must be."""


@dataclass(frozen=True)
class Limits:
    """What a message may hold at most."""

    head: int = 1 << 22  # characters of JSON
    parts: int = 20_000  # keys, lists and objects in it: each takes a hundred times the memory of its characters
    bytes: int = (1 << 31) - (1 << 20)  # all blobs together: what gRPC takes, less a margin
    header: int = 1 << 22  # bytes in front of a blob's tensors
    tensors: int = 20_000  # of a blob


LIMITS = Limits()

# ---- what may be said

_Count = Annotated[int, Field(ge=0, le=1 << 53)]
_Round = Annotated[int, Field(ge=0, lt=1 << 32)]  # what a key of the store holds
_Place = Annotated[int, Field(ge=0, lt=4096)]
_Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]  # becomes the name of a file
_Name = Annotated[str, Field(min_length=1, max_length=1000)]
_Sentence = Annotated[str, Field(max_length=4000)]
# fail_fast: else each of a million mistakes is collected.
_Counts = Annotated[list[_Count], Field(max_length=1_000_000, fail_fast=True)]


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class _Identify(_Note):
    ask: Literal["identify"]
    fingerprint: Annotated[dict[_Name, _Sentence], Field(max_length=100)] = {}  # what the server has


class _Request(_Note):
    clients: Annotated[list[_Count], Field(min_length=1, max_length=1)]  # a node is one client
    blob: Annotated[list[_Place], Field(min_length=1, max_length=1)]
    once: Annotated[list[dict[_Name, _Digest]], Field(min_length=1, max_length=1)]
    new: dict[_Digest, _Place]
    fingerprint: Annotated[dict[_Name, _Sentence], Field(max_length=100)] = {}  # what the server has


class _Enroll(_Request):
    ask: Literal["enroll"]


class _Settle(_Request):
    ask: Literal["second"]
    round: _Round


class _Train(_Request):
    ask: Literal["train"]
    round: _Round
    score: bool


class _Evaluate(_Request):
    ask: Literal["evaluate"]
    round: _Round
    pooled: bool
    after_local: bool


class _Score(_Note):
    n: _Count
    loss: float = math.nan  # may be none of a number: the model may have diverged
    tp: _Counts
    fp: _Counts
    fn: _Counts


class _Scores(_Note):
    val: _Score
    test: _Score
    everybody: _Score | None = Field(None, alias="global")


class _Trained(_Note):
    client: _Count
    n: _Count
    passes: _Count
    loss: float = math.nan
    error: _Sentence = ""
    after_local: _Scores | None = None
    moved: Annotated[dict[_Name, float], Field(max_length=100)] = Field(default_factory=dict)


class _Evaluated(_Scores):
    client: _Count
    passes: _Count
    groups: Annotated[list[_Counts], Field(max_length=100_000, fail_fast=True)] | None = None


class _Failed(_Note):
    error: _Sentence


class _Nothing(_Note):
    pass


class _Identified(_Note):
    client: _Count
    n: _Count
    fingerprint: Annotated[dict[_Name, _Sentence], Field(max_length=100)]


class _TrainedAll(_Note):
    clients: Annotated[list[_Trained], Field(min_length=1, max_length=1)]


class _EvaluatedAll(_Note):
    clients: Annotated[list[_Evaluated], Field(min_length=1, max_length=1)]


_N = TypeVar("_N")


class _Head(_Note, Generic[_N]):
    version: Literal[1]
    note: _N
    # Bytes of each blob; one without any does not travel.
    sizes: Annotated[list[_Count], Field(max_length=4096, fail_fast=True)]


_Asked = Annotated[_Identify | _Enroll | _Settle | _Train | _Evaluate, Field(discriminator="ask")]
_REQUEST: TypeAdapter[Any] = TypeAdapter(_Head[_Asked])
_ANSWERS: dict[str, TypeAdapter[Any]] = {
    "identify": TypeAdapter(_Head[_Identified | _Failed]),
    "enroll": TypeAdapter(_Head[_Nothing | _Failed]),
    "train": TypeAdapter(_Head[_TrainedAll | _Failed]),
    "second": TypeAdapter(_Head[_Nothing | _Failed]),
    "evaluate": TypeAdapter(_Head[_EvaluatedAll | _Failed]),
}
_BLOBS_OF = {"enroll": 1, "train": 1}  # in an answer; 0 otherwise

# ---- in and out of a message


def array(blob: bytes) -> Array:
    """A blob as Flower carries it. One object may be part of many messages: Flower hashes it once then."""
    return Array("uint8", (len(blob),), _STYPE, blob)


def write(note: dict[str, Any], blobs: Sequence[Array]) -> RecordDict:
    head = {"version": VERSION, "note": note, "sizes": [len(blob.data) for blob in blobs]}
    content = RecordDict({_HEAD: ConfigRecord({_JSON: json.dumps(head)})})
    held = {str(i): blob for i, blob in enumerate(blobs) if blob.data}  # Flower cannot carry an empty array
    if held:
        content[_BLOBS] = ArrayRecord(held)
    return content


def read_request(content: RecordDict, limits: Limits = LIMITS) -> Message:
    """What a host is asked, checked."""
    note, blobs = _read(content, _REQUEST, limits)
    for place in [*note.get("blob", []), *note.get("new", {}).values()]:
        if place >= len(blobs):
            raise Malformed(f"malformed message: it has {len(blobs)} blobs and names number {place}")
    return note, blobs


def read_answer(content: RecordDict, ask: str, limits: Limits = LIMITS) -> Message:
    """What a host answered to `ask`, checked."""
    note, blobs = _read(content, _ANSWERS[ask], limits)
    expected = 0 if "error" in note else _BLOBS_OF.get(ask, 0)
    if len(blobs) != expected:
        raise Malformed(f'malformed message: an answer to "{ask}" with {len(blobs)} blobs in place of {expected}')
    return note, blobs


def _read(content: RecordDict, schema: TypeAdapter[Any], limits: Limits) -> Message:
    head, arrays = content.get(_HEAD), content.get(_BLOBS, ArrayRecord())
    if not set(content) <= {_HEAD, _BLOBS} or not isinstance(head, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise Malformed("malformed message: other records than a head and blobs")
    text = head.get(_JSON)
    if set(head) != {_JSON} or not isinstance(text, str):
        raise Malformed("malformed message: its head is not one string")
    if len(text) > limits.head:
        raise Malformed(f"malformed message: a head of {len(text)} characters, more than {limits.head}")
    if _parts(text) > limits.parts:
        raise Malformed(f"malformed message: a head of more than {limits.parts} parts")
    try:
        parsed = schema.validate_json(text)
    except ValidationError as error:
        raise Malformed(f"malformed message: {_first(error, 'head')}") from None
    except ValueError:  # a string that is no Unicode
        raise Malformed("malformed message: its head is not JSON") from None
    sizes: list[int] = parsed.sizes
    if sum(sizes) > limits.bytes:
        raise Malformed(f"malformed message: blobs of {sum(sizes)} bytes, more than {limits.bytes}")
    if set(arrays) != {str(i) for i, size in enumerate(sizes) if size}:
        raise Malformed("malformed message: other blobs than its head says")
    blobs = []
    for i, size in enumerate(sizes):
        if not size:
            blobs.append(b"")
            continue
        found = arrays[str(i)]
        if (found.dtype, found.shape, found.stype) != ("uint8", (size,), _STYPE) or len(found.data) != size:
            raise Malformed(f"malformed message: blob {i} is not {size} bytes of safetensors")
        blobs.append(found.data)
    note: dict[str, Any] = parsed.note.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
    return note, blobs


def _parts(text: str) -> int:
    """How many keys, lists and objects JSON has at most: those in strings count too."""
    return sum(map(text.count, ":[{"))


def _first(error: ValidationError, otherwise: str) -> str:
    """The first complaint of a validation, in printable characters: it may quote keys."""
    if error.error_count() > 100:  # to list them takes a while
        return f"{otherwise}: {error.error_count()} mistakes"
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{_printable('.'.join(map(str, first['loc']))) or otherwise}: {_printable(first['msg'])}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:200])


# ---- blobs

_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}


_METADATA = {"promptfed": "{}"}  # a message's note is in its head


class _Tensor(_Note):
    dtype: Literal["BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "I64", "F64"]
    shape: Annotated[list[_Count], Field(max_length=16, fail_fast=True)]
    data_offsets: Annotated[list[_Count], Field(min_length=2, max_length=2, fail_fast=True)]


def _sizes(header: bytes, limits: Limits) -> Iterator[int]:
    """Bytes of each tensor, checked one after the other: a header may have as many mistakes as it has room for."""
    if sum(map(header.count, (b":", b"[", b"{"))) > 8 * (limits.tensors + 1):  # a tensor has seven
        raise Malformed(f"malformed blob: more than {limits.tensors} tensors")
    try:
        held = from_json(header, allow_inf_nan=False)
    except ValueError:
        raise Malformed("malformed blob: its header is not JSON") from None
    if not isinstance(held, dict) or held.pop("__metadata__", None) != _METADATA:
        raise Malformed("malformed blob: other metadata than ours")
    if len(held) > limits.tensors:
        raise Malformed(f"malformed blob: {len(held)} tensors, more than {limits.tensors}")
    for name, entry in held.items():
        try:
            t = _Tensor.model_validate(entry)
        except ValidationError as error:
            raise Malformed(f'malformed blob: tensor "{_printable(name)}": {_first(error, "entry")}') from None
        size = t.data_offsets[1] - t.data_offsets[0]
        if size != math.prod(t.shape) * _SIZES[t.dtype]:
            raise Malformed(f'malformed blob: tensor "{_printable(name)}" has not the size of its shape')
        yield size


def tensors(blob: bytes, limits: Limits = LIMITS) -> Params:
    """What a blob holds: its header is checked before a tensor is made."""
    if not blob:
        return {}
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > min(limits.header, len(blob) - 8):
        raise Malformed(f"malformed blob: {len(blob)} bytes cannot hold a header of {size}")
    if sum(_sizes(blob[8 : 8 + size], limits)) != len(blob) - 8 - size:
        raise Malformed("malformed blob: its tensors do not fill it")
    try:
        return unpack(blob)[0]
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:  # overlaps, names given twice
        raise Malformed(f"malformed blob: {type(error).__name__}") from None
