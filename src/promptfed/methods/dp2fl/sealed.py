"""DP2FL's anonymous validation: `privacy = "sealed"`.

No client learns whose validation set is whose, each loss is sent encrypted for the set's owner, and clients compute
their data prompt themselves. What this does not do: the server knows who sent which set and could compute every loss
itself, and a sum over a single set is that set's loss.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from nacl.public import PrivateKey, SealedBox
from pydantic import Field

from ... import Context, Model, Params, State, Update
from ... import params as P
from ...method import unknown_stats
from ...phases import Holdings
from . import Dp2fl
from .boxes import DOUBLE, SEALED, from_bytes, private_key, seal, unseal
from .data_prompt import in_order, maps, raw
from .validation import number, received_sets


class SealedDp2fl(Dp2fl):
    """A set's name is its owner's public key. A sealed box is closed with the public key, and opened with the private
    one that only the owner has."""

    sealed: ClassVar[bool] = True

    privacy: Literal["sealed"] = Field("sealed", description="embeddings of validation data, with encrypted losses")

    # ---- first contact

    def secrets(self) -> Params:
        return {"secret": from_bytes(PrivateKey.generate().encode())}

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """Its validation set, and its public key."""
        hello = super().enroll(model, init, own)
        return {**hello, "key": from_bytes(private_key(own.private).public_key.encode())} if hello else {}

    # ---- a round

    def sets(self, state: State) -> dict[str, Params]:
        """By public keys, and sent in their order: nothing tells which client a set comes from."""
        return {raw(data["key"]).hex(): data for data in super().sets(state).values()}

    def down(self, state: State, client: int) -> Params:
        return {**self.own(state, client), **self.sent_sets(state)}

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        received = super().start(init, down, private, memory)
        own = {} if "common" in down else P.under(private, "own")
        return {name: own.get(name, p) for name, p in received.items()}

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """The sum of the losses in the clear, each of them sealed for the owner of the set."""
        losses = self.losses(model, params, received_sets(ctx), ctx)
        sealed = {f"sealed.{key}": seal(key, loss) for key, loss in losses.items()}
        return {"total": number(math.fsum(losses.values())), **sealed}

    def own_set(self, ctx: Context) -> str:
        return private_key(ctx.private).public_key.encode().hex() if "secret" in ctx.private else ""

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """For receive_second(): L, and the data prompt that the round started with."""
        before = self.before(model, params, ctx)
        if before is None:
            return {}
        loss = from_bytes(DOUBLE.pack(before))  # as bytes: not every device has float64
        return P.nested("before", {**maps(self.begun(params, ctx)), "loss": loss})

    def unusable(self, state: State, update: Update) -> str:
        sealed = [f"sealed.{key}" for key in self.sets(state)]
        if why := unknown_stats(update, ["total", *sealed]):
            return why
        if not update.stats.keys() >= set(sealed):
            return "no losses on some of the validation sets that it was sent"
        if any(update.stats[name].numel() != SEALED for name in sealed):
            return f"sealed losses must have {SEALED} bytes each"
        return self.faulty(update, ["total"])

    def aggregate(self, state: State, updates: list[Update]) -> State:
        return self.averaged(state, updates)

    def send_second(self, state: State, updates: list[Update]) -> dict[int, Params]:
        """To each participant with a validation set: all trained data prompts and the losses of their models on its
        set, without saying whose they are."""
        ordered = in_order(updates)
        prompts: Params = {}
        for i, u in enumerate(ordered):
            prompts |= P.nested(str(i), maps(u.up))
        sent = {}
        for client in (u.client for u in updates if f"val.{u.client}.key" in state):
            key = raw(state[f"val.{client}.key"]).hex()
            sent[client] = {**prompts, **{f"{i}.sealed": u.stats[f"sealed.{key}"] for i, u in enumerate(ordered)}}
        return sent

    def receive_second(self, received: Params, private: Params) -> Params:
        """Opens the losses of the others' models on this client's validation set, and moves its data prompt."""
        if "before.loss" not in private:
            return private
        rest = {name: v for name, v in private.items() if not name.startswith(("before.", "own."))}
        old, box = P.under(private, "before"), SealedBox(private_key(private))
        before = DOUBLE.unpack(raw(old.pop("loss")))[0]
        others = [P.under(received, str(i)) for i in range(sum(name.endswith(".sealed") for name in received))]
        losses = [unseal(box, other["sealed"]) for other in others]
        return {**rest, **P.nested("own", self.moved(old, before, losses, others))}

    def common(self, state: State) -> Params:
        return {**super().common(state), "common": torch.ones(1)}  # so that start() leaves the client's own prompt out
