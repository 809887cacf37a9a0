"""The server's half of secure aggregation: passes keys and shares on, adds up masked updates, and removes the masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from ..clients import messages as M
from ..clients.base import Clients
from ..errors import UserError
from ..method import Method
from ..params import Params
from ..phases import Update
from . import Secure, fixed_point, keys, neighbours, ring
from .site import add_masks, round_context, sign
from .tensors import raw, read, rows

_Shares = dict[int, dict[int, bytes]]  # by owner and holder


class MaskedSum:
    """The sum of one round's updates, and their mean once the masks are removed.

    `sizes`: samples of the clients that take part. `shared`: names, shapes and types of an update.
    """

    def __init__(
        self, settings: Secure, clients: Clients, sizes: Mapping[int, int], shared: Params, seed: int, round: int
    ) -> None:
        self._settings, self._clients, self._sizes, self._shared = settings, clients, sizes, shared
        self._seed, self._round = seed, round
        self._lost: dict[int, str] = {}
        self._public: dict[int, tuple[bytes, bytes]] = {}
        self._peers: dict[int, list[int]] = {}  # neighbours that share masks with a client
        self._needed = 0  # shares that restore a secret
        self._boxes: dict[tuple[int, int], bytes] = {}  # encrypted shares, by sender and recipient
        self._sums = {name: np.zeros(p.numel(), np.uint32) for name, p in shared.items()}
        self._seeds: list[tuple[bytes, int]] = []  # of the masks in the sum, with the signs that remove them
        self._samples = 0.0  # of the clients in the sum
        self.bytes_up, self.bytes_down = 0, 0  # of all messages but training

    # ---- before training

    def share(self) -> list[int]:
        """Has clients make keys and share their secrets; -> those that can train then, none if they are too few"""
        said = self._ask(M.Keys(round=self._round), {c: {} for c in self._sizes}, "keys", lambda c: (2, keys.KEY))
        made = sorted(said)
        if self._few(made, "made keys"):
            return []
        self._public = {client: (raw(said[client][0]), raw(said[client][1])) for client in made}
        order = ring(made, self._seed, self._round)
        peers = {client: neighbours(order, client, self._settings.neighbours) for client in made}
        self._needed = self._settings.needed(len(peers[made[0]]) + 1)
        sent = {c: {"keys": rows(key for p in peers[c] for key in self._public[p])} for c in made}
        found = self._ask(M.Shares(round=self._round, clients=made), sent, "boxes", lambda c: (len(peers[c]), keys.BOX))
        if self._few(sorted(found), "shared their secrets"):
            return []
        self._boxes = {(c, p): raw(box) for c in found for p, box in zip(peers[c], found[c], strict=True)}
        self._peers = {client: [p for p in peers[client] if p in found] for client in sorted(found)}
        return list(self._peers)

    @property
    def masks(self) -> M.Masks:
        """What those clients must know to mask their updates."""
        sizes = [self._sizes[client] for client in self._peers]
        return M.Masks(clients=list(self._peers), total=sum(sizes), largest=max(sizes, default=0))

    @property
    def lost(self) -> list[Update]:
        """In place of updates, clients that were lost before training."""
        return [Update(client, {}, {}, 0, error=why) for client, why in self._lost.items()]

    def _few(self, there: Sequence[int], what: str) -> bool:
        why = self._too_few(there, what)
        self._lost |= dict.fromkeys(there, why) if why else {}
        return bool(why)

    def _too_few(self, there: Sequence[int], what: str) -> str:
        enough, threshold = self._settings.needed(len(self._sizes)), self._settings.threshold
        if len(there) >= enough:
            return ""
        return f"{len(there)} of {len(self._sizes)} clients {what}, and secure.threshold = {threshold:g} needs {enough}"

    # ---- after training

    def add(self, item: Params, weight: float) -> None:
        """A masked update. Its weight is in it already."""
        for name, total in self._sums.items():
            total += item[name].flatten().numpy().view(np.uint32)
        self._samples += weight

    def unmask(self, method: Method, down: Params, answered: Sequence[int]) -> str:
        """Restores the masks of the sum, with the help of the clients in it; -> why that is not possible, if so.
        `down`: what clients have received."""
        why = self._too_few(answered, "answered")
        if why:
            return why
        sent = {c: {"boxes": rows(self._boxes[p, c] for p in self._peers[c])} for c in answered}
        task = M.Unmask(round=self._round, answered=list(answered))
        said = self._ask(task, sent, "shares", lambda c: (1 + len(self._peers[c]), keys.SHARE))
        shares: _Shares = {client: {} for client in self._peers}
        for holder, found in said.items():
            for owner, share in zip([holder, *self._peers[holder]], found, strict=True):
                shares[owner][holder] = raw(share)
        context = round_context(method, self._round, self.masks, down)
        try:
            for client in self._peers:
                self._seeds += (
                    [(keys.derive(self._restored(client, shares), context), -1)]
                    if client in answered
                    else self._pair_seeds(client, answered, shares, context)
                )
        except UserError as error:
            return str(error)
        return ""

    def value(self) -> Params:
        """The mean of what was added, without masks."""
        add_masks(self._sums, self._seeds)
        part = self._samples / self.masks.total
        return fixed_point.decode(self._sums, self._shared, part, self._settings.range)

    def _pair_seeds(self, lost: int, answered: Sequence[int], shares: _Shares, context: str) -> list[tuple[bytes, int]]:
        """Of the masks that clients in the sum have in common with one that was lost."""
        partners = [peer for peer in self._peers[lost] if peer in answered]
        if not partners:
            return []
        pair = self._restored(lost, shares)
        if keys.public(pair) != self._public[lost][1]:
            raise UserError(f"the shares of client {lost} do not restore its key")
        return [(keys.pair_seed(pair, self._public[peer][1], context), -sign(peer, lost)) for peer in partners]

    def _restored(self, client: int, shares: _Shares) -> bytes:
        """The secret of a client of which its neighbours have sent shares."""
        held = list(shares[client].items())
        if len(held) < self._needed:
            threshold = self._settings.threshold
            raise UserError(
                f"{len(held)} shares of client {client} came, and secure.threshold = {threshold:g} needs {self._needed}"
            )
        try:
            return keys.restore(dict(held[: self._needed]))
        except OverflowError:
            raise UserError(f"the shares of client {client} do not fit together") from None

    def _ask(
        self, task: M.Task, sent: Mapping[int, Params], name: str, shape: Callable[[int], tuple[int, ...]]
    ) -> dict[int, Tensor]:
        """What clients answer. Those that do not, or not as expected, are lost."""
        found = {}
        for reply in self._clients.ask(task, sent):
            self.bytes_down += reply.bytes_down
            self.bytes_up += reply.bytes_up
            try:
                if reply.error:
                    raise UserError(reply.error)
                found[reply.client] = read(reply.tensors, name, shape(reply.client))
            except UserError as error:
                self._lost[reply.client] = str(error)
        return found
