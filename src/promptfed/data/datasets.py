"""A labelled image dataset, decoded once and memory-mapped."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from .. import steps
from ..errors import UserError, nearest
from . import cache, sources, tables
from .catalogue import CATALOGUE, UNLISTED, Entry
from .images import Resize, pixels
from .sources import Labels, Located, Source

Scale = tuple[float, ...] | None  # one value per channel
VARIED = ("augment", "views")  # settings of training, whatever the images
_TOLERATED = 0.01  # share of corrupt images that is skipped with a warning
_CHUNK = 256  # images decoded between two writes
_SCALE = "Normalisation, one value per channel for pixels in 0..1; none: the catalogue's, or computed."
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset(Labels):
    """N labelled images. Sent to another process as the path of its cache folder."""

    name: str
    images: np.ndarray  # uint8 (N, C, H, W), read-only
    mean: tuple[float, ...]  # per channel, for pixels in 0..1
    std: tuple[float, ...]
    fingerprint: str  # of pixels, labels and classes
    path: Path
    skipped: tuple[str, ...] = ()  # corrupt images that were skipped

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {len(self)} images, {len(self.classes)} classes, {str(self.path)!r})"

    def __reduce__(self) -> Any:
        return Dataset.open, (self.path,)

    def part(self, chosen: np.ndarray) -> "Dataset":
        """What is known about the images at these indices, without their pixels."""
        arrays = {key: array[chosen] for key, array in self.arrays().items()}
        return replace(self, images=self.images[:0], **arrays)

    @classmethod
    def open(cls, path: Path | str) -> "Dataset":
        """Map a cache folder."""
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text())
            shape = tuple(meta.pop("shape"))
            mapped: np.ndarray = np.memmap(path / "images.bin", np.uint8, "r", shape=shape)
            known: dict[str, Any] = {name: np.load(path / f"{name}.npy") for name in meta.pop("arrays")}
            known |= {key: tuple(value) if isinstance(value, list) else value for key, value in meta.items()}
            return cls(images=mapped, path=path, **known)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is not a dataset of the image cache; delete it and load the dataset again"
            ) from error

    def verify(self) -> None:
        """Reads all pixels and labels; raises UserError unless they are those that were written."""
        digest = sha256()
        for i in range(0, len(self), 256):
            digest.update(np.ascontiguousarray(self.images[i : i + 256]).data)
        if _labelled(digest, self.images.shape, self) != self.fingerprint:
            raise UserError(
                f'"{self.path}" is damaged: its images or labels are not those that were decoded; delete it, and they '
                "are decoded again"
            )

    @classmethod
    def from_arrays(
        cls,
        name: str,
        images: np.ndarray,
        labels: np.ndarray,
        classes: tuple[str, ...],
        *,
        mean: Scale = None,
        std: Scale = None,
        domains: tuple[str, ...] = (),
        domain: np.ndarray | None = None,
        sites: tuple[str, ...] = (),
        site: np.ndarray | None = None,
        split: np.ndarray | None = None,
        path: Path | None = None,
    ) -> "Dataset":
        """A dataset of your own: images uint8 (N, C, H, W) with C = 1 or 3; written to the cache, or to `path`."""
        known = Labels(
            labels=np.asarray(labels).astype(np.int64),
            classes=tuple(classes),
            domains=tuple(domains),
            domain=domain,
            sites=tuple(sites),
            site=site,
            split=split,
        )
        _check(images, known)
        mean, std = (_per_channel(key, given, images.shape[1]) for key, given in (("mean", mean), ("std", std)))
        if path is None:
            content = sha256(np.ascontiguousarray(images).data)
            for array in (known.labels, domain, site, split):
                content.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
            rest = [name, images.shape, known.classes, known.domains, known.sites, mean, std]
            path = cache.root() / f"{cache.slug(name)}-{cache.key(content=content.hexdigest(), rest=rest)}"
            if cache.finished(path):
                return cls.open(path)
        elif cache.finished(path):  # another dataset was written there before
            shutil.rmtree(path)
        blocks = (np.ascontiguousarray(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK))
        with cache.writing(path) as folder:
            measured, digest = _stream(folder, blocks, mean, std)
            _finish(folder, digest, known, {"name": name, **measured})
        return cls.open(path)


class DatasetConfig(BaseModel):
    """The [dataset] section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "digits", min_length=1, description="A catalogue name, a hub id such as uoft-cs/cifar10, or a path."
    )
    size: int | None = Field(
        None,
        ge=4,
        le=1024,
        description="Images become size x size pixels; none: a pre-trained backbone's own size, otherwise the "
        "catalogue's, otherwise their own if all are equal.",
    )
    channels: Literal[1, 3] | None = Field(None, description="1 for grey, 3 for colour; none: 3.")
    splits: Literal["all", "train", "val", "test"] = Field(
        "all",
        description="Which splits of the source are pooled before clients get their own train, validation and test.",
    )
    limit: int | None = Field(
        None, ge=1, description="Use a stratified subset of this many images, always the same one; none: all of them."
    )
    image_column: str | None = Field(None, description="Column of a hub or parquet dataset; none: found by its type.")
    label_column: str | None = Field(None, description="Column of a hub or parquet dataset; none: found by its type.")
    domain_column: str | None = Field(
        None, description="Column with the domain of each image; none: the one called domain, if there is one."
    )
    mean: Scale = Field(None, description=_SCALE)
    std: Scale = Field(None, description=_SCALE)
    digest: str | None = Field(
        None, description="Fingerprint that a dataset of the image cache must have, recorded by a run; none: any."
    )
    augment: Literal["none", "flip", "crop+flip"] = Field(
        "none", description="How training images vary: mirrored at random, or also cropped at random and resized."
    )
    views: int = Field(
        0,
        ge=0,
        description="Fixed views of each training image, of which every epoch draws one, so that outputs of frozen "
        "layers are cached; 0: a new view in every epoch, and nothing of training is cached.",
    )

    @model_validator(mode="after")
    def _has_views(self) -> "DatasetConfig":
        if self.views and self.augment == "none":
            raise UserError(f'dataset.views = {self.views} needs dataset.augment to be "flip" or "crop+flip"')
        if self.views not in (0, 2) and self.augment == "flip":
            raise UserError(f'dataset.views = {self.views}: dataset.augment = "flip" has 2 views (allowed: 0 or 2)')
        return self

    @classmethod
    def of(cls, dataset: Dataset) -> "DatasetConfig":
        """What opens this very dataset again: its folder in the cache, and the digest of its content."""
        return cls(name=str(dataset.path.absolute()), digest=dataset.fingerprint)


