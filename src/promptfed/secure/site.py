"""A client's half of secure aggregation: it makes keys, shares their secrets, masks an update, and lets go of shares.

What it knows of a round is kept on its own disk, since any process may answer its next message. Each of the four steps
is taken once, and a round that is begun again begins with new keys: of an update, a server never sees two masked
versions that differ in less than all masks, and never both secrets that would lay it open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from nacl.exceptions import CryptoError

from .. import params as P
from ..clients import messages as M
from ..clients.store import Store
from ..errors import UserError
from ..method import Method, split_once
from ..params import Params
from . import Secure, fixed_point, keys, neighbours, ring
from .tensors import raw, read, row, rows


class Masker:
    """Of the clients of one host. `folder`: where it keeps what they know of a round."""

    def __init__(self, settings: Secure, seed: int, folder: Path) -> None:
        self.settings, self._seed, self._folder = settings, seed, folder

    @cached_property
    def _store(self) -> Store:
        return Store(self._folder)

    def close(self) -> None:
        if "_store" in vars(self):
            self._store.close()

    def answer(self, task: M.Keys | M.Shares | M.Unmask, received: Mapping[int, Params]) -> list[Params]:
        """What clients answer to a message, in their order."""
        known: dict[int, Params] = {}
        said = []
        for client, given in received.items():
            if isinstance(task, M.Keys):
                known[client], reply = _made_keys(task.round)
            elif isinstance(task, M.Shares):
                known[client], reply = self._made_shares(client, task, given)
            else:
                known[client], reply = self._released(client, task, given)
            said.append(reply)
        self._store.put(task.round, known)  # before anything is sent: no step is taken twice
        return said

    def mask(self, client: int, round: int, up: Params, n: int, masks: M.Masks, context: str) -> Params:
        """What is sent instead of an update: its weighted values modulo 2^32, and the masks."""
        held = self._held(client, round, "keys")
        if "masked" in held:
            raise UserError(f"secure.aggregation: client {client} has masked an update in round {round} already")
        partners = self._partners(client, held, masks.clients)
        if client not in masks.clients or not n <= masks.largest <= masks.total:
            raise UserError(f"secure.aggregation: client {client} is not among those whose updates are added up")
        secrets = keys.Secrets(raw(held["secret"]))
        seeds = [(keys.derive(secrets.own, context), 1)]
        seeds += [(keys.pair_seed(secrets.pair, pair, context), sign(client, p)) for p, (_, pair) in partners.items()]
        sums = fixed_point.encode(up, n / masks.total, self.settings.range)
        add_masks(sums, seeds)
        self._store.put(round, {client: {**held, "masked": torch.tensor(masks.clients)}})
        return {name: torch.from_numpy(sums[name].view(np.int32)).reshape(p.shape) for name, p in up.items()}

    def _made_shares(self, client: int, task: M.Shares, given: Params) -> tuple[Params, Params]:
        held = self._held(client, task.round, "secret")
        if "keys" in held or client not in task.clients or len(set(task.clients)) < len(task.clients):
            raise UserError(
                f"secure.aggregation: client {client} shares its secrets once in round {task.round}, and with others"
            )
        peers = neighbours(ring(task.clients, self._seed, task.round), client, self.settings.neighbours)
        public = read(given, "keys", (2 * len(peers), keys.KEY)).view(len(peers), 2, keys.KEY)
        secrets = keys.Secrets(raw(held["secret"]))
        shares = secrets.shares([client, *peers], self.settings.needed(len(peers) + 1))
        boxes = [secrets.encrypt(shares[p], raw(key), client, p) for p, key in zip(peers, public[:, 0], strict=True)]
        known = {**held, "peers": torch.tensor(peers), "keys": public, "share": row(shares[client])}
        return known, {"boxes": rows(boxes)}

    def _released(self, client: int, task: M.Unmask, given: Params) -> tuple[Params, Params]:
        """One share of each neighbour, and of its own: of the client's own mask if its update is in the sum, of the
        pairwise masks if it was lost. Afterwards all that was known of the round is forgotten."""
        held = self._held(client, task.round, "masked")
        partners = self._partners(client, held, held["masked"].tolist())
        there = {client, *partners}.intersection(task.answered)
        if client not in there or len(there) < self.settings.needed(len(held["peers"]) + 1):
            raise UserError(
                f"secure.threshold = {self.settings.threshold:g}: of client {client} and its {len(held['peers'])} "
                f"neighbours, {len(there)} have answered, too few to remove masks"
            )
        secrets, boxes = keys.Secrets(raw(held["secret"])), read(given, "boxes", (len(partners), keys.BOX))
        said = [raw(held["share"])[keys.SHARE :]]
        for box, (peer, (key, _)) in zip(boxes, partners.items(), strict=True):
            try:
                pair, mask = secrets.decrypt(raw(box), key, peer, client)
            except (CryptoError, ValueError):
                raise UserError(f"secure.aggregation: the shares of client {peer} cannot be decrypted") from None
            said.append(mask if peer in there else pair)
        return {"round": held["round"]}, {"shares": rows(said)}

    def _held(self, client: int, round: int, name: str) -> Params:
        """What the client knows of a round, in which the step that gave it this name was taken."""
        held = self._store.get(client, round + 1)
        if name not in held or int(held["round"]) != round:
            raise UserError(f"secure.aggregation: client {client} is not ready for this message in round {round}")
        return held

    def _partners(self, client: int, held: Params, sharing: list[int]) -> dict[int, tuple[bytes, bytes]]:
        """Its neighbours among these clients, with their public keys."""
        there = set(sharing)
        found = zip(held["peers"].tolist(), held["keys"], strict=True)
        partners = {peer: (raw(public[0]), raw(public[1])) for peer, public in found if peer in there}
        if len(partners) + 1 < self.settings.needed(len(held["peers"]) + 1):
            raise UserError(
                f"secure.threshold = {self.settings.threshold:g}: {len(partners)} of the {len(held['peers'])} "
                f"neighbours of client {client} have shared their secrets, too few to restore masks"
            )
        return partners


def _made_keys(round: int) -> tuple[Params, Params]:
    secret = os.urandom(keys.KEY)
    known = {"round": torch.tensor(round), "secret": row(secret)}
    return known, {"keys": rows(keys.Secrets(secret).public)}


def sign(client: int, other: int) -> int:
    """With which a client adds the mask that it has in common with another."""
    return 1 if client < other else -1


def add_masks(sums: Mapping[str, np.ndarray], seeds: list[tuple[bytes, int]]) -> None:
    """Adds masks, or subtracts those with the sign -1."""
    for name, total in sums.items():
        for seed, sign in seeds:
            operation = np.add if sign > 0 else np.subtract
            operation(total, keys.mask(seed, name, total.size), out=total)


def round_context(method: Method, round: int, masks: M.Masks, down: Params) -> str:
    """What all clients of a round must have been told alike. Masks depend on it: where it differs they do not cancel,
    and the server learns nothing. What was received is part of it where the method sends all clients the same: models
    of which only one client's update is not zero would otherwise single that client out."""
    same = P.digest(split_once(down)[0]) if type(method).down is Method.down else ""
    return sha256(json.dumps([round, masks.clients, masks.total, masks.largest, same]).encode()).hexdigest()
