"""The files of a published model: from a folder, a single file, or the hub; tensors without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError  # what torch raises for a file that holds more than tensors
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...data.hub import OFFLINE, first_line, snapshot
from ...errors import UserError
from .tokenizer import FILES as TOKENIZER_FILES

# In order of preference. Where a repository has a CLIP for open_clip and its image tower for timm, the CLIP is meant.
WEIGHTS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
CONFIGS = ("config.json", "open_clip_config.json", "preprocessor_config.json")


def locate(name: str) -> Path:
    """The file with the weights; its other files are in the same folder."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _weights_in(path, name)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f'backbone.name = "{name}": there is no such file or folder; {OFFLINE["model"]}')
    _, folder = snapshot("model", name, _wanted)
    assert folder
    return _weights_in(folder, name)


def shapes(file: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of everything in the file; no values are read."""
    return {key: tuple(value.shape) for key, value in tensors(file, name, "meta").items()}


def tensors(file: Path, name: str, device: Literal["cpu", "meta"] = "cpu") -> dict[str, Tensor]:
    """Everything in the file."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file) if device == "cpu" else _headers(file)
        loaded = torch.load(file, map_location=device, weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        what = f"{file.name} is not a readable file of tensors: {first_line(error)}"
        raise UserError(f'backbone.name = "{name}": {what}') from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f'backbone.name = "{name}": {file.name} is not a flat dictionary of tensors')
    return loaded


def _headers(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {key: torch.empty(opened.get_slice(key).get_shape(), device="meta") for key in opened.keys()}  # noqa: SIM118


def settings(folder: Path, file: str, name: str) -> dict[str, Any]:
    """A JSON file beside the weights; empty where there is none."""
    path = folder / file
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f'backbone.name = "{name}": {file} is not valid JSON: {error}') from error
    if not isinstance(read, dict):
        raise UserError(f'backbone.name = "{name}": {file} is not a JSON object')
    return read


def _weights_in(folder: Path, name: str) -> Path:
    for file in WEIGHTS:
        if (folder / file).is_file():
            return folder / file
    raise UserError(f'backbone.name = "{name}": {folder} has no weights; it needs {" or ".join(WEIGHTS[:2])}')


def _wanted(there: set[str]) -> list[str]:
    """What is needed of a repository's files."""
    return [*CONFIGS, *TOKENIZER_FILES, *[file for file in WEIGHTS if file in there][:1]]
