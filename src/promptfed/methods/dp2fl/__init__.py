"""DP2FL: a task prompt that all clients share and a data prompt per client, both weighted by validation losses.

Chang et al., "Dual prompt personalized federated learning in foundation models" (Scientific Reports 15, 28026, 2025).
Its equations are rebuilt from its words. The client's model is MaPLe (tunings/maple.py).

A round: clients train both prompts, and evaluate their models on all clients' validation sets. The server weights task
prompts and data prompts by the clients' summed losses into a global model (Eq. 7-8). Each client's own data prompt
moves towards those that did well on its own validation set (Eq. 9-17).

Validation data are sent as images (`privacy = "open"`), as patch embeddings (`embeddings`), or these with every loss
encrypted (`sealed`, sealed.py). A patch embedding can be turned back into its image, and labels are sent in the clear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from ... import Batch, Context, Method, Model, Params, State, Update, UserError
from ... import params as P
from ...method import ONCE, unknown_stats
from ...phases import Holdings
from ...training import CHUNK
from ...tuning import as_clip
from ...tunings.maple import Maple

Rule = Literal["bounded", "paper", "proportional"]  # what a retained negative client weighs beside positive ones
EPS = 1e-5  # added to a distance (Eq. 14)


class Dp2fl(Method):
    """A client without validation data has no data prompt of its own: it always continues from the global one."""

    paper = "Chang et al., Scientific Reports 2025"
    sends = "validation data, losses on those of all"
    own_down = True
    tuned = Maple
    sealed: ClassVar[bool] = False

    tuning: Maple = Field(default_factory=Maple, description="what is trained")
    batch_size: int = Field(4, ge=1, description="samples per step")
    lr: float = Field(0.035, gt=0, description="local learning rate")
    alpha: float = Field(
        1.2, ge=1, description="a data prompt is discarded if its loss is at least this many times the loss before"
    )
    beta: float = Field(0.2, ge=0, le=1, description="total weight of the others if none is an improvement")
    negatives: Rule = Field(
        "bounded",
        description="weights of data prompts that are no improvement: below all others, as the paper's Eq. 15-17 have "
        "them, or proportional to the loss",
    )
    gamma: float = Field(0.1, ge=0, description="factor of `negatives = proportional`")
    newcomer: Literal["global", "initglo", "init"] = Field(
        "global",
        description="a later client starts from the global model, from it with the initial data prompt, or from the "
        "initial model",
    )
    privacy: Literal["open", "embeddings", "sealed"] = Field(
        "embeddings", description="validation data are sent as images, as embeddings, or these with encrypted losses"
    )

    @model_validator(mode="after")
    def _in_its_class(self) -> Dp2fl:
        if (self.privacy == "sealed") is not self.sealed:
            other = "Dp2fl" if self.sealed else "SealedDp2fl"
            raise UserError(f'method.privacy = "{self.privacy}" is not a mode of {type(self).__name__}, use {other}')
        return self

    # ---- server: state

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The global model under its own names, and

        val.{client}.x, .y       a client's validation set (`sealed`: also .key, its public key)
        own.{client}.map.*       its data prompt, from its first round on (`sealed`: the client keeps it)
        init.*, joined.{client}  unless newcomers start from the global model: what they start from, and who is none
        """
        fresh = {"global": {}, "initglo": maps(init), "init": init}[self.newcomer]
        return {**self.shared(init), **P.nested("init", fresh)}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        return {**state, **P.nested(f"val.{client}", hello), **(self.joined([client]) if round == 0 else {})}

    def joined(self, clients: Sequence[int]) -> State:
        """Marks clients that do not, or no longer, start from initial parameters."""
        return {} if self.newcomer == "global" else {f"joined.{client}": torch.ones(1) for client in clients}

    def sets(self, state: State) -> dict[str, Params]:
        """Validation sets {x, y} by the names that clients know them by: their owners' numbers."""
        return P.groups(P.under(state, "val"))

    # ---- a round

    def down(self, state: State, client: int) -> Params:
        return {**self.own(state, client), "client": torch.tensor(client), **self.sent_sets(state)}

    def own(self, state: State, client: int) -> Params:
        """The client's model, as far as the server knows it."""
        model = _global(state)
        if f"joined.{client}" not in state:  # until it has taken part in a round, also if it is only served
            model |= P.under(state, "init")
        return {**model, **P.under(state, f"own.{client}")}

    def sent_sets(self, state: State) -> Params:
        sets = sorted(self.sets(state).items())
        return P.nested(ONCE, {f"set.{name}.{part}": data[part] for name, data in sets for part in "xy"})

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """Its validation set: x (n, C, H, W) or (n, 1 + patches, width), labels y (n,)."""
        batches = list(own.val())
        if not batches:
            return {}
        x = [batch.x if self.privacy == "open" else self.tuning.embed(model, batch.x) for batch in batches]
        return {"x": torch.cat(x), "y": torch.cat([batch.y for batch in batches])}

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """Losses loss_kj of the trained model on each set j, their sum, and L."""
        losses = self.losses(model, params, received_sets(ctx), ctx)
        before = self.before(model, params, ctx)
        return {
            "total": number(math.fsum(losses.values())),
            **{f"loss.{j}": number(loss) for j, loss in losses.items()},
            **({} if before is None else {"before": number(before)}),
        }

    def own_set(self, ctx: Context) -> str:
        """The name of the client's own validation set, whether or not it has one."""
        return str(int(ctx.down["client"]))

    def begun(self, params: Params, ctx: Context) -> Params:
        """The model that the client started the round with."""
        return self.start(params, ctx.down, ctx.private, ctx.memory)

    def before(self, model: Model, params: Params, ctx: Context) -> float | None:
        """L: the loss of that model on the client's own validation set, if it has one."""
        mine = self.own_set(ctx)
        own = {name: data for name, data in received_sets(ctx).items() if name == mine}
        return self.losses(model, self.begun(params, ctx), own, ctx)[mine] if own else None

    def losses(self, model: Model, params: Params, sets: Mapping[str, Params], ctx: Context) -> dict[str, float]:
        """Mean cross-entropy on each set. Sets never share a batch: a loss must not depend on their order."""
        text, found = self.tuning.text(model, params), {}
        for name, data in sets.items():
            total = 0.0
            for x, y in zip(torch.split(data["x"], CHUNK), torch.split(data["y"], CHUNK), strict=True):
                batch = Batch(x, y, None, x.new_zeros(2), {})
                if self.privacy != "open":
                    batch = batch._replace(x=y.new_empty(len(y), 0), frozen={"hidden": x})
                logits = as_clip(model).logits(model.weights, self.tuning.features(model, params, batch, ctx), text)
                total += float(F.cross_entropy(logits.cpu().double(), y.cpu(), reduction="sum"))
            found[name] = total / len(data["y"])
        return found

    def unusable(self, state: State, update: Update) -> str:
        reported = ["total", *(f"loss.{name}" for name in self.sets(state))]
        return unknown_stats(update, [*reported, "before"]) or self.faulty(update, reported, optional=["before"])

    def faulty(self, update: Update, losses: Sequence[str], optional: Sequence[str] = ()) -> str:
        if not update.stats.keys() >= set(losses):
            return "no losses on some of the validation sets that it was sent"
        told = [update.stats[name] for name in (*losses, *optional) if name in update.stats]
        if any(loss.numel() != 1 or float(loss) < 0 for loss in told):
            return "losses must be single non-negative numbers"
        return ""

    def aggregate(self, state: State, updates: list[Update]) -> State:
        made = self.averaged(state, updates)
        ordered = in_order(updates)
        others = [maps(u.up) for u in ordered]
        for u in updates:
            if "before" in u.stats:
                losses = [float(other.stats[f"loss.{u.client}"]) for other in ordered]
                own = self.moved(maps(u.sent), float(u.stats["before"]), losses, others)
                made |= P.nested(f"own.{u.client}", own)
        return made

    def averaged(self, state: State, updates: list[Update]) -> State:
        """The global model (Eq. 7-8)."""
        weights = global_weights([float(u.stats["total"]) for u in updates])
        return {**state, **P.mean([u.up for u in updates], weights), **self.joined([u.client for u in updates])}

    def moved(self, old: Params, before: float, losses: Sequence[float], others: Sequence[Params]) -> Params:
        """A client's data prompt after local aggregation (Eq. 9-17)."""
        distances = [distance(other, old) for other in others]
        weights = local_weights(
            before, losses, distances, alpha=self.alpha, beta=self.beta, rule=self.negatives, gamma=self.gamma
        )
        return combine(old, others, weights)

    def common(self, state: State) -> Params:
        return _global(state)


