"""Where the published files keep the weights: names and shapes of four layouts, and what each weight becomes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..transformer import Activation

Shape = tuple[int, ...]


class Entry(NamedTuple):
    ours: str
    theirs: tuple[str, ...]
    shape: Shape  # of each of theirs
    make: Callable[..., Tensor] = lambda *parts: torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Transformer:
    depth: int
    width: int
    heads: int
    hidden: int  # units of the MLP
    eps: float
    activation: Activation


@dataclass(frozen=True)
class Image:
    """Square pictures in square patches."""

    side: int
    patch: int
    channels: int = 3

    @property
    def positions(self) -> int:
        return 1 + (self.side // self.patch) ** 2


@dataclass(frozen=True)
class Text:
    vocabulary: int
    length: int


@dataclass(frozen=True)
class Convolutions:
    side: int
    blocks: tuple[int, ...]
    width: int  # channels behind the stem

    @property
    def heads(self) -> int:
        return self.width * 32 // 64


class Parts(NamedTuple):
    """What a layout calls the parts of a layer, and how weight and bias are joined to the names of qkv."""

    layer: str
    norm1: str
    qkv: tuple[str, ...]  # one tensor, or three
    proj: str
    norm2: str
    mlp_in: str
    mlp_out: str
    join: str = "."


VIT = Parts(
    "encoder.layer",
    "layernorm_before",
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attention.output.dense",
    "layernorm_after",
    "intermediate.dense",
    "output.dense",
)
TIMM = Parts("blocks", "norm1", ("attn.qkv",), "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
CLIP = Parts(
    "encoder.layers",
    "layer_norm1",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj",
    "layer_norm2",
    "mlp.fc1",
    "mlp.fc2",
)
OPEN_CLIP = Parts(
    "transformer.resblocks", "ln_1", ("attn.in_proj",), "attn.out_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", join="_"
)


def vit_transformers(image: Image, t: Transformer, prefix: str = "") -> Iterator[Entry]:
    """ViTModel; with prefix "vit." inside ViTForImageClassification."""
    at = f"{prefix}embeddings"
    yield Entry("body.cls", (f"{at}.cls_token",), (1, 1, t.width))
    yield Entry("body.position", (f"{at}.position_embeddings",), (1, image.positions, t.width))
    yield from _patches("body", f"{at}.patch_embeddings.projection", image, t.width, bias=True)
    yield from _layers("body", prefix, VIT, t)
    yield from _norm("body.norm", f"{prefix}layernorm", t.width)


def vit_timm(image: Image, t: Transformer) -> Iterator[Entry]:
    yield Entry("body.cls", ("cls_token",), (1, 1, t.width))
    yield Entry("body.position", ("pos_embed",), (1, image.positions, t.width))
    yield from _patches("body", "patch_embed.proj", image, t.width, bias=True)
    yield from _layers("body", "", TIMM, t)
    yield from _norm("body.norm", "norm", t.width)


def clip_transformers(image: Image, i: Transformer, text: Text, t: Transformer, joint: int) -> Iterator[Entry]:
    """CLIPModel."""
    at, theirs = "body.image", "vision_model.embeddings"
    yield Entry(f"{at}.cls", (f"{theirs}.class_embedding",), (i.width,), lambda p: p.reshape(1, 1, -1))
    yield Entry(
        f"{at}.position", (f"{theirs}.position_embedding.weight",), (image.positions, i.width), lambda p: p[None]
    )
    yield from _patches(at, f"{theirs}.patch_embedding", image, i.width, bias=False)
    yield from _norm(f"{at}.norm_pre", "vision_model.pre_layrnorm", i.width)  # spelt so
    yield from _layers(at, "vision_model.", CLIP, i)
    yield from _norm(f"{at}.norm", "vision_model.post_layernorm", i.width)
    yield Entry(f"{at}.proj", ("visual_projection.weight",), (joint, i.width))
    at, theirs = "body.text", "text_model.embeddings"
    yield Entry(f"{at}.tokens", (f"{theirs}.token_embedding.weight",), (text.vocabulary, t.width))
    yield Entry(f"{at}.position", (f"{theirs}.position_embedding.weight",), (text.length, t.width))
    yield from _layers(at, "text_model.", CLIP, t)
    yield from _norm(f"{at}.norm", "text_model.final_layer_norm", t.width)
    yield Entry(f"{at}.proj", ("text_projection.weight",), (joint, t.width))
    yield Entry("body.scale", ("logit_scale",), ())


def clip_open_clip(
    image: Image | Convolutions, i: Transformer | None, text: Text, t: Transformer, joint: int
) -> Iterator[Entry]:
    """OpenAI's own names, which open_clip keeps. Projections are stored for vectors that stand on their left."""
    if isinstance(image, Convolutions):
        yield from _resnet(image, joint)
    else:
        assert i is not None
        at, theirs = "body.image", "visual"
        yield Entry(f"{at}.cls", (f"{theirs}.class_embedding",), (i.width,), lambda p: p.reshape(1, 1, -1))
        yield Entry(
            f"{at}.position", (f"{theirs}.positional_embedding",), (image.positions, i.width), lambda p: p[None]
        )
        yield from _patches(at, f"{theirs}.conv1", image, i.width, bias=False)
        yield from _norm(f"{at}.norm_pre", f"{theirs}.ln_pre", i.width)
        yield from _layers(at, f"{theirs}.", OPEN_CLIP, i)
        yield from _norm(f"{at}.norm", f"{theirs}.ln_post", i.width)
        yield Entry(f"{at}.proj", (f"{theirs}.proj",), (i.width, joint), _transposed)
    at = "body.text"
    yield Entry(f"{at}.tokens", ("token_embedding.weight",), (text.vocabulary, t.width))
    yield Entry(f"{at}.position", ("positional_embedding",), (text.length, t.width))
    yield from _layers(at, "", OPEN_CLIP, t)
    yield from _norm(f"{at}.norm", "ln_final", t.width)
    yield Entry(f"{at}.proj", ("text_projection",), (t.width, joint), _transposed)
    yield Entry("body.scale", ("logit_scale",), ())


