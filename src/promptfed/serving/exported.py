"""A model exported as one safetensors file, with a card inside that says where it comes from and what it needs.

It holds what the tuning trains and, of the frozen weights, those that came from a seed: other processors may draw other
last bits. Pre-trained ones are loaded again by the name of the backbone, and must be the same. Nothing else of the run
is in it: no state of the server, no secret, nothing of another client.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .. import files, methods, models
from .. import params as P
from ..clients.wire import pack, unpack
from ..errors import UserError
from ..method import Method
from ..models import Model
from ..params import Params, digest
from ..tuning import Full, Tuning

FORMAT = 1
SUFFIX = ".safetensors"
_PARAMS, _FROZEN = "params", "frozen"
_TOLD = 5  # files or runs that fit a sentence

Card = dict[str, Any]


def write(path: Path, card: Card, tuning: Tuning, model: Model, params: Params) -> Path:
    """-> the file; a copy of the card stands beside it for people"""
    if path.suffix != SUFFIX:
        raise UserError(f'"{path}" must end in {SUFFIX}')
    seeded, loaded = _frozen(model, tuning, params)
    card = {**card, "backbone": {**card["backbone"], "frozen": digest(loaded) if loaded else None}}
    tensors = {**P.nested(_PARAMS, params, "/"), **P.nested(_FROZEN, seeded, "/")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, pack(tensors, card))
        files.write(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f'"{path}" cannot be written: {error.strerror}') from None
    return path


def find(path: Path) -> Path:
    """The file that is meant by a path: itself, the one beside a card, or the only one in a folder."""
    if not path.is_dir():
        return path.with_suffix(SUFFIX) if path.suffix == ".json" else path
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        runs = sorted(file.parent for file in path.glob("*/config.toml"))
        if runs and not files:
            names = ", ".join(str(run) for run in runs[:_TOLD]) + (", ..." if len(runs) > _TOLD else "")
            raise UserError(f'"{path}" holds runs, as a comparison does: name one of them ({names})')
        held = ", ".join(file.name for file in files[:_TOLD]) if files else "none"
        raise UserError(f'"{path}" is neither the folder of a run nor holds one exported model (found: {held})')
    return files[0]


def read(file: Path, backbone: str | None, trust: bool) -> tuple[Card, Tuning, Model, Params]:
    try:
        tensors, card = unpack(file.read_bytes())
        made = card["format"]
    except OSError as error:
        raise UserError(f'"{file}" cannot be read: {error.strerror}') from None
    except Exception:  # other safetensors files, or none at all
        raise UserError(f'"{file}" is not an exported model') from None
    if made != FORMAT:
        raise UserError(f'"{file}" is of format {made}, this promptfed reads format {FORMAT}: install a newer one')
    params, seeded = (P.under(tensors, part, "/") for part in (_PARAMS, _FROZEN))
    try:
        settings = dict(card["method"])
        name = settings.pop("name")
        module = name.split(":")[0]
        if module != name and not trust and module not in sys.modules:
            # A file that came from elsewhere must not choose which code runs.
            raise UserError(f'"{file}" needs the method "{name}": import {module} first, or say that you trust it')
        method = methods.create(name, settings)
        model = _backbone(card, backbone)
        _check(file, card, model, method, params, seeded)
        model.weights |= seeded
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'"{file}" is damaged ({type(error).__name__}: {error})') from None
    return card, method.tuning, model, params


def _backbone(card: Card, name: str | None) -> Model:
    channels, height, width = card["image"]
    classes, its = tuple(card["classes"]), card["backbone"]
    try:
        model = models.build(name or its["name"], (channels, height, width), len(classes), card["seed"], classes)
    except UserError as error:
        raise UserError(f"{error}; the exported model needs this backbone, backbone= says where it is") from None
    if its["part"] == "whole":
        return model
    assert isinstance(model, models.CLIP)
    return models.image_vit(model, len(classes), card["seed"], model.name)


def _check(file: Path, card: Card, model: Model, method: Method, params: Params, seeded: Params) -> None:
    """The file must hold what the method trains, and the backbone be the one it was trained with."""
    method.tuning.check(model)
    drawn, loaded = _frozen(model, method.tuning, params)
    init, client = method.tuning.init(model, card["seed"]), card["client"]
    held = init if client is None else {**init, **method.uploads(method.shared(init), client)}
    for found, wanted in ((params, held), (seeded, drawn)):
        if {name: p.shape for name, p in found.items()} != {name: p.shape for name, p in wanted.items()}:
            raise UserError(f'"{file}" is damaged: it does not hold what "{card["method"]["name"]}" trains')
    if card["backbone"]["frozen"] != (digest(loaded) if loaded else None):
        raise UserError(f'"{file}" was trained with other weights than backbone "{model.name}" has here')


def _frozen(model: Model, tuning: Tuning, params: Params) -> tuple[Params, Params]:
    """Frozen weights that predictions need: those drawn from a seed, and those that the backbone comes with."""
    if type(methods.layers(tuning)[-1]).init is Full.init:
        return {}, {}
    rest = {name: p for name, p in model.weights.items() if name not in params}
    fresh = model.preprocess is None
    seeded = {name: p for name, p in rest.items() if fresh or name.startswith("head.")}
    return seeded, {name: p for name, p in rest.items() if name not in seeded}