def _global(state: State) -> Params:
    return {name: p for name, p in state.items() if name.startswith(tuple(Maple.roles))}


def maps(params: Params) -> Params:
    """The data prompt."""
    return {name: p for name, p in params.items() if name.startswith("map.")}


def received_sets(ctx: Context) -> dict[str, Params]:
    """Validation sets {x, y} by name."""
    return P.groups(P.under(ctx.once, "set"))


def in_order(updates: Sequence[Update]) -> list[Update]:
    """By a digest of their data prompts: reveals nothing about who sent them, and is the same in every mode and run."""
    return sorted(updates, key=lambda u: sha256(b"".join(map(raw, maps(u.up).values()))).digest())


def raw(p: Tensor) -> bytes:
    return p.detach().cpu().contiguous().numpy().tobytes()


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# ---- the rules of both aggregations, Eq. 7-17, as functions of plain numbers. Everything is float64, and sums are
# rounded once (`fsum`): a result depends neither on an order nor on a number of threads.


def global_weights(totals: Sequence[float]) -> list[float]:
    """Eq. 8. totals[k] = sum_j loss_kj, of client k's model on all sets: w_k = (S - totals[k]) / (S (K - 1)).

    They sum to 1. Equal ones where there is nothing to tell clients apart (S = 0); a client alone has weight 1.
    """
    k, s = len(totals), math.fsum(totals)
    if k == 1 or s <= 0:
        return [1 / k] * k
    return [(s - total) / (s * (k - 1)) for total in totals]


