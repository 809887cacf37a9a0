"""How a request to a host, or its answer, is put into a Flower message: a JSON head, and blobs of safetensors.

The head is the one string of a ConfigRecord. Blobs are the Arrays of an ArrayRecord, which Flower cuts into chunks,
names by content and stores once for all nodes that receive them; bytes in a ConfigRecord would travel whole to each. An
Array's data are the blob as it is, under a serialisation type of our own: neither side calls numpy's reader or pickle.

All that is read here may come from a stranger. Types, lengths and sizes are checked against what was declared before
anything is parsed or allocated; anything else is Malformed, in one sentence. (Flower itself has received
the message by then: its own limit is that of gRPC.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Generic, Literal, TypeVar

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError

from ..clients import messages as M
from ..clients.wire import unpack
from ..errors import UserError
from ..params import Params
from ._flwr import Array, ArrayRecord, ConfigRecord, RecordDict

VERSION: Literal[3] = 3
# What is asked, as Flower's category and action.
TYPES = {
    "identify": "query.identify",
    "enroll": "query.enroll",
    "train": "train.round",
    "second": "train.second",
    "evaluate": "evaluate.round",
    "keys": "train.keys",
    "shares": "train.shares",
    "unmask": "train.unmask",
}
_HEAD, _JSON, _BLOBS, _STYPE = "promptfed", "json", "blobs", "safetensors"
_SIGNATURE, _ED25519 = "signature", "ed25519"


class Malformed(UserError):
    """A message that does not fit the schema or the limits."""


@dataclass(frozen=True)
class Limits:
    """What a message may hold at most. What each field may hold, the messages' own types say."""

    head: int = 1 << 22  # characters of JSON
    parts: int = 20_000  # keys, lists and objects in it: each takes a hundred times the memory of its characters
    bytes: int = (1 << 31) - (1 << 20)  # all blobs together: what gRPC takes, less a margin
    header: int = 1 << 22  # bytes in front of a blob's tensors
    tensors: int = 20_000  # of a blob


LIMITS = Limits()

# ---- what a message holds besides its request or results

_Fingerprint = Annotated[dict[M.Name, M.Sentence], Field(max_length=100)]  # digests of what must be the same everywhere
_Sizes = Annotated[
    list[M.Count], Field(max_length=4096, fail_fast=True)
]  # bytes of each blob; empty ones do not travel


class Identify(M.Note):
    """Which client a node is."""

    ask: Literal["identify"] = "identify"


class IdentifyResult(M.Note):
    client: M.Count
    n: M.Count  # training samples
    fingerprint: _Fingerprint


class Asked(M.Note):
    version: Literal[3]
    note: Annotated[M.Request | Identify, Field(union_mode="left_to_right")]
    fingerprint: _Fingerprint = Field(default_factory=dict)  # the server's
    sizes: _Sizes

    @property
    def task(self) -> M.Task | Identify:
        return self.note if isinstance(self.note, Identify) else self.note.task


_R = TypeVar("_R", bound=M.Note)


class Answered(M.Note, Generic[_R]):
    version: Literal[3]
    result: _R | None = None  # one: a node is one client
    error: M.Sentence = ""  # why there is none
    sizes: _Sizes


_ANSWERED: dict[type[M.Task | Identify], type[Answered[Any]]] = {
    Identify: Answered[IdentifyResult],
    M.Enroll: Answered[M.Result],
    M.Train: Answered[M.TrainResult],
    M.Second: Answered[M.Result],
    M.Evaluate: Answered[M.EvaluateResult],
    **dict.fromkeys((M.Keys, M.Shares, M.Unmask), Answered[M.Result]),
}

# ---- in and out of a message


def array(blob: bytes) -> Array:
    """A blob as Flower carries it. One object may be part of many messages: Flower hashes it once then."""
    return Array("uint8", (len(blob),), _STYPE, blob)


def write_request(
    note: M.Request | Identify, blobs: Sequence[Array] = (), fingerprint: Mapping[str, str] | None = None
) -> RecordDict:
    sizes = [len(blob.data) for blob in blobs]
    return _written(Asked(version=VERSION, note=note, fingerprint=dict(fingerprint or {}), sizes=sizes), blobs)


def write_answer(result: M.Note | None, error: str = "", blobs: Sequence[Array] = ()) -> RecordDict:
    sizes = [len(blob.data) for blob in blobs]
    return _written(Answered[Any](version=VERSION, result=result, error=error, sizes=sizes), blobs)


def _written(head: M.Note, blobs: Sequence[Array]) -> RecordDict:
    content = RecordDict({_HEAD: ConfigRecord({_JSON: head.model_dump_json(exclude_none=True)})})
    held = {str(i): blob for i, blob in enumerate(blobs) if blob.data}  # Flower cannot carry an empty array
    if held:
        content[_BLOBS] = ArrayRecord(held)
    return content


def read_request(content: RecordDict, limits: Limits = LIMITS) -> tuple[Asked, list[bytes]]:
    """What a node is asked, checked."""
    asked, blobs = _read(content, Asked, limits)
    if isinstance(asked.note, M.Request):
        if len(asked.note.clients) != 1:
            raise Malformed(f"malformed message: a request to {len(asked.note.clients)} clients in place of 1")
        for index in [asked.note.clients[0].blob, *asked.note.new.values()]:
            if index >= len(blobs):
                raise Malformed(f"malformed message: it has {len(blobs)} blobs and refers to number {index}")
    return asked, blobs


