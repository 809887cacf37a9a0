"""The format of messages and stored values: tensors and a JSON note in one safetensors blob. No pickle.

No tensors and no note are an empty blob."""

import json
import sys
from typing import Any

import torch
from safetensors.torch import load, save

from ..params import Params

_NOTE = "promptfed"  # the one metadata key we write
_NO_NOTE = json.dumps({"__metadata__": {_NOTE: "{}"}}, separators=(",", ":"))[:-1].encode()  # a header begins with it


def pack(params: Params, note: dict[str, Any] | None = None) -> bytes:
    if not params and not note:
        return b""
    metadata = {_NOTE: json.dumps(note, sort_keys=True) if note else "{}"}
    tensors = {name: p.detach().cpu().contiguous() for name, p in params.items()}
    if sys.byteorder == "little" and all(p.dtype is torch.float32 for p in tensors.values()):
        return _joined(tensors, metadata)
    seen: set[int] = set()
    for name, p in tensors.items():
        at = p.untyped_storage().data_ptr()
        tensors[name] = p.clone() if at in seen else p  # safetensors refuses two names for the same memory
        seen.add(at)
    return bytes(save(tensors, metadata=metadata))


def _joined(tensors: Params, metadata: dict[str, str]) -> bytes:
    """What save() makes of tensors of fp32, with a fifth of its work for small ones: most messages are such."""
    header: dict[str, Any] = {"__metadata__": metadata}
    values, end = [], 0
    for name, p in sorted(tensors.items()):
        begin, end = end, end + 4 * p.numel()
        header[name] = {"dtype": "F32", "shape": list(p.shape), "data_offsets": [begin, end]}
        values.append(p.numpy().data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *values])


def unpack(blob: bytes) -> tuple[Params, dict[str, Any]]:
    if not blob:
        return {}, {}
    note = {}
    if not blob.startswith(_NO_NOTE, 8):
        size = int.from_bytes(blob[:8], "little")
        note = json.loads(json.loads(blob[8 : 8 + size])["__metadata__"][_NOTE])
    tensors = load(blob)
    # By name and in torch's own memory: the library's order and the alignment within a blob vary from call to call,
    # and sums and products round by them.
    return {name: tensors[name].clone() for name in sorted(tensors)}, note
