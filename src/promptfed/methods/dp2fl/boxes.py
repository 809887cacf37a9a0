"""Losses in sealed boxes: closed with a public key, opened with the private one. Bytes travel as uint8 tensors."""

from __future__ import annotations

import math
import struct

import torch
from nacl.bindings import crypto_box_SEALBYTES
from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox
from torch import Tensor

from ... import Params
from .data_prompt import raw

DOUBLE = struct.Struct("<d")
SEALED = DOUBLE.size + crypto_box_SEALBYTES  # bytes of a loss in its box


def seal(key: str, loss: float) -> Tensor:
    """A loss as 8 bytes, encrypted: uint8 (SEALED,)."""
    return from_bytes(SealedBox(PublicKey(bytes.fromhex(key))).encrypt(DOUBLE.pack(loss)))


def unseal(box: SealedBox[PrivateKey], sealed: Tensor) -> float:
    """Infinite, and so discarded, if it cannot be opened."""
    try:
        return float(DOUBLE.unpack(box.decrypt(raw(sealed)))[0])
    except (CryptoError, struct.error):
        return math.inf


def private_key(private: Params) -> PrivateKey:
    return PrivateKey(raw(private["secret"]))


def from_bytes(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)