def load(config: DatasetConfig | str, published: Resize | None = None) -> Dataset:
    """Find a dataset, decode it into the cache unless it is there already, and map it: load("digits")

    `published`: how the images of a pre-trained backbone are resized. Its size is the default of `dataset.size`.
    """
    config = DatasetConfig(name=config) if isinstance(config, str) else config
    entry = CATALOGUE.get(config.name, UNLISTED)
    if entry is UNLISTED and (config.digest or cache.holds(Path(config.name).expanduser())):
        return _reopened(config)
    channels = config.channels or 3
    resize = _resize(config, entry, published)
    mean = _per_channel("mean", config.mean or entry.mean, channels)
    std = _per_channel("std", config.std or entry.std, channels)
    located = _locate(config, entry)
    path = Path(config.name).expanduser()
    name = path.resolve().name if entry is UNLISTED and path.exists() else config.name
    key = cache.key(
        identity=located.identity,
        settings=config.model_dump(exclude={"name", "mean", "std", "size", "channels", *VARIED, "digest"}),
        resolved=[resize and asdict(resize), channels, mean, std, entry.keep, entry.names],
    )
    path = cache.root() / f"{cache.slug(name)}-{key}"
    if not cache.finished(path):
        with cache.writing(path) as folder:
            scratch = folder / "scratch"
            scratch.mkdir()
            source = located.read(scratch).rename(entry.names)
            source = source.keep(entry.keep) if entry.keep else source
            source = source.subset(config.limit) if config.limit else source
            skipped: list[int] = []
            decoded = _decoded(name, source, channels, resize, skipped)
            measured, digest = _stream(folder, steps.counted(f"decoding {name}", len(source), decoded), mean, std)
            known = source.take(np.setdiff1d(np.arange(len(source)), skipped))
            measured["skipped"] = [source.name(i) for i in skipped]
            _finish(folder, digest, known, {"name": name, **measured})
            shutil.rmtree(scratch, ignore_errors=True)
    dataset = Dataset.open(path)
    if dataset.skipped:
        warnings.warn(_corrupt(dataset.name, dataset.skipped), stacklevel=2)
    return dataset


