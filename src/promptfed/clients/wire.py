"""The format of messages and stored values: tensors and a JSON note in one safetensors blob. No pickle.

No tensors and no note are an empty blob."""

import json
from typing import Any

from safetensors.torch import load, save

from ..params import Params

_NOTE = "promptfed"  # the one metadata key we write


def pack(params: Params, note: dict[str, Any] | None = None) -> bytes:
    if not params and not note:
        return b""
    tensors: Params = {}
    seen: set[int] = set()
    for name, p in params.items():
        p = p.detach().cpu().contiguous()
        at = p.untyped_storage().data_ptr()
        tensors[name] = p.clone() if at in seen else p  # safetensors refuses two names for the same memory
        seen.add(at)
    return bytes(save(tensors, metadata={_NOTE: json.dumps(note or {}, sort_keys=True)}))


def unpack(blob: bytes) -> tuple[Params, dict[str, Any]]:
    if not blob:
        return {}, {}
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    note = json.loads(header["__metadata__"][_NOTE])
    tensors = load(blob)
    # By name and in torch's own memory: the library's order and the alignment within a blob vary from call to call,
    # and sums and products round by them.
    return {name: tensors[name].clone() for name in sorted(tensors)}, note
