"""Names and shapes of weights in published files: five layouts, and what each weight becomes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import ClipShape, Convolutions, Patches, Transformer, VitShape

Shape = tuple[int, ...]


class Weight(NamedTuple):
    """One of our weights, and the published ones that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    shape: Shape  # of each of theirs
    make: Callable[..., Tensor] = lambda *parts: torch.cat(parts) if len(parts) > 1 else parts[0]


class LayerNames(NamedTuple):
    """What a layout calls the parts of a layer; `join` stands between the name of qkv and "weight" or "bias".

    `scales`: LayerScale's, in layouts whose models may have it.
    """

    layer: str
    norm1: str
    qkv: tuple[str, ...]  # one tensor, or three
    proj: str
    norm2: str
    mlp_in: str
    mlp_out: str
    join: str = "."
    scales: tuple[str, str] | None = None


VIT = LayerNames(
    "encoder.layer",
    "layernorm_before",
    ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attention.output.dense",
    "layernorm_after",
    "intermediate.dense",
    "output.dense",
)
DINOV2 = VIT._replace(
    norm1="norm1",
    norm2="norm2",
    mlp_in="mlp.fc1",
    mlp_out="mlp.fc2",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
TIMM = LayerNames(
    "blocks",
    "norm1",
    ("attn.qkv",),
    "attn.proj",
    "norm2",
    "mlp.fc1",
    "mlp.fc2",
    scales=("ls1.gamma", "ls2.gamma"),
)
CLIP = LayerNames(
    "encoder.layers",
    "layer_norm1",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj",
    "layer_norm2",
    "mlp.fc1",
    "mlp.fc2",
)
OPEN_CLIP = LayerNames(
    "transformer.resblocks", "ln_1", ("attn.in_proj",), "attn.out_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", join="_"
)


def vit_transformers(
    shape: VitShape, prefix: str = "", names: LayerNames = VIT, ours: str = "body"
) -> Iterator[Weight]:
    """ViTModel or Dinov2Model; with a prefix such as "vit." inside another model."""
    image, t = shape.image, shape.tower
    at = f"{prefix}embeddings"
    yield Weight(f"{ours}.cls", (f"{at}.cls_token",), (1, 1, t.width))
    yield Weight(f"{ours}.position", (f"{at}.position_embeddings",), (1, image.positions, t.width))
    yield from _patches(ours, f"{at}.patch_embeddings.projection", image, t.width, bias=True)
    yield from _layers(ours, prefix, names, t)
    yield from _norm(f"{ours}.norm", f"{prefix}layernorm", t.width)


def vit_timm(shape: VitShape) -> Iterator[Weight]:
    image, t = shape.image, shape.tower
    yield Weight("body.cls", ("cls_token",), (1, 1, t.width))
    yield Weight("body.position", ("pos_embed",), (1, image.positions, t.width))
    yield from _patches("body", "patch_embed.proj", image, t.width, bias=True)
    yield from _layers("body", "", TIMM, t)
    yield from _norm("body.norm", "norm", t.width)


def clip_transformers(shape: ClipShape, vision: str = "vision_model.", words: str = "text_model.") -> Iterator[Weight]:
    """CLIPModel, or VisionTextDualEncoderModel with a CLIPVisionModel; its towers' names begin as given."""
    image, i = shape.image, shape.tower
    assert isinstance(image, Patches)
    assert i is not None
    at, theirs = "body.image", f"{vision}embeddings"
    yield Weight(f"{at}.cls", (f"{theirs}.class_embedding",), (i.width,), lambda p: p.reshape(1, 1, -1))
    yield Weight(
        f"{at}.position", (f"{theirs}.position_embedding.weight",), (image.positions, i.width), lambda p: p[None]
    )
    yield from _patches(at, f"{theirs}.patch_embedding", image, i.width, bias=False)
    yield from _norm(f"{at}.norm_pre", f"{vision}pre_layrnorm", i.width)  # their spelling
    yield from _layers(at, vision, CLIP, i)
    yield from _norm(f"{at}.norm", f"{vision}post_layernorm", i.width)
    yield from _joined(shape, i.width, words)


def dual_encoder(shape: ClipShape, names: LayerNames = VIT, words: str = "text_model.") -> Iterator[Weight]:
    """VisionTextDualEncoderModel with a ViTModel or a Dinov2Model; the names of its text tower begin with `words`."""
    image, i = shape.image, shape.tower
    assert isinstance(image, Patches)
    assert i is not None
    yield from vit_transformers(VitShape(image, i), "vision_model.", names, "body.image")
    if shape.pooler:
        yield from _linear("body.image.pooler", "vision_model.pooler.dense", i.width, i.width)
    yield from _joined(shape, i.width, words)


def _joined(shape: ClipShape, width: int, words: str) -> Iterator[Weight]:
    """CLIPTextModel, both projections and the scale. `width`: of the image tower."""
    text, t = shape.text, shape.words
    yield Weight("body.image.proj", ("visual_projection.weight",), (shape.joint, width))
    at, theirs = "body.text", f"{words}embeddings"
    yield Weight(f"{at}.tokens", (f"{theirs}.token_embedding.weight",), (text.vocabulary, t.width))
    yield Weight(f"{at}.position", (f"{theirs}.position_embedding.weight",), (text.length, t.width))
    yield from _layers(at, words, CLIP, t)
    yield from _norm(f"{at}.norm", f"{words}final_layer_norm", t.width)
    yield Weight(f"{at}.proj", ("text_projection.weight",), (shape.joint, t.width))
    yield Weight("body.scale", ("logit_scale",), ())


def clip_open_clip(shape: ClipShape) -> Iterator[Weight]:
    """OpenAI's own names, which open_clip keeps. Projections are stored transposed: x @ proj."""
    image, i, text, t, joint = shape.image, shape.tower, shape.text, shape.words, shape.joint
    if isinstance(image, Convolutions):
        yield from _resnet(image, joint)
    else:
        assert i is not None
        at, theirs = "body.image", "visual"
        yield Weight(f"{at}.cls", (f"{theirs}.class_embedding",), (i.width,), lambda p: p.reshape(1, 1, -1))
        yield Weight(
            f"{at}.position", (f"{theirs}.positional_embedding",), (image.positions, i.width), lambda p: p[None]
        )
        yield from _patches(at, f"{theirs}.conv1", image, i.width, bias=False)
        yield from _norm(f"{at}.norm_pre", f"{theirs}.ln_pre", i.width)
        yield from _layers(at, f"{theirs}.", OPEN_CLIP, i)
        yield from _norm(f"{at}.norm", f"{theirs}.ln_post", i.width)
        yield Weight(f"{at}.proj", (f"{theirs}.proj",), (i.width, joint), _transposed)
    at = "body.text"
    yield Weight(f"{at}.tokens", ("token_embedding.weight",), (text.vocabulary, t.width))
    yield Weight(f"{at}.position", ("positional_embedding",), (text.length, t.width))
    yield from _layers(at, "", OPEN_CLIP, t)
    yield from _norm(f"{at}.norm", "ln_final", t.width)
    yield Weight(f"{at}.proj", ("text_projection",), (t.width, joint), _transposed)
    yield Weight("body.scale", ("logit_scale",), ())


def _layers(ours: str, theirs: str, names: LayerNames, t: Transformer) -> Iterator[Weight]:
    for i in range(t.depth):
        at, their = f"{ours}.blocks.{i}", f"{theirs}{names.layer}.{i}."
        yield from _norm(f"{at}.norm1", their + names.norm1, t.width)
        yield from _norm(f"{at}.norm2", their + names.norm2, t.width)
        rows = 3 * t.width // len(names.qkv)
        for kind, shape in (("weight", (rows, t.width)), ("bias", (rows,))):
            yield Weight(f"{at}.qkv.{kind}", tuple(f"{their}{part}{names.join}{kind}" for part in names.qkv), shape)
        yield from _linear(f"{at}.proj", their + names.proj, t.width, t.width)
        yield from _linear(f"{at}.mlp.in", their + names.mlp_in, t.hidden, t.width)
        yield from _linear(f"{at}.mlp.out", their + names.mlp_out, t.width, t.hidden)
        if t.scaled and names.scales:
            for n, scale in enumerate(names.scales, start=1):
                yield Weight(f"{at}.scale{n}", (their + scale,), (t.width,))


def _linear(ours: str, theirs: str, outputs: int, inputs: int) -> Iterator[Weight]:
    yield Weight(f"{ours}.weight", (f"{theirs}.weight",), (outputs, inputs))
    yield Weight(f"{ours}.bias", (f"{theirs}.bias",), (outputs,))


def _norm(ours: str, theirs: str, width: int) -> Iterator[Weight]:
    for kind in ("weight", "bias"):
        yield Weight(f"{ours}.{kind}", (f"{theirs}.{kind}",), (width,))


def _patches(ours: str, theirs: str, image: Patches, width: int, bias: bool) -> Iterator[Weight]:
    shape = (width, image.channels, image.patch, image.patch)
    yield Weight(f"{ours}.patch.weight", (f"{theirs}.weight",), shape)
    if bias:
        yield Weight(f"{ours}.patch.bias", (f"{theirs}.bias",), shape[:1])


def _transposed(p: Tensor) -> Tensor:
    return p.T.contiguous()


def _resnet(image: Convolutions, joint: int) -> Iterator[Weight]:
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
    yield Weight(f"{at}.position", (f"{theirs}.positional_embedding",), (1 + (image.side // 32) ** 2, inputs))
    for part in "qkv":
        yield from _linear(f"{at}.{part}", f"{theirs}.{part}_proj", inputs, inputs)
    yield from _linear(f"{at}.out", f"{theirs}.c_proj", joint, inputs)


def _convolution(ours: str, theirs: str, norm: str, outputs: int, inputs: int, side: int) -> Iterator[Weight]:
    """A convolution and its batch norm, whose fixed statistics are folded into an affine map."""

    def scale(weight: Tensor, var: Tensor) -> Tensor:
        return weight * torch.rsqrt(var + 1e-5)

    def shift(weight: Tensor, var: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
        return bias - mean * scale(weight, var)

    fixed = tuple(f"{norm}.{part}" for part in ("weight", "running_var", "bias", "running_mean"))
    yield Weight(f"{ours}.conv", (f"{theirs}.weight",), (outputs, inputs, side, side))
    yield Weight(f"{ours}.scale", fixed[:2], (outputs,), scale)
    yield Weight(f"{ours}.shift", fixed, (outputs,), shift)