def _layers(ours: str, theirs: str, parts: Parts, t: Transformer) -> Iterator[Entry]:
    for i in range(t.depth):
        at, their = f"{ours}.blocks.{i}", f"{theirs}{parts.layer}.{i}."
        yield from _norm(f"{at}.norm1", their + parts.norm1, t.width)
        yield from _norm(f"{at}.norm2", their + parts.norm2, t.width)
        rows = 3 * t.width // len(parts.qkv)
        for kind, shape in (("weight", (rows, t.width)), ("bias", (rows,))):
            yield Entry(f"{at}.qkv.{kind}", tuple(f"{their}{part}{parts.join}{kind}" for part in parts.qkv), shape)
        yield from _linear(f"{at}.proj", their + parts.proj, t.width, t.width)
        yield from _linear(f"{at}.mlp.in", their + parts.mlp_in, t.hidden, t.width)
        yield from _linear(f"{at}.mlp.out", their + parts.mlp_out, t.width, t.hidden)


def _linear(ours: str, theirs: str, outputs: int, inputs: int) -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (f"{theirs}.weight",), (outputs, inputs))
    yield Entry(f"{ours}.bias", (f"{theirs}.bias",), (outputs,))


def _norm(ours: str, theirs: str, width: int) -> Iterator[Entry]:
    for kind in ("weight", "bias"):
        yield Entry(f"{ours}.{kind}", (f"{theirs}.{kind}",), (width,))


def _patches(ours: str, theirs: str, image: Image, width: int, bias: bool) -> Iterator[Entry]:
    shape = (width, image.channels, image.patch, image.patch)
    yield Entry(f"{ours}.patch.weight", (f"{theirs}.weight",), shape)
    if bias:
        yield Entry(f"{ours}.patch.bias", (f"{theirs}.bias",), shape[:1])


def _transposed(p: Tensor) -> Tensor:
    return p.T.contiguous()


def _resnet(image: Convolutions, joint: int) -> Iterator[Entry]:
    at, w = "body.image", image.width
    for i, (outputs, inputs) in enumerate(((w // 2, 3), (w // 2, w // 2), (w, w // 2))):
        yield from _convolution(f"{at}.stem.{i}", f"visual.conv{i + 1}", f"visual.bn{i + 1}", outputs, inputs, 3)
    inputs = w
    for stage, blocks in enumerate(image.blocks):
        planes = w * 2**stage
        for block in range(blocks):
            ours, theirs = f"{at}.stages.{stage}.{block}", f"visual.layer{stage + 1}.{block}"
            if block == 0:
                skip = f"{theirs}.downsample"
                yield from _convolution(f"{ours}.skip", f"{skip}.0", f"{skip}.1", 4 * planes, inputs, 1)
            for i, (o, n, side) in enumerate(((planes, inputs, 1), (planes, planes, 3), (4 * planes, planes, 1))):
                yield from _convolution(f"{ours}.{i}", f"{theirs}.conv{i + 1}", f"{theirs}.bn{i + 1}", o, n, side)
            inputs = 4 * planes
    at, theirs = f"{at}.pool", "visual.attnpool"
    yield Entry(f"{at}.position", (f"{theirs}.positional_embedding",), (1 + (image.side // 32) ** 2, inputs))
    for part in "qkv":
        yield from _linear(f"{at}.{part}", f"{theirs}.{part}_proj", inputs, inputs)
    yield from _linear(f"{at}.out", f"{theirs}.c_proj", joint, inputs)


def _convolution(ours: str, theirs: str, norm: str, outputs: int, inputs: int, side: int) -> Iterator[Entry]:
    """A convolution and its batch norm, whose statistics are fixed and therefore part of its affine map."""

    def scale(weight: Tensor, var: Tensor) -> Tensor:
        return weight * torch.rsqrt(var + 1e-5)

    def shift(weight: Tensor, var: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
        return bias - mean * scale(weight, var)

    fixed = tuple(f"{norm}.{part}" for part in ("weight", "running_var", "bias", "running_mean"))
    yield Entry(f"{ours}.conv", (f"{theirs}.weight",), (outputs, inputs, side, side))
    yield Entry(f"{ours}.scale", fixed[:2], (outputs,), scale)
    yield Entry(f"{ours}.shift", fixed, (outputs,), shift)
