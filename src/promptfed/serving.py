"""What was trained, put to use: predict with a client's model, and export it as one file.

    import promptfed
    model = promptfed.load("runs/pfedpt-cifar10-seed0", client=3)  # or an exported file, which needs no run
    print(model.predict("photos/").labels)

An exported file holds what the tuning trains and, of the frozen weights, those that came from a seed: other processors
may draw other last bits. Pre-trained ones are loaded again by the name of the backbone, and must be the same. Nothing
else of the run is in it: no state of the server, no secret, nothing of another client.
"""

from __future__ import annotations

import fcntl
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from . import build, methods, models, record
from . import config as C
from . import params as P
from .client import CHUNK, train
from .data import Federation
from .data.images import pixels
from .data.sources import IMAGE_SUFFIXES
from .engines.base import ONCE
from .errors import UserError
from .host import Host
from .method import Batch, Context, Method, Phase, State
from .models import Model
from .params import Params
from .record import Busy
from .seeding import rng
from .store import Store
from .tuning import Full, Tuning
from .wire import pack, unpack

FORMAT = 1  # of exported files
SUFFIX = ".safetensors"
_PARAMS, _FROZEN = "params/", "frozen/"
_PRIVATE, _MEMORY = "private/", "memory/"  # as a host stores them

Card = dict[str, Any]
Images = str | Path | Image.Image | np.ndarray | Tensor | Sequence[str | Path | Image.Image | np.ndarray]