def _reopened(config: DatasetConfig) -> Dataset:
    """A dataset that was decoded before, or made from arrays."""
    path = Path(config.name).expanduser()
    if not cache.holds(path):
        raise UserError(
            f'dataset.name = "{path}" is no longer in the image cache; make it again with Dataset.from_arrays()'
        )
    for key, value in config.model_dump(exclude={"name", "digest", *VARIED}, exclude_defaults=True).items():
        raise UserError(f'dataset.{key} = {value} cannot be applied to "{path}", whose images are decoded already')
    dataset = Dataset.open(path)
    if config.digest not in (None, dataset.fingerprint):
        raise UserError(f'dataset.digest = "{config.digest}" is not that of "{path}": it holds other images now')
    return dataset


def _resize(config: DatasetConfig, entry: Entry, published: Resize | None) -> Resize | None:
    """As the backbone was published, at the size that is given; None: images keep the size that they have."""
    if published:
        return published.at(config.size) if config.size else published
    side = config.size or entry.size
    return Resize((side, side)) if side else None


def _locate(config: DatasetConfig, entry: Entry) -> Located:
    """Which source a name stands for: a catalogue entry, a path, or a hub id, in this order."""
    splits = (config.splits,) if config.splits != "all" else entry.splits
    columns = (getattr(config, key) or getattr(entry, key) for key in ("image_column", "label_column", "domain_column"))
    wanted = tables.Wanted(splits, *columns)
    if config.name in sources.EMBEDDED:
        return sources.EMBEDDED[config.name]
    if entry.folder is not None and Path(entry.folder).is_dir():
        return sources.idx(Path(entry.folder), splits)
    if entry.hub is not None:
        return tables.of_hub(entry.hub, entry.config, wanted)
    if entry.manual is not None:
        raise UserError(f'dataset.name = "{config.name}" has to be fetched by hand: {entry.manual}')
    path = Path(config.name).expanduser()
    if path.exists():
        if path.is_dir() and sources.idx_files(path):
            return sources.idx(path, splits)
        if tables.find(path):
            return tables.of_files(path, wanted)
        if path.is_dir():
            return sources.folder(path, splits)
        raise UserError(f'dataset.name = "{config.name}" is neither a folder nor a parquet or arrow file')
    if config.name.startswith(("/", "./", "../", "~")) or config.name.endswith("/") or config.name.count("/") > 1:
        raise UserError(f'dataset.name = "{config.name}" does not exist; allowed: an existing folder or parquet file')
    if _HUB_ID.fullmatch(config.name):
        return tables.of_hub(config.name, None, wanted)
    raise UserError(
        f'dataset.name = "{config.name}" is unknown{nearest(config.name, CATALOGUE)} '
        f"(allowed: a path, a hub id such as uoft-cs/cifar10, or one of {', '.join(sorted(CATALOGUE))})"
    )


def _decoded(
    name: str, source: Source, channels: int, resize: Resize | None, skipped: list[int]
) -> Iterator[np.ndarray]:
    """Blocks of decoded images, uint8 (B, C, H, W); the indices of corrupt ones are added to `skipped`."""
    count = len(source)
    shape: tuple[int, ...] | None = None

    def decode(i: int) -> np.ndarray | None:
        try:
            with source.image(i) as image:
                return pixels(image, channels, resize)
        except Exception:  # decoders raise arbitrary exceptions on corrupt files
            return None

    with ThreadPoolExecutor() as pool:
        for start in range(0, count, _CHUNK):
            block = []
            # threads, since decoders release the interpreter lock
            for i, one in enumerate(pool.map(decode, range(start, min(start + _CHUNK, count))), start):
                if one is None:
                    skipped.append(i)
                    if len(skipped) > _TOLERATED * count:
                        names = [source.name(j) for j in skipped]
                        raise UserError(f"{_corrupt(name, names)}; at most 1 % of {count} images may be corrupt")
                    continue
                shape = shape or one.shape
                if one.shape != shape:
                    raise UserError(
                        f'dataset.size must be set for "{name}": {source.name(i)} has {one.shape[1]} x {one.shape[2]} '
                        f"pixels, earlier images {shape[1]} x {shape[2]}"
                    )
                block.append(one)
            if block:
                yield np.stack(block)


