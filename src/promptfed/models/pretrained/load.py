"""Pre-trained models from their published files, in the layouts of `transformers`, timm and open_clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ...errors import UserError
from ...params import Params
from ..base import Model
from ..transformer import Activation
from . import layouts
from .files import locate, settings, shapes, tensors
from .layouts import LayerNames, Weight
from .preprocess import Preprocess, from_open_clip, from_timm, from_transformers
from .shapes import ClipShape, Convolutions, Image, Patches, Text, Transformer, VitShape
from .tokenizer import Tokenizer


def load(
    where: str,
    classes: int,
    seed: int,
    names: Sequence[str] | None = None,
    image: Image | None = None,
    name: str | None = None,
) -> Model:
    """The model of a hub id, a folder or a file; for images as published, or of the size given.

    A ViT gets a fresh linear head from the seed. A CLIP classifies by the names of the classes, if it is given them.
    `name`: what it is called, if not by its place.
    """
    source = _Source.open(where)
    found, name = source.published(), name or where
    weights = source.take(found.weights, found.unused)
    if isinstance(found.shape, VitShape):
        return found.shape.model(name, weights, found.preprocess, classes, seed, image)
    text = found.shape.text
    words = Tokenizer.load(source.file.parent, text.vocabulary, text.length, where)
    return found.shape.model(name, weights, found.preprocess, names or (), classes, words, image)


def load_preprocess(name: str) -> Preprocess:
    """What the images of such a model go through. Of its weights, only names and shapes are read."""
    return _Source.open(name).published().preprocess


def published_names(name: str) -> dict[str, tuple[str, ...]]:
    """Our name of each weight -> the published ones that it is made of."""
    return {weight.ours: weight.theirs for weight in _Source.open(name).published().weights}


@dataclass(frozen=True)
class _Published:
    """What the files say about a model."""

    shape: VitShape | ClipShape
    preprocess: Preprocess
    weights: Iterable[Weight]
    unused: tuple[str, ...]  # suffixes of names that are not needed


@dataclass(frozen=True)
class _Source:
    name: str
    file: Path  # the weights
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def open(cls, name: str) -> _Source:
        file = locate(name)
        return cls(name, file, shapes(file, name))

    def published(self) -> _Published:
        for theirs in self.shapes:
            for mark, why in _NOT_READ.items():
                if theirs.endswith(mark):
                    raise UserError(f'backbone.name = "{self.name}" is not supported: {why}')
        for mark, read in _LAYOUTS.items():
            if mark in self.shapes:
                return read(self)
        raise UserError(
            f'backbone.name = "{self.name}": {self.file.name} holds no ViT and no CLIP in a layout of transformers, '
            "timm or open_clip"
        )

    def settings(self, file: str) -> dict[str, Any]:
        return settings(self.file.parent, file, self.name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise UserError(f'backbone.name = "{self.name}": "{name}" is missing in its weights')
        return self.shapes[name]

    def take(self, wanted: Iterable[Weight], unused: tuple[str, ...]) -> Params:
        """The weights under our names. A name left over that does not end in one of `unused` means another model."""
        asked = f'backbone.name = "{self.name}"'
        loaded = tensors(self.file, self.name)
        weights: Params = {}
        used: set[str] = set()
        for weight in wanted:
            for theirs in weight.theirs:
                if self.shape(theirs) != weight.shape:
                    raise UserError(
                        f'{asked}: "{theirs}" has shape {list(self.shape(theirs))} instead of {list(weight.shape)}; '
                        "its weights and its config belong to different models"
                    )
            used.update(weight.theirs)
            weights[weight.ours] = weight.make(*(loaded[theirs].float() for theirs in weight.theirs))
        for theirs in self.shapes:
            if theirs not in used and not theirs.endswith(unused):
                raise UserError(f'{asked}: there is no place for "{theirs}" of its weights in this kind of model')
        return weights

    def transformer(self, prefix: str, names: LayerNames, given: Mapping[str, Any], eps: float) -> Transformer:
        """Sizes as given, otherwise as the shapes say. Heads have 64 units, or 80 in ViT-H, unless given."""
        depth = 0
        while f"{prefix}{names.layer}.{depth}.{names.mlp_in}.weight" in self.shapes:
            depth += 1
        hidden, width = self.shape(f"{prefix}{names.layer}.0.{names.mlp_in}.weight")
        scaled = names.scales is not None and f"{prefix}{names.layer}.0.{names.scales[0]}" in self.shapes
        measured = {"depth": depth, "width": width, "heads": max(1, width // (80 if width == 1280 else 64))}
        sizes = measured | {"hidden": hidden, "eps": eps} | {k: v for k, v in given.items() if v is not None}
        if sizes["activation"] not in ("gelu", "quick_gelu"):
            raise UserError(
                f'backbone.name = "{self.name}": activation = "{sizes["activation"]}" is not supported '
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
            scaled,
        )

    def nested(self, prefix: str, weight: str) -> str:
        """The prefix of a tower's names, which dual encoders of older versions of transformers have twice."""
        return prefix * 2 if f"{prefix * 2}{weight}" in self.shapes else prefix

    def patches(self, weight: str, position: str, side: int | None, patch: int | None) -> Patches:
        _, channels, _, measured = self.shape(weight)
        grid = math.isqrt(self.shape(position)[-2] - 1)
        patch = patch or measured
        return Patches(side or patch * grid, patch, channels)