def read_answer(
    content: RecordDict, task: M.Task | Identify, limits: Limits = LIMITS
) -> tuple[Answered[Any], list[bytes]]:
    """What a node answered to a task, checked."""
    answered, blobs = _read(content, _ANSWERED[type(task)], limits)
    if (answered.result is None) == (not answered.error):
        raise Malformed("malformed message: an answer must hold either a result or an error")
    expected = int(not answered.error and isinstance(task, M.HAS_BLOBS))
    if len(blobs) != expected:
        raise Malformed(f'malformed message: an answer to "{task.ask}" with {len(blobs)} blobs in place of {expected}')
    return answered, blobs


_H = TypeVar("_H", Asked, Answered[Any])


def _read(content: RecordDict, head: type[_H], limits: Limits) -> tuple[_H, list[bytes]]:
    text, arrays = _records(content)
    if len(text) > limits.head:
        raise Malformed(f"malformed message: a head of {len(text)} characters, more than {limits.head}")
    if sum(map(text.count, ":[{")) > limits.parts:  # an upper bound: characters in strings count too
        raise Malformed(f"malformed message: a head of more than {limits.parts} parts")
    try:
        parsed = head.model_validate_json(text)
    except ValidationError as error:
        raise Malformed(f"malformed message: {_first(error, 'head')}") from None
    except ValueError:  # a string that is not Unicode
        raise Malformed("malformed message: its head is not JSON") from None
    sizes = parsed.sizes
    if sum(sizes) > limits.bytes:
        raise Malformed(f"malformed message: blobs of {sum(sizes)} bytes, more than {limits.bytes}")
    if set(arrays) != {str(i) for i, size in enumerate(sizes) if size}:
        raise Malformed("malformed message: its blobs are not those that its head lists")
    blobs = []
    for i, size in enumerate(sizes):
        if not size:
            blobs.append(b"")
            continue
        found = arrays[str(i)]
        if (found.dtype, found.shape, found.stype) != ("uint8", (size,), _STYPE) or len(found.data) != size:
            raise Malformed(f"malformed message: blob {i} is not {size} bytes of safetensors")
        blobs.append(found.data)
    return parsed, blobs


def _records(content: RecordDict) -> tuple[str, ArrayRecord]:
    """-> the head, the blobs"""
    held, arrays = content.get(_HEAD), content.get(_BLOBS, ArrayRecord())
    text = held.get(_JSON) if isinstance(held, ConfigRecord) and set(held) == {_JSON} else None
    known = set(content) <= {_HEAD, _BLOBS, _SIGNATURE}
    if not known or not isinstance(text, str) or not isinstance(arrays, ArrayRecord):
        raise Malformed("malformed message: its records must be a head of one string, and blobs")
    return text, arrays


# ---- what is signed of a message (signing.py)


def contents(content: RecordDict) -> tuple[str, dict[str, str]]:
    """-> the head, the digests of all blobs"""
    text, arrays = _records(content)
    return text, {name: sha256(arrays[name].data).hexdigest() for name in sorted(arrays)}


def attach_signature(content: RecordDict, signature: bytes) -> None:
    content[_SIGNATURE] = ConfigRecord({_ED25519: signature})


def signature(content: RecordDict) -> bytes:
    """Empty if there is none."""
    held = content.get(_SIGNATURE)
    found = held.get(_ED25519) if isinstance(held, ConfigRecord) else None
    return found if isinstance(found, bytes) else b""


def _first(error: ValidationError, otherwise: str) -> str:
    """The first validation error, in printable characters: it may quote keys."""
    if error.error_count() > 100:  # listing them takes long
        return f"{otherwise}: {error.error_count()} errors"
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{printable('.'.join(map(str, first['loc']))) or otherwise}: {printable(first['msg'])}"


def printable(text: str, most: int = 200) -> str:
    """What a stranger says, as one line of bounded length without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text[: 8 * most].split())[:most])


# ---- blobs

_KINDS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64} | {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def tensors(blob: bytes, limits: Limits = LIMITS) -> Params:
    """A blob's tensors. The header's size is checked here, before it is parsed; shapes and offsets by safetensors,
    before anything is allocated."""
    if not blob:
        return {}
    size = int.from_bytes(blob[:8], "little")
    if len(blob) < 8 or size > min(limits.header, len(blob) - 8):
        raise Malformed(f"malformed blob: {len(blob)} bytes cannot hold a header of {size}")
    if sum(map(blob[8 : 8 + size].count, (b":", b"[", b"{"))) > 8 * (limits.tensors + 1):  # a tensor has seven
        raise Malformed(f"malformed blob: more than {limits.tensors} tensors")
    try:
        found, note = unpack(blob)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Malformed(f"malformed blob: {printable(str(error)) or type(error).__name__}") from None
    if note != {} or len(found) > limits.tensors or not {p.dtype for p in found.values()} <= _KINDS:
        raise Malformed(
            f"malformed blob: it must hold {limits.tensors} tensors at most, of torch's usual types, and no note"
        )
    return found