# ---- predicting


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of N images, without those that could not be read."""

    names: tuple[str, ...]  # their paths, or their places in what was given
    classes: tuple[str, ...]
    probabilities: np.ndarray  # float32 (N, classes)
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def indices(self) -> np.ndarray:
        """(N,): the most probable class of each image."""
        found: np.ndarray = self.probabilities.argmax(1)
        return found

    @property
    def labels(self) -> list[str]:
        """The same by name."""
        return [self.classes[i] for i in self.indices]

    def top(self, k: int) -> list[list[tuple[str, float]]]:
        """The k most probable classes of each image, best first."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k]
        return [
            [(self.classes[i], float(row[i])) for i in best]
            for row, best in zip(self.probabilities, order, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Predictor:
    """A client's model, or the global one. `card` says where it comes from and what it needs."""

    card: Card
    tuning: Tuning
    model: Model
    params: Params
    device: torch.device

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.card["classes"])

    def predict(self, images: Images, batch: int = CHUNK) -> Predictions:
        """uint8 (N, H, W, C) or (N, C, H, W); or a file, a folder (and all below it), or a list of files, folders,
        PIL images and uint8 (H, W, C). Decoded, resized and normalised as in training, `batch` images at a time.
        """
        if not 1 <= batch <= CHUNK:  # a pass never spans two chunks of an evaluation, which place moving prompts
            raise UserError(f"batch = {batch} must be 1 to {CHUNK}")
        listed = _listed(images, self.model.image)
        names: list[str] = []
        skipped: list[str] = []
        waiting: list[np.ndarray] = []
        found: list[np.ndarray] = []

        def flush() -> None:
            if waiting:
                found.append(self._probabilities(np.stack(waiting), len(names) - len(waiting)))
                waiting.clear()

        for name, image in listed:
            decoded = decode(image, self.model.image)
            if decoded is None:
                skipped.append(name)
                continue
            names.append(name)
            waiting.append(decoded)
            if len(waiting) == batch or len(names) % CHUNK == 0:
                flush()
        flush()
        complain(skipped, len(listed), "images")
        return Predictions(tuple(names), self.classes, np.concatenate(found), tuple(skipped))

    def _probabilities(self, stored: np.ndarray, at: int) -> np.ndarray:
        """(B, C, H, W) uint8, the first of them at this place -> (B, classes). As an evaluation does it."""
        scale = self.card["normalisation"]
        mean, std = (torch.tensor(scale[k], device=self.device).reshape(-1, 1, 1) * 255 for k in ("mean", "std"))
        x = (torch.from_numpy(stored).to(self.device).float() - mean) / std
        y = torch.zeros(len(x), dtype=torch.int64, device=self.device)
        noise = torch.from_numpy(rng(0, "evaluation", at - at % CHUNK).random(2, np.float32)).to(self.device)
        nobody = torch.zeros((), dtype=torch.int64, device=self.device)
        ctx = Context({}, {}, Phase({}, 1, name="evaluate"), nobody, nobody.expand(len(self.classes)))
        with torch.no_grad():
            frozen = self.tuning.frozen(self.model, x) if self.tuning.frozen_name(self.model) else {}
            if frozen and not self.tuning.images:
                x = x.new_empty(len(x), 0)
            logits = self.tuning.logits(self.model, self.params, Batch(x, y, None, noise, {}, frozen), ctx)
            probabilities: np.ndarray = logits.softmax(1).cpu().numpy()
        return probabilities

    def save(self, path: str | Path) -> Path:
        """One safetensors file with the card inside, and a copy of the card beside it for people; -> the file."""
        path = Path(path).expanduser()
        if path.suffix != SUFFIX:
            raise UserError(f'"{path}" must end in {SUFFIX}')
        seeded, loaded = _frozen(self.model, self.tuning, self.params)
        card = {**self.card, "backbone": {**self.card["backbone"], "frozen": _digest(loaded)}}
        tensors = {_PARAMS + name: p for name, p in self.params.items()}
        tensors |= {_FROZEN + name: p for name, p in seeded.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            record.write(path, pack(tensors, card))
            record.write(path.with_suffix(".json"), (json.dumps(card, indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(f'"{path}" cannot be written: {error.strerror}') from None
        return path


def decode(image: Any, shape: tuple[int, int, int]) -> np.ndarray | None:
    """A path, a PIL image or an array -> uint8 (C, H, W); None if it cannot be read."""
    channels, height, width = shape
    try:
        if isinstance(image, np.ndarray):
            if image.shape == shape:
                return image
            image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 and image.ndim == 3 else image)
        if isinstance(image, Path):
            with Image.open(image) as opened:
                array = pixels(opened, channels, None)
        else:
            array = pixels(image, channels, None)
    except Exception:  # decoders raise anything at all on broken bytes
        return None
    if array.shape[1:] == (height, width):
        return array
    plain = Image.fromarray(array[0] if channels == 1 else array.transpose(1, 2, 0))
    fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR)  # as data.images.pixels does
    return pixels(fitted, channels, None)


def complain(skipped: Sequence[str], count: int, setting: str) -> None:
    """Names what could not be read: a warning, or an error if that is everything."""
    if not count:
        raise UserError(f"{setting}: there is none")
    if not skipped:
        return
    shown = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    said = f"{len(skipped)} corrupt image{'s' if len(skipped) > 1 else ''} ({shown})"
    if len(skipped) == count:
        raise UserError(f"{setting}: {said}, and no other")
    warnings.warn(f"{setting}: {said} skipped", stacklevel=3)


def _listed(images: Images, shape: tuple[int, int, int]) -> list[tuple[str, Path | Image.Image | np.ndarray]]:
    """What to predict, one by one, with names."""
    if isinstance(images, Tensor):
        images = images.cpu().numpy()
    if isinstance(images, np.ndarray):
        images = _rows(images, shape)
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    listed: list[tuple[str, Path | Image.Image | np.ndarray]] = []
    for i, item in enumerate(images):
        if isinstance(item, str | Path):
            listed += [(str(path), path) for path in _files(Path(item).expanduser())]
        elif isinstance(item, Image.Image) or (isinstance(item, np.ndarray) and item.dtype == np.uint8):
            listed.append((str(i), item))
        else:
            raise UserError(f"images[{i}] is {type(item).__name__}; allowed: paths, PIL images and uint8 arrays")
    return listed


def _rows(images: np.ndarray, shape: tuple[int, int, int]) -> list[np.ndarray]:
    """The images of an array: channels first if that is the model's own shape, or if channels cannot be last."""
    if images.dtype == np.uint8 and images.ndim == 4 and 0 not in images.shape[1:]:
        if images.shape[1:] == shape:
            return list(images)
        if images.shape[-1] in (1, 3, 4):
            return list(images)
        if images.shape[1] in (1, 3, 4):
            return list(images.transpose(0, 2, 3, 1))
    raise UserError(
        f"images must be uint8 (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels, got {images.dtype} {images.shape}"
    )


def _files(path: Path) -> list[Path]:
    """The file, or all images below the folder that are not hidden."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f'images: "{path}" does not exist')
    below = sorted(path.rglob("*"))
    found = [
        p
        for p in below
        if p.suffix.lower() in IMAGE_SUFFIXES
        and p.is_file()
        and not any(part.startswith(".") for part in p.relative_to(path).parts)
    ]
    if not found:
        raise UserError(f'images: "{path}" holds no images ({", ".join(sorted(IMAGE_SUFFIXES))})')
    return found


# ---- from a run's folder


@dataclass(frozen=True)
class Trained:
    """A run read back: its parts, and the server's state behind its last completed round."""

    path: Path
    parts: build.Parts
    state: State
    round: int

    def client(self, client: int) -> Predictor:
        """The model that the run's evaluation scored: as received, with what is private, adapted if the method does."""
        parts, sites = self.parts, self.parts.federation.sites
        if not 0 <= client < len(sites):
            raise UserError(f"client = {client} must be 0 to {len(sites) - 1}, the clients of the run")
        joins = parts.config.join.round
        if client in parts.newcomers and joins > self.round and not parts.method.serves:
            raise UserError(f"client = {client} has no model yet: it joins in round {joins}")
        if parts.config.consortium:
            return self._predictor(self._sent(client), {"client": client, "metrics": self._metrics(client)})
        store = _Kept(self.path / "clients")
        try:
            params = personal(parts, store, self.state, client, self.round + 1)
        finally:
            store.close()
        site = sites[client]
        whose = {"client": client, "site": site.name, "n_train": len(site.train)}
        return self._predictor(params, {**whose, "metrics": self._metrics(client)})

    def _sent(self, client: int) -> Params:
        """A model of which the site has nothing to itself."""
        method = self.parts.method
        if method.adapt() or len(method.shared(self.parts.init)) < len(self.parts.init):
            raise UserError(
                f"client = {client} has its model at its site, with parameters that never leave it: use it there, "
                "by the site's own folder"
            )
        return method.start(self.parts.init, method.down(self.state, client), {}, {})

    def common(self) -> Predictor:
        """The one model that everybody can use."""
        method = self.parts.method
        down = method.common(self.state)
        if down is None:
            if method.personal:
                name = self.parts.config.method.name
                raise UserError(f'"{name}" has no global model: its clients have models of their own, ask for one')
            down = method.down(self.state, 0)
        params = method.start(self.parts.init, down, {}, {})
        return self._predictor(params, {"client": None, "metrics": self._metrics(None)})

    def _predictor(self, params: Params, about: Card) -> Predictor:
        return predictor(self.parts, params, {**about, "round": self.round})

    def _metrics(self, client: int | None) -> Card:
        """What the run found out about this model, if it evaluated behind its last round."""
        line = next((line for line in record.read_lines(self.path) if line["round"] == self.round), {})
        if client is None:
            stage = "common" if "common" in line else "aggregated"
            return {stage: line[stage]["summary"]} if stage in line else {}
        rows = {
            stage: next((row for row in line[stage]["clients"] if row["client"] == client), None)
            for stage in record.STAGES
            if stage in line
        }
        return {stage: row for stage, row in rows.items() if row}


class _Kept(Store):
    """What a finished run's clients remember, opened such that nothing is written, not even a lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._env = lmdb.open(str(path), readonly=True, lock=False, create=False, readahead=False)
        except lmdb.Error as error:
            raise UserError(f'the clients\' state in "{path}" cannot be opened: {error}') from None


def personal(parts: build.Parts, store: Store, state: State, client: int, before: int) -> Params:
    """A client's parameters at the start of a round, adapted where the method adapts: as Host.evaluate() has them."""
    return adapted(parts, store, parts.method.down(state, client), client, before)


def adapted(parts: build.Parts, store: Store, received: Params, client: int, before: int) -> Params:
    """The same of what the client has received."""
    method = parts.method
    down = {name: p for name, p in received.items() if not name.startswith(ONCE)}
    phases = method.adapt()
    if not phases:
        kept = store.get(client, before)
        private, memory = (
            {name.removeprefix(prefix): p for name, p in kept.items() if name.startswith(prefix)}
            for prefix in (_PRIVATE, _MEMORY)
        )
        return method.start(parts.init, down, private, memory)
    config = parts.config
    host = Host(
        method, parts.model, parts.federation, store, config.seed, parts.device, 1, config.engine.frozen_gb * 1e9
    )
    work = host.work(client, P.to(down, parts.device), before)
    return train(method, parts.model, [work], phases, config.seed, before)[0].params


def predictor(parts: build.Parts, params: Params, about: Card) -> Predictor:
    """Parameters with all that they need to predict."""
    config, data = parts.config, parts.federation.dataset
    channels, height, width = parts.model.image
    scale = parts.model.preprocess or data  # as frozen.normalisation() has it
    card: Card = {
        "format": FORMAT,
        "method": config.method.complete(),
        "backbone": {"name": config.backbone.name, "part": config.backbone.part},
        "seed": config.seed,
        "classes": list(data.classes),
        "image": [channels, height, width],
        "preprocessing": {
            "mode": "grey" if channels == 1 else "RGB",
            "fit": "the middle is cut out",
            "interpolation": "bilinear",
        },
        "normalisation": {
            "of": "dataset" if scale is data else "backbone",
            "mean": list(scale.mean),
            "std": list(scale.std),
        },
        "dataset": data.name,
        **about,
        "versions": record.versions(),
    }
    return Predictor(card, parts.method.tuning, parts.model.to(parts.device), P.to(params, parts.device), parts.device)


@contextmanager
def trained(path: str | Path, federation: Federation | None = None, device: str = "auto") -> Iterator[Trained]:
    """A run's folder, read and not written to; no run goes on in it meanwhile."""
    path = Path(path).expanduser()
    if not (path / "config.toml").exists():
        raise UserError(f'"{path}" is not the folder of a run (it has no config.toml)')
    if not (path / "checkpoint.safetensors").exists():
        raise UserError(f'"{path}" has not completed a round yet')
    with _shared(path):
        # Where it ran is not where it is used.
        config = C.make(C.read(path / "config.toml"), {"engine": {"device": device, "workers": 1, "block": 1}})
        split = path / "partition.json"
        held = Federation.load(split, federation.dataset) if federation else None
        parts = build.assemble(config, held, split)
        state, note = unpack((path / "checkpoint.safetensors").read_bytes())
        yield Trained(path, parts, state, int(note["round"]))


@contextmanager
def _shared(path: Path) -> Iterator[None]:
    """Others may read at the same time, nobody may write."""
    file = path / ".lock"
    if not file.exists():  # a copy of a run
        yield
        return
    with file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f'"{path}" is in use: the run is still going on') from None
        yield


# ---- loading


def load(
    path: str | Path,
    *,
    client: int | None = None,
    common: bool = False,
    backbone: str | None = None,
    device: str = "auto",
    trust: bool = False,
    federation: Federation | None = None,
) -> Predictor:
    """The model of a run's client, a run's global model (`common`), or an exported one, by its file or folder; or at a
    site of a consortium its own, by the site's folder.

    `backbone`: where an exported model finds its pre-trained weights, if not where it was trained. `trust`: import the
    module of a method that is not promptfed's own. `federation`: of a run that was given one.
    """
    path = Path(path).expanduser()
    if client is not None and common:
        raise UserError(f"client = {client} and the global model cannot both be asked for")
    if not path.exists():
        raise UserError(f'"{path}" does not exist; allowed: the folder of a run, or an exported {SUFFIX} file')
    if (path / "config.toml").exists():
        with trained(path, federation, device) as run:
            if client is None and not common and run.parts.method.personal:
                count = len(run.parts.federation.sites)
                raise UserError(
                    f'client must be given, 0 to {count - 1}: "{run.parts.config.method.name}" has personal models'
                )
            return run.common() if client is None else run.client(client)
    at = next((folder for folder in (path, path.parent.parent) if (folder / "site.toml").exists()), None)
    if at and path.is_dir():
        from .sites import Place

        made = Place.open(at).predictor(path.name if at != path else None, device)
    else:
        made = _read(_exported(path), backbone, device, trust)
    if (client is not None and client != made.card["client"]) or (common and made.card["client"] is not None):
        held = made.card["client"]
        raise UserError(f'"{path}" holds {"the global model" if held is None else f"the model of client {held}"} only')
    return made


def export(
    run: str | Path, out: str | Path | None = None, *, client: int | None = None, common: bool = False, **how: Any
) -> Path:
    """Writes one model of a run to a file of its own (default: in the run's folder, below exports/); -> the file."""
    made = load(run, client=client, common=common, **how)
    held = made.card["client"]
    name = f"{'global' if held is None else f'client-{held}'}{SUFFIX}"
    path = Path(out).expanduser() if out else Path(run).expanduser() / "exports" / name
    return made.save(path / name if path.is_dir() else path)


def _exported(path: Path) -> Path:
    """The file that is meant by a path: itself, the one beside a card, or the only one in a folder."""
    if not path.is_dir():
        return path.with_suffix(SUFFIX) if path.suffix == ".json" else path
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) != 1:
        held = ", ".join(file.name for file in files[:5]) if files else "none"
        raise UserError(f'"{path}" is neither the folder of a run nor holds one exported model (found: {held})')
    return files[0]


def _read(file: Path, backbone: str | None, device: str, trust: bool) -> Predictor:
    try:
        tensors, card = unpack(file.read_bytes())
        made = card["format"]
    except OSError as error:
        raise UserError(f'"{file}" cannot be read: {error.strerror}') from None
    except Exception:  # other safetensors files, and what is none
        raise UserError(f'"{file}" is not an exported model') from None
    if made != FORMAT:
        raise UserError(f'"{file}" is of format {made}, this promptfed reads format {FORMAT}: install a newer one')
    params = {name.removeprefix(_PARAMS): p for name, p in tensors.items() if name.startswith(_PARAMS)}
    seeded = {name.removeprefix(_FROZEN): p for name, p in tensors.items() if name.startswith(_FROZEN)}
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
    at = build.pick_device(device)
    return Predictor(card, method.tuning, model.to(at), P.to(params, at), at)


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
    for found, wanted in ((params, method.tuning.init(model, card["seed"])), (seeded, drawn)):
        if {name: p.shape for name, p in found.items()} != {name: p.shape for name, p in wanted.items()}:
            raise UserError(f'"{file}" is damaged: it does not hold what "{card["method"]["name"]}" trains')
    if card["backbone"]["frozen"] != _digest(loaded):
        raise UserError(f'"{file}" was trained with other weights than backbone "{model.name}" has here')


def _frozen(model: Model, tuning: Tuning, params: Params) -> tuple[Params, Params]:
    """Frozen weights that predictions need: those drawn from a seed, and those that the backbone comes with."""
    if type(methods.peel(tuning)[1]).init is Full.init:
        return {}, {}
    rest = {name: p for name, p in model.weights.items() if name not in params}
    fresh = model.preprocess is None
    seeded = {name: p for name, p in rest.items() if fresh or name.startswith("head.")}
    return seeded, {name: p for name, p in rest.items() if name not in seeded}


def _digest(weights: Params) -> str | None:
    if not weights:
        return None
    digest = blake2b(digest_size=16)
    for name, p in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
