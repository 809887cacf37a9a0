"""LoRA in the format of the `peft` library, adapter_config.json and adapter_model.safetensors, for a CLIP."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save

from .. import files, models
from ..errors import UserError
from ..models import CLIP
from ..models.pretrained.load import published_names
from ..params import Params
from ..tunings.lora import Lora
from .predictor import Predictor

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write(made: Predictor, folder: Path) -> Path:
    """-> the weights"""
    tuning = made.tuning
    if not isinstance(tuning, Lora) or not isinstance(made.model, CLIP):
        raise UserError(
            f'export --peft: "{made.card["method"]["name"]}" on backbone "{made.model.name}" has no form in PEFT '
            "(allowed: LoRA on a whole CLIP)"
        )
    where = models.place(made.model.name)
    modules = _modules(tuning, made.model, where)
    tensors: Params = {}
    for ours, theirs in modules.items():
        for mine, its in (("a", "lora_A"), ("b", "lora_B")):
            tensors[f"base_model.model.{theirs}.{its}.weight"] = made.params[f"lora.{mine}.{ours}"].cpu().contiguous()
    rank = len(made.params[f"lora.a.{next(iter(modules))}"])  # under FlexLoRA the client's own
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": where,
        "r": rank,
        "lora_alpha": tuning.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules.values()),
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / _CONFIG, (json.dumps(config, indent=1) + "\n").encode())
        files.write(folder / _WEIGHTS, save(tensors))
    except OSError as error:
        raise UserError(f'"{folder}" cannot be written: {error.strerror}') from None
    return folder / _WEIGHTS


def _modules(tuning: Lora, model: CLIP, where: str) -> dict[str, str]:
    """Our name of each projection that is tuned -> the module's in transformers."""
    theirs = published_names(where)
    found: dict[str, str] = {}
    for layer in tuning.layers(model):
        parts = theirs[f"{layer}.qkv.weight"]
        if len(parts) != 3:
            raise UserError(
                f'export --peft: backbone "{model.name}" has queries, keys and values in one weight '
                "(allowed: a CLIP in the layout of transformers)"
            )
        named = zip("qkv", parts, strict=True)
        found |= {f"{layer}.{part}": name.removesuffix(".weight") for part, name in named if part in tuning.projections}
    return found