def _vit_transformers(source: _Source) -> _Published:
    prefix = next(p for p in ("", "vit.", "dinov2.") if f"{p}embeddings.cls_token" in source.shapes)
    names = _vit_names(source, prefix)
    shape = _vit_shape(source, prefix, names, source.settings("config.json"))
    return _Published(
        shape,
        _vit_preprocess(source, names, shape.image.side),
        layouts.vit_transformers(shape, prefix, names),
        ("pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias", "mask_token"),
    )


def _vit_names(source: _Source, prefix: str) -> LayerNames:
    return layouts.DINOV2 if f"{prefix}encoder.layer.0.norm1.weight" in source.shapes else layouts.VIT


def _vit_shape(source: _Source, prefix: str, names: LayerNames, config: Mapping[str, Any]) -> VitShape:
    at = f"{prefix}embeddings"
    image = source.patches(
        f"{at}.patch_embeddings.projection.weight",
        f"{at}.position_embeddings",
        config.get("image_size"),
        config.get("patch_size"),
    )
    eps = 1e-6 if names is layouts.DINOV2 else 1e-12
    return VitShape(image, source.transformer(prefix, names, {"activation": "gelu"} | _transformers_sizes(config), eps))


def _vit_preprocess(source: _Source, names: LayerNames, side: int) -> Preprocess:
    """DINOv2 has the image processor of BiT, whose defaults are CLIP's, and interpolates its positions at any size."""
    dino = names is layouts.DINOV2
    return from_transformers(source.settings("preprocessor_config.json"), side, dino, source.name, any_size=dino)


def _vit_timm(source: _Source) -> _Published:
    config = source.settings("config.json")
    given, made = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    side = given.get("img_size") or (made.get("input_size") or [None])[-1]
    image = source.patches("patch_embed.proj.weight", "pos_embed", side, given.get("patch_size"))
    sizes = {"width": given.get("embed_dim"), "depth": given.get("depth"), "heads": given.get("num_heads")}
    shape = VitShape(image, source.transformer("", layouts.TIMM, {"activation": "gelu"} | sizes, 1e-6))
    preprocess = from_timm(made, image.side, source.name)
    return _Published(shape, preprocess, layouts.vit_timm(shape), ("head.weight", "head.bias"))


def _clip_transformers(source: _Source) -> _Published:
    config = source.settings("config.json")
    vision, words = config.get("vision_config") or {}, config.get("text_config") or {}
    images = source.nested("vision_model.", "embeddings.class_embedding")
    at = f"{images}embeddings"
    image = source.patches(
        f"{at}.patch_embedding.weight",
        f"{at}.position_embedding.weight",
        vision.get("image_size"),
        vision.get("patch_size"),
    )
    i = source.transformer(images, layouts.CLIP, _QUICK | _transformers_sizes(vision), 1e-5)
    at, text, t = _clip_text(source, words)
    shape = ClipShape(image, i, text, t, config.get("projection_dim") or source.shape("visual_projection.weight")[0])
    preprocess = from_transformers(source.settings("preprocessor_config.json"), image.side, clip=True, name=source.name)
    return _Published(shape, preprocess, layouts.clip_transformers(shape, images, at), (".position_ids",))


