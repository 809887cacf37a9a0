"""SGPT: prompts that all samples share, prompts of groups, and keys by which each sample finds its group.

Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning"
(CVPR 2024), arXiv:2310.18285. One global model for all clients; what differs is which groups a client's samples select.

Reconstructed where the paper is silent: q_g counts what the server knows and, besides, the client's own selections of
this round (no client depends on another one's turn); the inverted order swaps the two blocks and nothing else; blocks
of the other ablations take as many epochs as one block. From the authors' code: the floor below q_g, uniform weights
for keys of rarely selected groups, the keys' initial values.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, Phase, State, Update, UserError
from .. import params as P
from ..method import unknown_stats
from ..models import ViT
from ..seeding import torch_rng
from ..tuning import FEATURES, Family, as_vit
from ..tunings.heads import SCALE, LinearHead, moments, scaled, scaling
from ..tunings.tokens import blank_cls, uniform

BLOCK_I, BLOCK_II = "shared", "group"  # phases of a round
_ALONE = f"{SCALE}.alone"  # of features without group prompts, which Block I trains on


class SharedGroup(LinearHead):
    """Shared prompts in early layers and those of the sample's group in later ones (Eq. 2, 3), keys, and a head.

    Prompts stay in the sequence: [cls, group prompts, shared prompts, patches]. Without group layers there are neither
    groups nor keys, without shared layers no shared prompts.
    """

    roles: ClassVar[dict[str, str]] = {"shared.": "body", "group.": "group", "keys": "keys", **LinearHead.roles}
    about = "shared + group prompts, keys, head"
    family = Family.TOKENS
    backbones = "transformers"
    images = True  # only the query is frozen
    uncached = "no group is selected, and prompts enter early layers"

    groups: int = Field(20, ge=1, description="number of groups (G)")
    shared_layers: tuple[int, ...] = Field((0, 1, 2), description="layers that shared prompts enter, counted from 0")
    group_layers: tuple[int, ...] = Field(
        (3, 4, 5), description="layers that group prompts enter, after the shared ones"
    )
    prompt_length: int = Field(1, ge=1, description="prompt tokens at each of their layers")
    query: Literal["last"] | int = Field(
        "last", description="layers whose cls is compared with the keys: all, with the final norm, or a number of them"
    )
    query_norm: bool = Field(
        False, description="also apply the final norm to a query of fewer layers (the authors' code)"
    )
    query_relu: bool = Field(False, description="apply a ReLU to the query (the authors' code)")
    initial: Literal["uniform", "code", "cls"] = Field(
        "uniform",
        description="prompts start uniform, shared ones at zero as in the authors' code, or group prompts around the "
        "class token of a blank image at their layer",
    )
    pool: Literal["mean", "cls"] = Field(
        "mean", description="the head sees the mean of cls and the tokens of group prompts, or cls alone"
    )

    def role_names(self) -> tuple[str, ...]:
        absent = (() if self.shared_layers else ("body",)) + (() if self.group_layers else ("group", "keys"))
        return tuple(role for role in super().role_names() if role not in absent)

    def check(self, model: Model) -> None:
        depth = as_vit(model).depth
        for setting, layers in (("shared_layers", self.shared_layers), ("group_layers", self.group_layers)):
            if len(set(layers)) < len(layers) or not all(0 <= i < depth for i in layers):
                raise UserError(
                    f'method.{setting} = {list(layers)} must be different layers of "{model.name}": 0 to {depth - 1}'
                )
        last = max(self.shared_layers, default=-1)
        if min(self.group_layers, default=depth) <= last:
            raise UserError(
                f"method.group_layers = {list(self.group_layers)} must all come after the shared ones, the last of "
                f"which is layer {last}"
            )
        if self.query != "last" and not 1 <= self.query <= depth:
            raise UserError(
                f'method.query = {self.query} must be "last" or a number of layers of "{model.name}": 1 to {depth}'
            )

    def init(self, model: Model, seed: int) -> Params:
        vit, g = as_vit(model), torch_rng(seed, "shared and group prompts")
        params = {f"shared.{i}": uniform(vit, g, self.prompt_length) for i in self.shared_layers}
        if self.initial == "code":
            params = {name: torch.zeros_like(p) for name, p in params.items()}
        if self.group_layers:
            params |= {f"group.{i}": uniform(vit, g, self.groups, self.prompt_length) for i in self.group_layers}
            if self.initial == "cls":
                states = blank_cls(vit, model.weights, max(self.group_layers) + 1)
                params |= {f"group.{i}": states[i] + params[f"group.{i}"].to(states[i]) for i in self.group_layers}
            width = params[f"group.{self.group_layers[0]}"].shape[-1]
            params["keys"] = orthogonal(self.groups, width, torch_rng(seed, "keys"))
        if self.standardise and self.two_scales:
            params |= self.start_scale(model, _ALONE)
        return {**params, **self.start_head(model)}

    @property
    def two_scales(self) -> bool:
        """Whether the head sees features both without and with group prompts, whose statistics differ."""
        return bool(self.shared_layers and self.group_layers)

    # ---- which group: Eq. 5

    def frozen_name(self, model: Model) -> str:
        if not self.group_layers:
            return ""
        vit = as_vit(model)
        layers, norm = self.asked(vit)
        if (layers, norm, self.query_relu) == (vit.depth, True, False):
            return FEATURES  # the same numbers: one entry of the cache
        return f"query: cls behind {layers} layers{', final norm' * norm}{', ReLU' * self.query_relu}"

    def frozen(self, model: Model, x: Tensor) -> Params:
        """The query h(x) (B, width), of the model without prompts."""
        vit, weights = as_vit(model), model.weights
        layers, norm = self.asked(vit)
        cls = vit.encode(weights, vit.embed(weights, x), stop=layers, first_tokens=1)[:, 0]
        cls = vit.norm(weights, cls) if norm else cls
        return {"query": cls.relu() if self.query_relu else cls}

    def asked(self, model: ViT) -> tuple[int, bool]:
        """After how many layers the query is read, and whether after the final norm."""
        return (model.depth, True) if self.query == "last" else (self.query, self.query_norm)

    def similarity(self, model: Model, params: Params, batch: Batch) -> Tensor:
        """cos(h(x), k_g), (B, G)."""
        query = batch.frozen["query"] if batch.frozen else self.frozen(model, batch.x)["query"]
        return F.normalize(query, dim=1) @ F.normalize(params["keys"], dim=1).T

    def select(self, model: Model, params: Params, batch: Batch) -> Tensor:
        """Eq. 5: the group of each sample, (B,)."""
        return self.similarity(model, params, batch).argmax(1)

    # ---- what the head sees

    def features(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor:
        chosen = self.select(model, params, batch) if self.group_layers else None
        return self.prompted(model, params, batch, chosen)

    def prompted(self, model: Model, params: Params, batch: Batch, chosen: Tensor | None) -> Tensor:
        """Features (B, width): the mean of cls and the tokens of the chosen groups (B,), after the final norm. Without
        groups, or with `pool = "cls"`: cls."""
        vit, weights = as_vit(model), model.weights
        prompts = {i: params[f"shared.{i}"] for i in self.shared_layers}
        first_tokens = 1
        if chosen is not None:
            prompts |= {i: params[f"group.{i}"][chosen] for i in self.group_layers}  # (B, length, width) each
            if self.pool == "mean":
                # Prompts of later layers stand before those of earlier ones: group prompts directly follow cls.
                first_tokens += self.prompt_length * len(self.group_layers)
        if "hidden" in batch.extra:
            h, start = batch.extra["hidden"], min(self.group_layers)
        else:
            h, start = vit.embed(weights, batch.x), 0
        h = vit.encode(weights, h, prompts, "stay", start=start, first_tokens=first_tokens)
        alone = chosen is None and self.two_scales
        return scaled(params, vit.norm(weights, h).mean(1), _ALONE if alone else SCALE)

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        sums = super().sums(model, params, batch, ctx)
        if self.standardise and self.two_scales:
            sums |= P.nested("alone", moments(self.prompted(model, params, batch, chosen=None)))
        return sums

    def constants(self, sums: Params) -> Params:
        alone = P.under(sums, "alone")
        return {**super().constants(sums), **(P.nested(_ALONE, scaling(alone)) if alone else {})}

    def hidden(self, model: Model, params: Params, batch: Batch) -> Params:
        """The input of the first group layer (B, tokens, width), with shared prompts; nothing if that is layer 0,
        before which there is nothing to save."""
        vit, weights = as_vit(model), model.weights
        first = min(self.group_layers)
        if not first:
            return {}
        prompts = {i: params[f"shared.{i}"] for i in self.shared_layers}
        return {"hidden": vit.encode(weights, vit.embed(weights, batch.x), prompts, "stay", stop=first)}


class Sgpt(Method):
    paper = "Deng et al., CVPR 2024"
    sends = "how often groups are selected"
    tuned = SharedGroup

    tuning: SharedGroup = Field(default_factory=SharedGroup, description="what is trained")
    batch_size: int = Field(40, ge=1, description="samples per step")
    lr: float = Field(0.01, gt=0, description="local learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(1e-5, ge=0, description="weight decay")
    training: Literal["bcd", "bcd-inverted", "joint", "shared", "group"] = Field(
        "bcd",
        description="shared prompts before group prompts, after them, at once, or one kind without the other (Table 3)",
    )
    calibrate: bool = Field(True, description="weigh the selection in training by how often groups were selected (q_g)")
    floor: float = Field(5e-4, ge=0, description="added to q_g")
    key_weights: Literal["selections", "samples"] = Field(
        "selections", description="weight of a client's key: how often it was selected, or the client's samples"
    )
    rare: int = Field(
        50, ge=0, description="up to this many selections per round, all clients' keys of a group have equal weights"
    )
    key_momentum: float = Field(0.5, ge=0, lt=1, description="momentum of the server's keys (alpha_k)")
    prompt_momentum: float = Field(0.5, ge=0, lt=1, description="momentum of the server's group prompts (alpha_g)")
    majority: bool = Field(False, description="a training batch takes the group of most of its samples (authors' code)")
    cache: bool = Field(
        True,
        description="compute what comes before the group prompts once per round while only they are trained; "
        "keeps tokens x width numbers per sample of the client",
    )

    @model_validator(mode="before")
    @classmethod
    def _leaves_out(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A kind of prompt that is not trained is not there either, and does not travel."""
        tuning = given.get("tuning", SharedGroup())
        for alone, setting in (("group", "shared_layers"), ("shared", "group_layers")):
            if given.get("training") == alone:
                tuning = tuning.model_copy(update={setting: ()})
            elif not getattr(tuning, setting):
                raise UserError(
                    f'method.{setting} = [] must name at least one layer; method.training="{alone}" does without'
                )
        return {**given, "tuning": tuning}

    # ---- client half: Algorithm 1

    def phases(self, round: int) -> tuple[Phase, ...]:
        if self.training == "joint":
            return (self.phase(name="joint"),)
        first = self.phase(("body", "head"), name=BLOCK_I)
        second = self.phase(("group", "keys", "head"), name=BLOCK_II)
        order = {"bcd": (first, second), "bcd-inverted": (second, first), "shared": (first,), "group": (second,)}
        return order[self.training]

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        # In Block II nothing before the group prompts changes: computed once per round instead of once per epoch. It
        # takes n x tokens x width numbers: 0.6 MB per sample of a ViT-B/16 at 224 pixels, 0.3 GB for 500 samples.
        return self.tuning.hidden(model, params, batch) if self.cache and ctx.within(BLOCK_II) else {}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        if ctx.within(BLOCK_I):  # Eq. 10: cross-entropy, without group prompts
            logits = self.tuning.head(model, params, self.tuning.prompted(model, params, batch, chosen=None))
            return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}
        # Eq. 11: cross-entropy with the prompts of the chosen groups, and the distance to their keys
        near = self.tuning.similarity(model, params, batch)  # (B, G)
        chosen = self.choose(near.detach(), batch, ctx)
        logits = self.tuning.head(model, params, self.tuning.prompted(model, params, batch, chosen))
        cross_entropy = F.cross_entropy(logits, batch.y, reduction="none")
        key = -near.gather(1, chosen[:, None])[:, 0]  # Eq. 6; its gradient is zero in all other keys
        return batch.mean(cross_entropy + key), {"selected": self.count(chosen, batch)}

    def choose(self, near: Tensor, batch: Batch, ctx: Context) -> Tensor:
        """The group (B,) in which each sample trains, given its similarity to the keys (B, G)."""
        score = (near - 1) * self.frequency(ctx) if self.calibrate else near  # below Eq. 6, or Eq. 5
        chosen = score.argmax(1)
        return self.count(chosen, batch).argmax().expand(len(chosen)) if self.majority else chosen

    def frequency(self, ctx: Context) -> Tensor:
        """q_g, (G,): the share of all selections that the server knows of and of the client's own ones in this round.
        All alike before the first one, which makes the calibrated selection the plain one."""
        seen = ctx.down["counts"]
        if "selected" in ctx.stats:
            seen = seen + ctx.stats["selected"]
        total = seen.sum()
        return torch.where(total > 0, seen / total.clamp(min=1) + self.floor, torch.ones_like(seen))

    def count(self, chosen: Tensor, batch: Batch) -> Tensor:
        """How many samples are in each group, (G,), leaving padding out."""
        own = (chosen[:, None] == torch.arange(self.tuning.groups, device=chosen.device)).float()
        return own.sum(0) if batch.weight is None else (own * batch.weight[:, None]).sum(0)

    def assign(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Tensor | None:
        """The group that each sample has after training (Eq. 5), (B,); None where there are no groups."""
        return self.tuning.select(model, params, batch) if self.tuning.group_layers else None

    # ---- server half

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, and how often each group was selected so far: counts (G,)."""
        return {**super().begin(model, init, seed), "counts": torch.zeros(self.tuning.groups)}

    def unusable(self, state: State, update: Update) -> str:
        why, selected = unknown_stats(update, ["selected"]), update.stats.get("selected")
        if why or selected is None:
            return why
        if selected.shape == state["counts"].shape and bool((selected >= 0).all()):
            return ""
        return f"expected counts for {self.tuning.groups} groups, got {selected.flatten()[:20].tolist()}"

    def aggregate(self, state: State, updates: list[Update]) -> State:
        """Means weighted by samples, keys by selections; momentum on group prompts and keys (Eq. 7)."""
        # In double precision, so that the order of updates does not show.
        ups = [{name: p.double() for name, p in u.up.items()} for u in updates]
        new = P.mean(ups, [u.n for u in updates])
        nothing = torch.zeros(self.tuning.groups)
        selected = torch.stack([u.stats.get("selected", nothing).double() for u in updates])  # (clients, G)
        total = selected.sum(0)
        if "keys" in new and self.key_weights == "selections":
            share = torch.where(total > self.rare, selected / total.clamp(min=1), 1 / len(updates))
            new["keys"] = (share[:, :, None] * torch.stack([up["keys"] for up in ups])).sum(0)
        rates = {"group": self.prompt_momentum, "keys": self.key_momentum}
        for name, p in new.items():
            rate = rates.get(self.tuning.role(name), 0.0)
            new[name] = (rate * state[name].double() + (1 - rate) * p).to(state[name].dtype)
        return {**state, **new, "counts": (state["counts"].double() + total).to(state["counts"].dtype)}


def orthogonal(rows: int, width: int, g: torch.Generator) -> Tensor:
    """(rows, width): Xavier's uniform numbers, made orthonormal by Gram-Schmidt. Only `width` rows can be orthogonal to
    one another: of more, every `width` of them are."""
    bound = math.sqrt(6 / (rows + width))
    keys = torch.empty(rows, width).uniform_(-bound, bound, generator=g).double()
    for i in range(rows):
        for before in keys[i - i % width : i]:
            keys[i] -= (keys[i] @ before) * before
        keys[i] /= keys[i].norm()
    return keys.float()