def _corrupt(name: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f'dataset.name = "{name}": {len(names)} corrupt image{"s" if len(names) > 1 else ""} ({shown})'


def _stream(folder: Path, blocks: Iterator[np.ndarray], mean: Scale, std: Scale) -> tuple[dict[str, Any], Any]:
    """Append blocks to images.bin, a plain file, since a full disk kills a process that writes to a mapped one.

    -> shape, mean and std of the images (computed if None), and the sha256 of the pixels, to be continued.
    """
    digest = sha256()
    n, shape = 0, (0, 0, 0)
    total: np.ndarray = np.zeros(1)
    square: np.ndarray = np.zeros(1)
    with (folder / "images.bin").open("wb") as file:
        for block in blocks:
            file.write(block.data)
            digest.update(block.data)
            n, shape = n + len(block), block.shape[1:]
            # counts of the 256 values per channel: exact sums whatever the size of the dataset
            values = block.transpose(1, 0, 2, 3).reshape(shape[0], -1)
            counts = np.stack([np.bincount(channel, minlength=256) for channel in values])
            total = total + counts @ (np.arange(256) / 255)
            square = square + counts @ (np.arange(256) / 255) ** 2
    if n == 0:
        raise UserError("dataset.name: no image could be read")
    count = n * shape[1] * shape[2]
    mean = mean or tuple((total / count).round(4).tolist())
    spread = np.sqrt(np.maximum(square / count - (total / count) ** 2, 1e-6))  # of a constant channel: not zero
    return {"shape": (n, *shape), "mean": mean, "std": std or spread.round(4).tolist()}, digest


def _finish(folder: Path, digest: Any, known: Labels, meta: dict[str, Any]) -> None:
    """Write everything but the pixels; meta.json last."""
    arrays = known.arrays()
    for key, array in arrays.items():
        np.save(folder / f"{key}.npy", array.astype(np.int8 if key == "split" else np.int64))
    meta |= {"classes": known.classes, "domains": known.domains, "sites": known.sites}
    meta |= {"arrays": list(arrays), "fingerprint": _labelled(digest, meta["shape"], known)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _labelled(pixels: Any, shape: tuple[int, ...], known: Labels) -> str:
    """The fingerprint of a dataset, by the sha256 of its pixels so far."""
    pixels.update(json.dumps([shape, known.classes]).encode())
    pixels.update(known.labels.astype("<i8").tobytes())
    found: str = pixels.hexdigest()
    return found


def _per_channel(setting: str, values: Scale, channels: int) -> Scale:
    if not values:
        return None
    if setting == "std" and min(values) <= 0:
        raise UserError(f"dataset.std = {list(values)} must be above 0")
    if len(values) == channels:
        return tuple(values)
    if len(values) == 1 or channels == 1:
        return (sum(values) / len(values),) * channels
    raise UserError(f"dataset.{setting} = {list(values)} must hold 1 or {channels} values")


def _check(images: np.ndarray, known: Labels) -> None:
    """Refuse inconsistent arrays before anything is written."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape:
        raise UserError(f"images must be uint8 (N, C, H, W) with C = 1 or 3, got {images.dtype} {images.shape}")
    n = len(images)
    if known.labels.shape != (n,):
        raise UserError(f"labels must hold one integer for each of the {n} images, got shape {known.labels.shape}")
    if known.labels.min() < 0 or known.labels.max() >= len(known.classes):
        raise UserError(f"labels must lie in 0..{len(known.classes) - 1}, one for each of the classes")
    for name, array, names in (("domain", known.domain, known.domains), ("site", known.site, known.sites)):
        if (array is None) != (not names):
            raise UserError(f"{name} and {name}s must be given together")
        if array is not None and (array.shape != (n,) or array.min() < 0 or array.max() >= len(names)):
            raise UserError(f"{name} must hold an index into {name}s for each of the {n} images")
    if known.split is not None and (known.split.shape != (n,) or not set(np.unique(known.split)) <= {0, 1, 2}):
        raise UserError(f"split must hold 0, 1 or 2 for each of the {n} images")
