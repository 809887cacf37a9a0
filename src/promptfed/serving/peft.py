"""Adapters in the format of the `peft` library, adapter_config.json and adapter_model.safetensors.

LoRA of a CLIP, or of a ViT with its head; a context of text prompts as embeddings of tokens that no class name uses.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from .. import files, models
from ..errors import UserError
from ..models import CLIP, Model
from ..models.pretrained.load import published_names
from ..params import Params
from ..tunings.heads import SCALE
from ..tunings.lora import Lora
from ..tunings.text import TextContext
from .predictor import Predictor

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "classifier"  # of transformers' ViTForImageClassification
# Parts of a ViT's names in files and in transformers 4, and in transformers 5.
_RENAMED = {"encoder.layer.": "layers.", **{f"attention.{p}": f"{p[0]}_proj" for p in ("query", "key", "value")}}


def write(made: Predictor, folder: Path) -> Path:
    """-> the weights"""
    tuning, where = made.tuning, models.place(made.model.name)
    config: dict[str, Any] = {}
    if isinstance(tuning, Lora):
        config, tensors = _lora(tuning, made, where)
    elif type(tuning) is TextContext:  # others have more than a context
        config, tensors = _context(tuning, made, where)
    if not config:
        raise UserError(
            f'export --peft: "{made.card["method"]["name"]}" on backbone "{made.model.name}" has no form in PEFT '
            "(allowed: LoRA on a whole CLIP, or on a ViT that transformers loads as ViTForImageClassification; a text "
            "context alone)"
        )
    common = {"base_model_name_or_path": where, "inference_mode": True}
    return _save(folder, {**config, **common}, {f"base_model.model.{name}": p for name, p in tensors.items()})


def _save(folder: Path, config: dict[str, Any], tensors: Params) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / _CONFIG, (json.dumps(config, indent=1) + "\n").encode())
        files.write(
            folder / _WEIGHTS,
            save({name: p.cpu().clone(memory_format=torch.contiguous_format) for name, p in tensors.items()}),
        )
    except OSError as error:
        raise UserError(f'"{folder}" cannot be written: {error.strerror}') from None
    return folder / _WEIGHTS


# ---- LoRA


def _lora(tuning: Lora, made: Predictor, where: str) -> tuple[dict[str, Any], Params]:
    """Configuration and weights; both empty where transformers has no such model."""
    modules, params = _modules(tuning, made.model, where), made.params
    if not modules:
        return {}, {}
    tensors = {
        f"{name}.{its}.weight": params[f"lora.{mine}.{ours}"]
        for ours, theirs in modules.items()
        for name in _names(theirs)
        for mine, its in (("a", "lora_A"), ("b", "lora_B"))
    }
    head = _classifier(params)
    rank = len(params[f"lora.a.{next(iter(modules))}"])  # under FlexLoRA the client's own
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": tuning.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name for theirs in modules.values() for name in _names(theirs)),
        "modules_to_save": [_HEAD] if head else None,
    }
    return config, {**tensors, **head}


def _modules(tuning: Lora, model: Model, where: str) -> dict[str, str]:
    """Our name of each projection that is tuned -> the module's in transformers. Empty where transformers has no such
    model: its other ViTs with a head, and the image tower of a CLIP, do not classify by cls alone."""
    theirs = published_names(where)
    clip = isinstance(model, CLIP)
    if not clip and "layernorm_before" not in theirs.get("body.blocks.0.norm1.weight", ("",))[0]:
        return {}
    found: dict[str, str] = {}
    for layer in tuning.layers(model):
        parts = theirs[f"{layer}.qkv.weight"]
        if len(parts) != 3:
            raise UserError(
                f'export --peft: backbone "{model.name}" has queries, keys and values in one weight '
                "(allowed: a CLIP in the layout of transformers)"
            )
        for part, name in zip("qkv", parts, strict=True):
            if part in tuning.projections:
                module = name.removesuffix(".weight")
                found[f"{layer}.{part}"] = module if clip else f"vit.{module.removeprefix('vit.')}"
    return found


def _names(module: str) -> set[str]:
    """A module's name in every version of transformers: PEFT takes the one that the model has."""
    renamed = module
    for old, new in _RENAMED.items():
        renamed = renamed.replace(old, new)
    return {module, renamed}


def _classifier(params: Params) -> Params:
    """The head on features as they are: W ((z - mean) / std) + b = (W / std) z + b - (W / std) mean. None of a CLIP."""
    if "head.weight" not in params:
        return {}
    weight, bias = params["head.weight"], params["head.bias"]
    if f"{SCALE}.mean" in params:
        mean, std = (params[f"{SCALE}.{part}"].cpu().double() for part in ("mean", "std"))
        scaled = weight.cpu().double() / std
        weight, bias = scaled.to(weight.dtype), (bias.cpu().double() - scaled @ mean).to(bias.dtype)
    return {f"{_HEAD}.weight": weight, f"{_HEAD}.bias": bias}


# ---- text prompts


def _context(tuning: TextContext, made: Predictor, where: str) -> tuple[dict[str, Any], Params]:
    """The context's vectors take the places of the last tokens of the vocabulary, the rarest, that no sentence uses.
    Empty where the model's files are not in the layout of transformers."""
    sentences, context = tuning.sentences(made.model), made.params["context"]
    (embedding,) = published_names(where)["body.text.tokens"]
    if ".embeddings." not in embedding:
        return {}, {}
    module, used = embedding.removesuffix(".weight"), set(sentences.ids.flatten().tolist())
    free = (i for i in reversed(range(len(made.model.weights["body.text.tokens"]))) if i not in used)
    config = {
        "peft_type": "TRAINABLE_TOKENS",
        "token_indices": list(islice(free, len(context))),
        "target_modules": [module],
    }
    return config, {f"{module}.trainable_tokens_delta": context}