def local_weights(
    before: float,
    losses: Sequence[float],
    distances: Sequence[float],
    *,
    alpha: float,
    beta: float,
    rule: Rule = "bounded",
    gamma: float = 0.0,
) -> list[float]:
    """Eq. 9-11 and 13-17, for client k: what each of K trained data prompts weighs in its own one.

    before: L, the loss on k's validation set before the round; losses (K,): those of the K trained models on it;
    distances (K,): of the K data prompts from k's own one. Positive clients have a loss below L, retained negative ones
    one in [L, alpha L), and the others are discarded: weight 0. The weights sum to 1; to beta where nobody is positive;
    to 0 where all are discarded, or L is no number.
    """
    if not math.isfinite(before):
        return [0.0] * len(losses)
    loss = np.asarray(losses, np.float64)
    positive = loss < before
    retained = (loss >= before) & (loss < alpha * before)
    # Eq. 14: > 0 for a positive client, <= 0 for a retained negative one.
    raw = np.where(positive | retained, before - loss, 0.0) / (np.asarray(distances, np.float64) + EPS)
    if positive.any():
        f = np.where(positive, raw, 0.0)
        f[retained] = _retained(raw[retained], float(raw[positive].min()), rule, gamma)
        return list(map(float, f / math.fsum(f)))
    weights = np.zeros_like(loss)
    count, s = int(retained.sum()), math.fsum(raw[retained])
    if count == 1 or s == 0:  # one alone, or all with a loss of exactly L
        weights[retained] = beta / max(count, 1)
    else:
        weights[retained] = beta * (s - raw[retained]) / (s * (count - 1))
    return list(map(float, weights))


def _retained(raw: np.ndarray, weakest: float, rule: Rule, gamma: float) -> np.ndarray:
    """f(x) of retained negatives, x <= 0, beside positive clients of which the weakest has raw weight m.

    bounded: m M / x, where M is the x nearest to 0: at most m, and falling as the loss grows. M = 0: m where x = 0,
    and 0 elsewhere, which is the limit. proportional: gamma |x|, which grows with the loss and has no bound. paper: the
    same with gamma = m / |M| (M below 0), which gives the best one the weight m and all worse ones more.
    """
    below = raw[raw < 0]
    if rule == "paper":
        gamma = weakest / float(-below.max()) if below.size else 0.0
    if rule != "bounded":
        return np.asarray(gamma * np.abs(raw))
    nearest = max(raw, default=0.0)
    return np.where(raw == 0, weakest, 0.0) if nearest == 0 else np.asarray(weakest * (nearest / raw))


def distance(a: Params, b: Params) -> float:
    """Euclidean, over the names of b, in float64."""
    # NumPy's sum does not depend on the number of threads.
    return math.sqrt(math.fsum(float(np.square(_array(a, name) - _array(b, name)).sum()) for name in b))


def combine(own: Params, others: Sequence[Params], weights: Sequence[float]) -> Params:
    """Eq. 12: own + sum_i w_i (others_i - own), in float64 and in the given order."""
    made: Params = {}
    for name, p in own.items():
        base = p.cpu().double()
        moved = base.clone()
        for other, weight in zip(others, weights, strict=True):
            if weight:
                moved += weight * (other[name].cpu().double() - base)
        made[name] = moved.to(p)
    return made


def _array(params: Params, name: str) -> np.ndarray:
    return params[name].detach().cpu().double().numpy()
