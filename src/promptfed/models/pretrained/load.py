"""Pre-trained models from their published files, in the layouts of `transformers`, timm and open_clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ...errors import UserError
from ...params import Params
from ...seeding import torch_rng
from ..base import Model
from ..clip import CLIP
from ..resnet import ResNet
from ..text import TextTower
from ..transformer import Activation
from ..vit import ViT, head_weights
from . import layouts, preprocess
from .files import locate, settings, tensors
from .layouts import Convolutions, Entry, Image, Parts, Text, Transformer
from .preprocess import Preprocess
from .tokenizer import Tokenizer

Tensors = dict[str, Tensor]

_OPEN_CLIP_SETTINGS = frozenset(
    {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}  # of the image tower
    | {
        "context_length",
        "vocab_size",
        "width",
        "heads",
        "layers",
        "mlp_ratio",
        "hf_tokenizer_name",
    }  # of the text tower
)


def load(name: str, classes: int, seed: int, names: Sequence[str] | None = None) -> Model:
    """The model of a hub id, a folder or a file.

    A ViT gets a fresh linear head from the seed. A CLIP classifies by the names of the classes, if it is given them.
    """
    file = locate(name)
    source = _Source(name, file.parent, tensors(file, name))
    for mark, read in _LAYOUTS.items():
        if mark in source.tensors:
            return read(source, classes, seed, names)
    raise UserError(
        f'backbone.name = "{name}": {file.name} holds no ViT and no CLIP in a layout of transformers, timm or open_clip'
    )


@dataclass(frozen=True)
class _Source:
    name: str
    folder: Path
    tensors: Tensors

    def settings(self, file: str) -> dict[str, Any]:
        return settings(self.folder, file, self.name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise UserError(f'backbone.name = "{self.name}": "{name}" is missing in its weights')
        return tuple(self.tensors[name].shape)

    def take(self, entries: Iterable[Entry], unused: tuple[str, ...]) -> Params:
        """The weights under our names. What is left over must end in one of `unused`: otherwise it is another model."""
        asked = f'backbone.name = "{self.name}"'
        weights: Params = {}
        used: set[str] = set()
        for entry in entries:
            for theirs in entry.theirs:
                if self.shape(theirs) != entry.shape:
                    raise UserError(
                        f'{asked}: "{theirs}" has shape {list(self.shape(theirs))} instead of {list(entry.shape)}; '
                        "its weights and its config belong to different models"
                    )
            used.update(entry.theirs)
            weights[entry.ours] = entry.make(*(self.tensors[theirs].float() for theirs in entry.theirs))
        for theirs in self.tensors:
            if theirs not in used and not theirs.endswith(unused):
                raise UserError(f'{asked}: there is no place for "{theirs}" of its weights in this kind of model')
        return weights

    def transformer(self, prefix: str, parts: Parts, given: Mapping[str, Any], eps: float) -> Transformer:
        """Sizes as given, where they are, and as the shapes say. Heads have 64 units, or 80 in ViT-H, unless given."""
        depth = 0
        while f"{prefix}{parts.layer}.{depth}.{parts.mlp_in}.weight" in self.tensors:
            depth += 1
        hidden, width = self.shape(f"{prefix}{parts.layer}.0.{parts.mlp_in}.weight")
        measured = {"depth": depth, "width": width, "heads": max(1, width // (80 if width == 1280 else 64))}
        sizes = measured | {"hidden": hidden, "eps": eps} | {k: v for k, v in given.items() if v is not None}
        if sizes["activation"] not in ("gelu", "quick_gelu"):
            raise UserError(
                f'backbone.name = "{self.name}": activation "{sizes["activation"]}" is not known '
                "(allowed: gelu, quick_gelu)"
            )
        if sizes["width"] % sizes["heads"]:
            raise UserError(
                f'backbone.name = "{self.name}": {sizes["heads"]} heads do not divide a width of {sizes["width"]}'
            )
        return Transformer(
            int(sizes["depth"]),
            int(sizes["width"]),
            int(sizes["heads"]),
            int(sizes["hidden"]),
            float(sizes["eps"]),
            cast(Activation, sizes["activation"]),
        )

    def image(self, patches: str, position: str, side: int | None, patch: int | None) -> Image:
        _, channels, _, measured = self.shape(patches)
        grid = math.isqrt(self.shape(position)[-2] - 1)
        patch = patch or measured
        return Image(side or patch * grid, patch, channels)


def _vit_transformers(source: _Source, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    prefix = "" if "embeddings.cls_token" in source.tensors else "vit."
    config = source.settings("config.json")
    at = f"{prefix}embeddings"
    image = source.image(
        f"{at}.patch_embeddings.projection.weight",
        f"{at}.position_embeddings",
        config.get("image_size"),
        config.get("patch_size"),
    )
    t = source.transformer(prefix, layouts.VIT, {"activation": "gelu"} | _transformers_sizes(config), 1e-12)
    weights = source.take(
        layouts.vit_transformers(image, t, prefix),
        ("pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"),
    )
    seen = preprocess.from_transformers(
        source.settings("preprocessor_config.json"), image.side, clip=False, name=source.name
    )
    return _vit(source.name, image, t, weights, seen, classes, seed)


def _vit_timm(source: _Source, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    config = source.settings("config.json")
    given, made = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    side = given.get("img_size") or (made.get("input_size") or [None])[-1]
    image = source.image("patch_embed.proj.weight", "pos_embed", side, given.get("patch_size"))
    sizes = {"width": given.get("embed_dim"), "depth": given.get("depth"), "heads": given.get("num_heads")}
    t = source.transformer("", layouts.TIMM, {"activation": "gelu"} | sizes, 1e-6)
    weights = source.take(layouts.vit_timm(image, t), ("head.weight", "head.bias"))
    return _vit(source.name, image, t, weights, preprocess.from_timm(made, image.side, source.name), classes, seed)


def _vit(name: str, image: Image, t: Transformer, weights: Params, seen: Preprocess, classes: int, seed: int) -> ViT:
    weights |= head_weights(torch_rng(seed, "head"), classes, t.width)
    size = (image.channels, image.side, image.side)
    return ViT(
        name, size, classes, weights, t.width, image.patch, t.depth, t.heads, t.eps, t.activation, preprocess=seen
    )


def _clip_transformers(source: _Source, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    config = source.settings("config.json")
    vision, words = config.get("vision_config") or {}, config.get("text_config") or {}
    at = "vision_model.embeddings"
    image = source.image(
        f"{at}.patch_embedding.weight",
        f"{at}.position_embedding.weight",
        vision.get("image_size"),
        vision.get("patch_size"),
    )
    quick = {"activation": "quick_gelu"}
    i = source.transformer("vision_model.", layouts.CLIP, quick | _transformers_sizes(vision), 1e-5)
    t = source.transformer("text_model.", layouts.CLIP, quick | _transformers_sizes(words), 1e-5)
    at = "text_model.embeddings"
    text = Text(
        words.get("vocab_size") or source.shape(f"{at}.token_embedding.weight")[0],
        words.get("max_position_embeddings") or source.shape(f"{at}.position_embedding.weight")[0],
    )
    joint = config.get("projection_dim") or source.shape("visual_projection.weight")[0]
    weights = source.take(layouts.clip_transformers(image, i, text, t, joint), (".position_ids",))
    seen = preprocess.from_transformers(
        source.settings("preprocessor_config.json"), image.side, clip=True, name=source.name
    )
    return _clip(source, image, i, text, t, weights, seen, classes, names)


def _clip_open_clip(source: _Source, classes: int, seed: int, names: Sequence[str] | None) -> Model:
    config = source.settings("open_clip_config.json")
    model = config.get("model_cfg") or {}
    vision, words = model.get("vision_cfg") or {}, model.get("text_cfg") or {}
    known = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
    for key, value in (vision | words).items():
        if value and key not in known | {"context_length", "vocab_size", "heads"}:
            raise UserError(
                f'backbone.name = "{source.name}": {key} = {value!r} of its open_clip_config.json is not supported'
            )
    quick = {"activation": "quick_gelu" if model.get("quick_gelu", not model) else "gelu"}
    i = None
    image: Image | Convolutions
    if "visual.class_embedding" in source.tensors:
        image = source.image(
            "visual.conv1.weight", "visual.positional_embedding", vision.get("image_size"), vision.get("patch_size")
        )
        heads = vision["width"] // vision["head_width"] if "head_width" in vision else None
        i = source.transformer("visual.", layouts.OPEN_CLIP, quick | _open_clip_sizes(vision, heads), 1e-5)
    else:
        image = _convolutions(source, vision)
    t = source.transformer("", layouts.OPEN_CLIP, quick | _open_clip_sizes(words, words.get("heads")), 1e-5)
    text = Text(
        words.get("vocab_size") or source.shape("token_embedding.weight")[0],
        words.get("context_length") or source.shape("positional_embedding")[0],
    )
    joint = model.get("embed_dim") or source.shape("text_projection")[1]
    weights = source.take(
        layouts.clip_open_clip(image, i, text, t, joint),
        (".num_batches_tracked", "attn_mask", "input_resolution", "context_length", "vocab_size"),
    )
    seen = preprocess.from_open_clip(config.get("preprocess_cfg") or {}, image.side, source.name)
    return _clip(source, image, i, text, t, weights, seen, classes, names)


def _convolutions(source: _Source, vision: Mapping[str, Any]) -> Convolutions:
    def count(stage: int) -> int:
        return len({name.split(".")[2] for name in source.tensors if name.startswith(f"visual.layer{stage}.")})

    blocks = vision.get("layers") or [count(stage) for stage in (1, 2, 3, 4)]
    grid = math.isqrt(source.shape("visual.attnpool.positional_embedding")[0] - 1)
    side = vision.get("image_size") or 32 * grid
    return Convolutions(side, tuple(blocks), vision.get("width") or source.shape("visual.conv3.weight")[0])


def _clip(
    source: _Source,
    image: Image | Convolutions,
    i: Transformer | None,
    text: Text,
    t: Transformer,
    weights: Params,
    seen: Preprocess,
    classes: int,
    names: Sequence[str] | None,
) -> CLIP:
    if names and len(names) != classes:
        raise ValueError(f"{len(names)} names for {classes} classes")
    name, size = source.name, (3, image.side, image.side)
    tower: ViT | ResNet
    if isinstance(image, Convolutions):
        tower = ResNet(name, size, 0, blocks=image.blocks, heads=image.heads)
    else:
        assert i is not None
        tower = ViT(name, size, 0, {}, i.width, image.patch, i.depth, i.heads, i.eps, i.activation, "body.image")
    return CLIP(
        name,
        size,
        classes,
        weights,
        tower.width,
        preprocess=seen,
        image_tower=tower,
        text_tower=TextTower(t.depth, t.heads, t.eps, t.activation),
        tokenizer=Tokenizer.load(source.folder, text.vocabulary, text.length, name),
        names=tuple(names or ()),
    )


def _transformers_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    theirs = {
        "depth": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "hidden": "intermediate_size",
        "eps": "layer_norm_eps",
        "activation": "hidden_act",
    }
    return {ours: config[key] for ours, key in theirs.items() if config.get(key) is not None}


def _open_clip_sizes(config: Mapping[str, Any], heads: int | None) -> dict[str, Any]:
    width = config.get("width")
    hidden = width * config.get("mlp_ratio", 4) if width else None
    return {"depth": config.get("layers"), "width": width, "heads": heads, "hidden": hidden}


# a weight that only this layout has -> its reader
_LAYOUTS: dict[str, Callable[[_Source, int, int, Sequence[str] | None], Model]] = {
    "vision_model.embeddings.class_embedding": _clip_transformers,
    "visual.conv1.weight": _clip_open_clip,
    "embeddings.patch_embeddings.projection.weight": _vit_transformers,
    "vit.embeddings.patch_embeddings.projection.weight": _vit_transformers,
    "patch_embed.proj.weight": _vit_timm,
}