def _dual_encoder(source: _Source) -> _Published:
    config = source.settings("config.json")
    vision, words = config.get("vision_config") or {}, config.get("text_config") or {}
    names = _vit_names(source, "vision_model.")
    images = _vit_shape(source, "vision_model.", names, vision)
    pooler = None if names is layouts.DINOV2 else vision.get("pooler_act", "tanh")
    if pooler not in (None, "tanh", "linear"):
        raise UserError(
            f'backbone.name = "{source.name}": pooler_act = "{pooler}" is not supported (allowed: tanh, linear)'
        )
    at, text, t = _clip_text(source, words)
    joint = config.get("projection_dim") or source.shape("visual_projection.weight")[0]
    shape = ClipShape(images.image, images.tower, text, t, joint, pooler)
    return _Published(
        shape,
        _vit_preprocess(source, names, images.image.side),
        layouts.dual_encoder(shape, names, at),
        (".position_ids", "mask_token"),
    )


def _clip_text(source: _Source, words: Mapping[str, Any]) -> tuple[str, Text, Transformer]:
    """How the names of CLIP's text tower begin, and its sizes."""
    prefix = source.nested("text_model.", "embeddings.token_embedding.weight")
    text = Text(
        words.get("vocab_size") or source.shape(f"{prefix}embeddings.token_embedding.weight")[0],
        words.get("max_position_embeddings") or source.shape(f"{prefix}embeddings.position_embedding.weight")[0],
    )
    return prefix, text, source.transformer(prefix, layouts.CLIP, _QUICK | _transformers_sizes(words), 1e-5)


def _clip_open_clip(source: _Source) -> _Published:
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
    image: Patches | Convolutions
    if "visual.class_embedding" in source.shapes:
        image = source.patches(
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
    shape = ClipShape(image, i, text, t, model.get("embed_dim") or source.shape("text_projection")[1])
    return _Published(
        shape,
        from_open_clip(config.get("preprocess_cfg") or {}, image.side, source.name),
        layouts.clip_open_clip(shape),
        (".num_batches_tracked", "attn_mask", "input_resolution", "context_length", "vocab_size"),
    )


def _convolutions(source: _Source, vision: Mapping[str, Any]) -> Convolutions:
    def count(stage: int) -> int:
        return len({name.split(".")[2] for name in source.shapes if name.startswith(f"visual.layer{stage}.")})

    blocks = vision.get("layers") or [count(stage) for stage in (1, 2, 3, 4)]
    grid = math.isqrt(source.shape("visual.attnpool.positional_embedding")[0] - 1)
    side = vision.get("image_size") or 32 * grid
    return Convolutions(side, tuple(blocks), vision.get("width") or source.shape("visual.conv3.weight")[0])


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


_QUICK = {"activation": "quick_gelu"}

# a weight that only this layout has -> its reader
_LAYOUTS: dict[str, Callable[[_Source], _Published]] = {
    "vision_model.embeddings.class_embedding": _clip_transformers,
    "vision_model.vision_model.embeddings.class_embedding": _clip_transformers,
    "vision_model.embeddings.cls_token": _dual_encoder,
    "visual.conv1.weight": _clip_open_clip,
    "embeddings.patch_embeddings.projection.weight": _vit_transformers,
    "vit.embeddings.patch_embeddings.projection.weight": _vit_transformers,
    "dinov2.embeddings.patch_embeddings.projection.weight": _vit_transformers,
    "patch_embed.proj.weight": _vit_timm,
}

_DISTILLED = (
    "it has a distillation token; use the model that was trained without one, such as facebook/deit-tiny-patch16-224"
)
_REGISTERS = "it has register tokens; use the model without them, such as facebook/dinov2-small"
_SIGLIP = (
    "SigLIP has no class token but pools the patches by attention; use a CLIP, such as openai/clip-vit-base-patch16"
)

# how the name of a weight ends that only such a model has -> why it is not read
_NOT_READ = {
    "distillation_token": _DISTILLED,
    "dist_token": _DISTILLED,
    "register_tokens": _REGISTERS,
    "reg_token": _REGISTERS,
    "mlp.weights_in.weight": "its layers have gated MLPs (SwiGLU); use a smaller one, such as facebook/dinov2-base",
    "vision_model.head.probe": _SIGLIP,
    "attn_pool.latent": _SIGLIP,
    "text_model.embeddings.word_embeddings.weight": "its text tower is not CLIP's",
}
