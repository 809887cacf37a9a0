"""DP2FL: a task prompt that all clients share, a data prompt of each client's own, both weighted by validation losses.

Chang et al., "Dual prompt personalized federated learning in foundation models" (Scientific Reports 15, 28026, 2025).
Its equations are rebuilt from its words (dp2fl_weights.py). The client's model is that of Khattak et al., "MaPLe:
Multi-modal Prompt Learning" (CVPR 2023).

A round: clients train both prompts, and evaluate their models on everybody's validation set. The server weights task
prompts and data prompts by the clients' summed losses into a global model (Eq. 7-8). Each client's own data prompt
moves towards those that did well on its own validation set (Eq. 9-17).

Validation data travel as images (`privacy = "open"`) or as patch embeddings (`embeddings`). With `sealed` moreover no
client learns whose set is whose, each loss travels encrypted for the set's owner, and clients compute their data prompt
themselves. What this does not do: a patch embedding can be turned back into its image, labels travel as they are, and
the server knows who sent which set and could compute every loss itself; a sum over a single set is that set's loss.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, ClassVar, Literal

import torch
from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from .. import params as P
from ..errors import UserError
from ..method import ONCE, Batch, Context, Holdings, Method, State, Update
from ..models import CLIP, Model, ViT
from ..models.base import dense, normal
from ..models.text import Sentences
from ..params import Params
from ..seeding import torch_rng
from ..training import CHUNK
from ..tuning import Tuning
from .dp2fl_weights import Rule, combine, distance, global_weights, local_weights

_DOUBLE = struct.Struct("<d")


class Coupled(Tuning):
    """MaPLe: text prompts at the first layers of a frozen CLIP, and linear maps that make the image prompts of them.

    The text prompts are DP2FL's task prompt P_T, the maps its data prompt P_D (Eq. 6 at every depth).
    """

    roles: ClassVar[dict[str, str]] = {"context": "body", "deep.": "body", "map.": "data"}
    about: ClassVar[str] = "task prompt + data prompt"
    backbones: ClassVar[str] = "CLIP with a ViT"

    context: int = Field(2, ge=1, description="prompt vectors at each layer that has some")
    depth: int = Field(9, ge=1, description="layers of both towers that prompts enter, from the first one on")
    context_init: str = Field(
        "a photo of a",
        description="words in front of the class name: the first `context` ones start the vectors, the others stay; "
        "with too few of them there are none, and vectors start from N(0, .02)",
    )

    def check(self, model: Model) -> None:
        if not isinstance(model, CLIP) or not isinstance(model.image_tower, ViT):
            raise UserError(
                f'backbone.name = "{model.name}": prompts in both towers need a CLIP whose image tower is a transformer'
            )
        most = min(model.image_tower.depth, model.text_tower.depth)
        if self.depth > most:
            raise UserError(
                f'method.depth = {self.depth} must be 1 to {most}, the layers of the smaller tower of "{model.name}"'
            )
        self.sentences(model)

    def words(self, model: Model) -> tuple[str, str]:
        """What the vectors start from (empty: from random numbers), and the words that stay with the class name."""
        assert isinstance(model, CLIP)
        words = self.context_init.split()
        first = " ".join(words[: self.context])
        if model.tokenizer is None or len(model.tokenizer.words(first)) != self.context:
            return "", "{}."
        return first, " ".join([*words[self.context :], "{}."])

    def sentences(self, model: Model) -> Sentences:
        assert isinstance(model, CLIP)
        return model.sentences(self.words(model)[1], self.context)

    def init(self, model: Model, seed: int) -> Params:
        assert isinstance(model, CLIP)
        assert model.width is not None
        g, width = torch_rng(seed, "coupled"), model.text_width
        first = self.words(model)[0]
        made = {"context": model.words(first) if first else normal(g, self.context, width)}
        made |= {f"deep.{i}": normal(g, self.context, width) for i in range(1, self.depth)}
        for i in range(self.depth):
            made[f"map.{i}.weight"], made[f"map.{i}.bias"] = dense(g, model.width, width)
        return P.to(made, model.weights["body.scale"].device)

    def why_not_cached(self, model: Model) -> str:
        return "prompts enter the first layer"

    def embed(self, model: Model, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, 1 + patches, width): what features() takes as `hidden` in place of images (Eq. 5)."""
        return _tower(model).embed(model.weights, x)

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        assert isinstance(model, CLIP)
        tower, weights = _tower(model), model.weights
        h = batch.frozen["hidden"] if "hidden" in batch.frozen else self.embed(model, batch.x)
        text = {0: params["context"], **self.deep(params)}
        prompts = {i: F.linear(p, params[f"map.{i}.weight"], params[f"map.{i}.bias"]) for i, p in text.items()}
        if batch.tokens is not None:  # a private prompt around this one; it enters in front
            prompts[0] = torch.cat([batch.tokens, prompts[0]])
        h = tower.encode(weights, h, prompts, "deep", first_tokens=1)
        return model.join(weights, tower.norm(weights, h[:, 0]))

    def deep(self, params: Params) -> dict[int, Tensor]:
        return {i: params[f"deep.{i}"] for i in range(1, self.depth)}

    def text(self, model: Model, params: Params) -> Tensor:
        """(classes, d)"""
        assert isinstance(model, CLIP)
        return model.text(model.weights, self.sentences(model), params["context"], self.deep(params))

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        assert isinstance(model, CLIP)
        return model.logits(model.weights, features, self.text(model, params))


