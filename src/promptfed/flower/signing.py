"""Signatures of the server's requests, which a site checks before it reads anything else.

TLS and Flower's keys say who speaks to the SuperLink, not who wrote a message that comes through it: Flower stores an
instruction for any node under the source that it names. So a request is signed with an Ed25519 key that only the
server's folder has; its public half is part of what the sites have agreed on. A signature is valid for one run, one
node and one content: a head, which names task, round and client, and the digests of all blobs.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import UserError
from . import wire
from ._flwr import Context, Message
from .certificates import read_signing_key


class Unsigned(UserError):
    """A request that the consortium's server has not signed."""


class Signer:
    """Signs the requests of a run."""

    def __init__(self, file: Path, public: str, run: str) -> None:
        self._key, self._run = read_signing_key(file), run
        if public_half(self._key) != public:
            raise UserError(f'"{file}" is not the key that consortium.toml names (consortium.key = "{public}")')

    def __call__(self, message: Message) -> None:
        about = message.metadata
        text = _text(message, self._run, about.run_id, about.dst_node_id)
        wire.attach_signature(message.content, self._key.sign(text))


class Verifier:
    """Raises Unsigned for a request that the server has not signed for this run and node."""

    def __init__(self, public: str) -> None:
        try:
            self._key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True))
        except ValueError:
            raise UserError(
                f'consortium.key = "{public}" in consortium.toml must be the public key that promptfed flower init has '
                "written there: ask the server's engineer for the file"
            ) from None

    def __call__(self, message: Message, context: Context) -> None:
        text = _text(message, context.run_config.get("run"), context.run_id, context.node_id)
        try:
            self._key.verify(wire.signature(message.content), text)
        except InvalidSignature:
            raise Unsigned("the request is refused: the consortium's server has not signed it") from None


def _text(message: Message, run: object, run_id: int, node: int) -> bytes:
    """What is signed."""
    parts = ["promptfed", wire.VERSION, run, run_id, node, message.metadata.message_type]
    return json.dumps([*parts, *wire.contents(message.content)]).encode()


def public_half(key: Ed25519PrivateKey) -> str:
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return base64.b64encode(raw).decode()
