"""The cryptography of secure aggregation, all of it libsodium's: X25519, XSalsa20-Poly1305, ChaCha20 and BLAKE2b.

A client draws 32 random bytes in each round, and derives all else from them. Its neighbours hold shares of two of the
values derived: the private key of its pairwise masks, which restores the masks of a client that is lost in mid-round,
and the seed of its own mask. The server is told one of the two, never both: an update that comes late, after its
client was taken for lost, is still masked by the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from nacl.public import Box, PrivateKey, PublicKey
from nacl.utils import randombytes_deterministic

from . import shamir

KEY = 32  # bytes of a key or a seed
SHARE = shamir.SIZE
_ENDS = struct.Struct(">QQ")  # sender and recipient of shares
BOX = Box.NONCE_SIZE + 16 + _ENDS.size + 2 * SHARE  # bytes of two shares, encrypted


def derive(secret: bytes, use: str) -> bytes:
    """Another secret of 32 bytes, for this use."""
    return blake2b(use.encode(), key=secret, digest_size=KEY, person=b"promptfed").digest()


@dataclass(frozen=True)
class Secrets:
    """What a client has drawn for a round."""

    drawn: bytes

    @cached_property
    def box(self) -> PrivateKey:
        """Its shares are encrypted with it."""
        return PrivateKey(derive(self.drawn, "box"))

    @cached_property
    def pair(self) -> bytes:
        """The private key of its pairwise masks."""
        return derive(self.drawn, "pair")

    @cached_property
    def own(self) -> bytes:
        """The seed of its own mask."""
        return derive(self.drawn, "own")

    @property
    def public(self) -> tuple[bytes, bytes]:
        """The public keys of box and pair."""
        return bytes(self.box.public_key), public(self.pair)

    def shares(self, holders: list[int], needed: int) -> dict[int, bytes]:
        """For each holder its shares of pair and own; so many holders can restore them."""
        made = []
        for use, secret in (("pair", self.pair), ("own", self.own)):
            # 128 bits more than the prime has: the remainder is as good as uniform.
            stream = randombytes_deterministic(48 * (needed - 1), derive(self.drawn, f"polynomial of {use}"))
            parts = (stream[i : i + 48] for i in range(0, len(stream), 48))
            coefficients = [int.from_bytes(part, "big") % shamir.PRIME for part in parts]
            points = [point(holder) for holder in holders]
            made.append(shamir.split(int.from_bytes(secret, "big"), coefficients, points))
        return {holder: b"".join(share_bytes(shares[point(holder)]) for shares in made) for holder in holders}

    def encrypt(self, shares: bytes, key: bytes, sender: int, recipient: int) -> bytes:
        return bytes(Box(self.box, PublicKey(key)).encrypt(_ENDS.pack(sender, recipient) + shares))

    def decrypt(self, box: bytes, key: bytes, sender: int, recipient: int) -> tuple[bytes, bytes]:
        """Shares of the sender's pair and own. Both ends are part of what is encrypted: the key is the same in both
        directions, and a client's own shares must not come back to it as those of another."""
        held = Box(self.box, PublicKey(key)).decrypt(box)
        if held[: _ENDS.size] != _ENDS.pack(sender, recipient):
            raise ValueError("shares of another client, or for another one")
        shares = held[_ENDS.size :]
        return shares[:SHARE], shares[SHARE:]


def public(private: bytes) -> bytes:
    return bytes(PrivateKey(private).public_key)


def pair_seed(private: bytes, key: bytes, context: str) -> bytes:
    """The seed of two clients' common mask, from the private key of one and the public key of the other."""
    return derive(Box(PrivateKey(private), PublicKey(key)).shared_key(), context)


def mask(seed: bytes, name: str, count: int) -> np.ndarray:
    """So many numbers modulo 2^32, for the parameter of this name."""
    return np.frombuffer(randombytes_deterministic(4 * count, derive(seed, name)), "<u4")


def point(client: int) -> int:
    """Where a client's share of a polynomial is; the secret is at 0."""
    return client + 1


def share_bytes(share: int) -> bytes:
    return share.to_bytes(SHARE, "big")


def restore(shares: dict[int, bytes]) -> bytes:
    """A secret, from shares by holder. Raises OverflowError if they are not shares of one."""
    held = {point(holder): int.from_bytes(share, "big") for holder, share in shares.items()}
    return shamir.combine(held).to_bytes(KEY, "big")