def _tower(model: Model) -> ViT:
    assert isinstance(model, CLIP)
    assert isinstance(model.image_tower, ViT)
    return model.image_tower


class Dp2fl(Method):
    """The server's state, besides the global model under its own names:

    val.{client}.x, .y, .key  a client's validation set, and its public key (`sealed`)
    own.{client}.map.*        its data prompt, from its first round on (not `sealed`: there the client keeps it)
    init.*, joined.{client}   what newcomers start from unless it is the global model, and who is none any more

    A client without validation data has no data prompt of its own: it always goes on from the global one.
    """

    paper: ClassVar[str] = "Chang et al., Scientific Reports 2025"
    own_down: ClassVar[bool] = True
    tuned: ClassVar[type[Tuning]] = Coupled

    tuning: Coupled = Field(default_factory=Coupled, description="what is trained")
    batch_size: int = Field(4, ge=1, description="samples a step")
    lr: float = Field(0.035, gt=0, description="local learning rate")
    alpha: float = Field(1.2, ge=1, description="a data prompt is discarded from so many times the loss before on")
    beta: float = Field(0.2, ge=0, le=1, description="weight of all others together where none is an improvement")
    negatives: Rule = Field(
        "bounded", description="weights of data prompts that are no improvement: below all others, or in proportion"
    )
    gamma: float = Field(0.1, ge=0, description="factor of `negatives = proportional`")
    newcomer: Literal["global", "initglo", "init"] = Field(
        "global", description="a later client starts from the global model, from it with the first data prompt, or anew"
    )
    privacy: Literal["open", "embeddings", "sealed"] = Field(
        "embeddings", description="validation data travel as images, as embeddings, or these with losses encrypted"
    )

    @field_validator("tuning", mode="before")
    @classmethod
    def _unwrapped(cls, tuning: Any) -> Any:
        if isinstance(tuning, Tuning) and not isinstance(tuning, Coupled):
            raise UserError("method.name: Dp2fl tries each client's model on other clients' data, and takes no plug-in")
        return tuning

    # ---- client half

    def secrets(self) -> Params:
        return {"secret": _bytes(PrivateKey.generate().encode())} if self.privacy == "sealed" else {}

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """Its validation set, (n, C, H, W) or (n, 1 + patches, width), labels (n,), and its public key."""
        batches = list(own.val())
        if not batches:
            return {}
        x = [batch.x if self.privacy == "open" else self.tuning.embed(model, batch.x) for batch in batches]
        hello = {"x": torch.cat(x), "y": torch.cat([batch.y for batch in batches])}
        if self.privacy == "sealed":
            hello["key"] = _bytes(_private(own.private).public_key.encode())
        return hello

    def start(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        received = super().start(init, down, private, memory)
        if "common" in down:
            return received
        return {name: private.get(f"own.{name}", p) for name, p in received.items()}

    def report(self, model: Model, params: Params, ctx: Context) -> Params:
        """Losses loss_kj of the trained model: their sum over j as it is; each of them sealed, or with L besides."""
        sets = _sets(ctx.once)
        losses = self.losses(model, params, sets, ctx)
        stats = {"total": _number(math.fsum(losses.values()))}
        if self.privacy == "sealed":
            return {**stats, **{f"sealed.{key}": _seal(key, loss) for key, loss in losses.items()}}
        before = self.before(model, params, ctx)
        stats |= {f"loss.{j}": _number(loss) for j, loss in losses.items()}
        return stats if before is None else {**stats, "before": _number(before)}

    def keep(self, model: Model, params: Params, ctx: Context) -> Params:
        """For receive_second(): L, and the data prompt that the round began with."""
        before = self.before(model, params, ctx) if self.privacy == "sealed" else None
        if before is None:
            return {}
        old = {f"before.{name}": p for name, p in _maps(self.begun(params, ctx)).items()}
        return {**old, "before.loss": _bytes(_DOUBLE.pack(before))}  # as bytes: not every device has float64

    def receive_second(self, received: Params, private: Params) -> Params:
        """Opens what others found about this client's validation set, and moves its data prompt."""
        if "before.loss" not in private:
            return private
        rest = {name: v for name, v in private.items() if not name.startswith(("before.", "own."))}
        old = {name.removeprefix("before."): p for name, p in private.items() if name.startswith("before.map.")}
        count = sum(name.endswith(".sealed") for name in received)
        box = SealedBox(_private(private))
        losses = [_open(box, received[f"{i}.sealed"]) for i in range(count)]
        others = [{name: received[f"{i}.{name}"] for name in old} for i in range(count)]
        own = self.moved(old, _DOUBLE.unpack(_raw(private["before.loss"]))[0], losses, others)
        return {**rest, **{f"own.{name}": p for name, p in own.items()}}

    def begun(self, params: Params, ctx: Context) -> Params:
        """The model that the client began the round with."""
        return self.start(params, ctx.down, ctx.private, ctx.memory)

    def before(self, model: Model, params: Params, ctx: Context) -> float | None:
        """L: the loss of that model on the client's own validation set, if it has one."""
        if self.privacy == "sealed":
            mine = _private(ctx.private).public_key.encode().hex() if "secret" in ctx.private else ""
        else:
            mine = str(int(ctx.down["client"]))
        own = {name: s for name, s in _sets(ctx.once).items() if name == mine}
        return self.losses(model, self.begun(params, ctx), own, ctx)[mine] if own else None

    def losses(
        self, model: Model, params: Params, sets: Mapping[str, tuple[Tensor, Tensor]], ctx: Context
    ) -> dict[str, float]:
        """Mean cross-entropy on each set. Sets are never joined in a batch: a loss must not depend on their order."""
        assert isinstance(model, CLIP)
        text, found = self.tuning.text(model, params), {}
        for name, (x, y) in sets.items():
            total = 0.0
            for hidden, labels in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
                batch = Batch(hidden, labels, None, hidden.new_zeros(2), {})
                if self.privacy != "open":
                    batch = batch._replace(x=labels.new_empty(len(labels), 0), frozen={"hidden": hidden})
                logits = model.logits(model.weights, self.tuning.features(model, params, batch, ctx), text)
                total += float(F.cross_entropy(logits.cpu().double(), labels.cpu(), reduction="sum"))
            found[name] = total / len(y)
        return found

    # ---- both halves

    def moved(self, old: Params, before: float, losses: Sequence[float], others: Sequence[Params]) -> Params:
        """The local aggregation of a data prompt (Eq. 9-17): by the client itself if `sealed`, else by the server."""
        distances = [distance(other, old) for other in others]
        weights = local_weights(
            before, losses, distances, alpha=self.alpha, beta=self.beta, rule=self.negatives, gamma=self.gamma
        )
        return combine(old, others, weights)

    # ---- server half

    def begin(self, model: Model, init: Params, seed: int) -> State:
        fresh = {"global": {}, "initglo": _maps(init), "init": init}[self.newcomer]
        return {**self.shared(init), **{f"init.{name}": p for name, p in fresh.items()}}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        found = {f"val.{client}.{name}": v for name, v in hello.items()}
        return {**state, **found, **(self.joined([client]) if round == 0 else {})}

    def joined(self, clients: Sequence[int]) -> State:
        """Marks that clients are not, or no longer, to start from initial parameters."""
        return {} if self.newcomer == "global" else {f"joined.{client}": torch.ones(1) for client in clients}

    def down(self, state: State, client: int) -> Params:
        model = _global(state)
        if f"joined.{client}" not in state:  # until it has taken part in a round; also if it only is served
            model = {name: state.get(f"init.{name}", p) for name, p in model.items()}
        own = {name: state.get(f"own.{client}.{name}", p) for name, p in model.items()}
        if self.privacy != "sealed":
            own["client"] = torch.tensor(client)
        held = [name.split(".")[1] for name in state if name.startswith("val.") and name.endswith(".x")]
        # With keys for names, in their order, sets tell nothing of the clients that they come from.
        named = {_hex(state[f"val.{j}.key"]) if self.privacy == "sealed" else j: j for j in held}
        sets = {
            f"{ONCE}set.{name}.{part}": state[f"val.{j}.{part}"] for name, j in sorted(named.items()) for part in "xy"
        }
        return {**own, **sets}

    def unusable(self, state: State, update: Update) -> str:
        held = [name.split(".")[1] for name in state if name.startswith("val.") and name.endswith(".x")]
        if self.privacy == "sealed":
            losses = ["total"]
            sealed = [f"sealed.{_hex(state[f'val.{j}.key'])}" for j in held]
        else:
            losses, sealed = ["total", *(f"loss.{j}" for j in held)], []
        missing = [name for name in (*losses, *sealed) if name not in update.stats]
        if missing:
            return "losses on other validation sets than it was sent"
        told = [update.stats[name] for name in (*losses, *(["before"] if "before" in update.stats else []))]
        if any(loss.numel() != 1 or float(loss) < 0 for loss in told):
            return "losses that are none"
        return ""

    def aggregate(self, state: State, updates: list[Update]) -> State:
        weights = global_weights([float(u.stats["total"]) for u in updates])
        made = {**state, **P.mean([u.up for u in updates], weights), **self.joined([u.client for u in updates])}
        if self.privacy == "sealed":
            return made
        ordered = _in_order(updates)
        others = [_maps(u.up) for u in ordered]
        for u in updates:
            if "before" in u.stats:
                losses = [float(other.stats[f"loss.{u.client}"]) for other in ordered]
                own = self.moved(_maps(u.sent), float(u.stats["before"]), losses, others)
                made |= {f"own.{u.client}.{name}": p for name, p in own.items()}
        return made

    def send_second(self, state: State, updates: list[Update]) -> dict[int, Params]:
        """If sealed: to each participant with a validation set, all trained data prompts, and what their models lost
        on its set. Nothing says whose they are."""
        if self.privacy != "sealed":
            return {}
        ordered = _in_order(updates)
        maps = {f"{i}.{name}": p for i, u in enumerate(ordered) for name, p in _maps(u.up).items()}
        sent = {}
        for client in (u.client for u in updates if f"val.{u.client}.key" in state):
            key = _hex(state[f"val.{client}.key"])
            sent[client] = {**maps, **{f"{i}.sealed": u.stats[f"sealed.{key}"] for i, u in enumerate(ordered)}}
        return sent

    def common(self, state: State) -> Params:
        return {**_global(state), "common": torch.ones(1)}


def _global(state: State) -> Params:
    return {name: p for name, p in state.items() if name.startswith(tuple(Coupled.roles))}


def _maps(params: Params) -> Params:
    """The data prompt."""
    return {name: p for name, p in params.items() if name.startswith("map.")}


def _sets(once: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """Validation sets by their names: the client's number, or if sealed the owner's public key."""
    names = [name.split(".")[1] for name in once if name.startswith("set.") and name.endswith(".x")]
    return {name: (once[f"set.{name}.x"], once[f"set.{name}.y"]) for name in names}


def _in_order(updates: Sequence[Update]) -> list[Update]:
    """By a digest of their data prompts: tells nothing of who sent them, and is the same in every mode and run."""
    return sorted(updates, key=lambda u: sha256(b"".join(map(_raw, _maps(u.up).values()))).digest())


# ---- sealed boxes: anyone can close one with the public key, only the owner of the private key opens it


def _seal(key: str, loss: float) -> Tensor:
    """A loss as 8 bytes, encrypted: uint8 (56,)."""
    return _bytes(SealedBox(PublicKey(bytes.fromhex(key))).encrypt(_DOUBLE.pack(loss)))


def _open(box: SealedBox[PrivateKey], sealed: Tensor) -> float:
    """Infinite, and so discarded, if it does not open."""
    try:
        return float(_DOUBLE.unpack(box.decrypt(_raw(sealed)))[0])
    except (CryptoError, struct.error):
        return math.inf


def _private(private: Params) -> PrivateKey:
    return PrivateKey(_raw(private["secret"]))


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _raw(p: Tensor) -> bytes:
    return p.detach().cpu().contiguous().numpy().tobytes()


def _hex(key: Tensor) -> str:
    return _raw(key).hex()


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
