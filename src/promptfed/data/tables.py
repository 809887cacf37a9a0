"""Datasets of the `datasets` library: by hub id, or in one of its layouts on disk."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..errors import UserError
from .hub import failed, snapshot, unreachable
from .sources import FIXED, SPLIT_NAMES, SPLITS, Located, Source, identify, walk

LABEL_NAMES = ("label", "fine_label", "labels", "class", "target", "category")  # in order of preference
_TABLES = frozenset({".parquet", ".arrow"})


class Wanted(NamedTuple):
    """What to read of a table; columns that are not given are found by type."""

    splits: tuple[str, ...]  # empty: all
    image: str | None
    label: str | None
    domain: str | None


def find(path: Path) -> list[Path]:
    """The parquet and arrow files at or below a path."""
    below = [path] if path.is_file() else [path / file for file in walk(path)[0]]
    return [file for file in below if file.suffix in _TABLES and file.is_file()]


def of_hub(name: str, config: str | None, wanted: Wanted) -> Located:
    """A dataset of the hub at its newest revision, or, without a connection, as downloaded before."""
    revision, folder = snapshot("dataset", name)
    if folder and not find(folder):
        raise unreachable("dataset", name)
    options = {} if folder else {"revision": revision}

    def load(datasets: Any, scratch: Path) -> Any:
        return datasets.load_dataset(str(folder or name), config, cache_dir=str(scratch), **options)

    return Located(f"hub {name} {config} {revision} {FIXED}", lambda scratch: _read(load, scratch, name, wanted))


def of_files(path: Path, wanted: Wanted) -> Located:
    """Parquet or arrow files: the hub's layout, `save_to_disk`'s, or a single file."""

    def load(datasets: Any, scratch: Path) -> Any:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        # the library converts parquet to arrow, which is of no use once the images are decoded
        options = {"path": path.suffix[1:], "data_files": str(path)} if path.is_file() else {"path": str(path)}
        return datasets.load_dataset(**options, cache_dir=str(scratch))

    identity = f"{identify(path if path.is_dir() else path.parent, find(path))} {FIXED}"
    return Located(identity, lambda scratch: _read(load, scratch, str(path), wanted))


def _read(load: Callable[[Any, Path], Any], scratch: Path, name: str, wanted: Wanted) -> Source:
    import datasets  # slow to import, and only needed for these sources

    try:
        loaded = load(datasets, scratch)
    except ConnectionError as error:
        raise unreachable("dataset", name) from error
    except Exception as error:  # the library wraps arbitrary exceptions of its readers
        _reraise_disk(error)
        raise failed("dataset", name, error) from error
    return _source(_pooled(loaded, name, wanted.splits), name, wanted)


def _reraise_disk(error: BaseException) -> None:
    """Raise the OSError in the chain of causes, if there is one: the cache reports it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
            raise cause
        cause = cause.__cause__ or cause.__context__


def _pooled(loaded: Any, name: str, splits: tuple[str, ...]) -> dict[str, Any]:
    """The splits asked for, by name; a dataset without splits counts as train."""
    parts: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    usual = {key: SPLIT_NAMES[SPLITS[key.lower()]] if key.lower() in SPLITS else key for key in parts}
    kept = {key: part for key, part in parts.items() if not splits or {key, usual[key]} & set(splits)}
    if not kept:
        raise UserError(f'dataset.splits: "{name}" has no split {" or ".join(splits)}, only {", ".join(parts)}')
    return kept


def _source(parts: dict[str, Any], name: str, wanted: Wanted) -> Source:
    import datasets

    features = next(iter(parts.values())).features
    pictures = [c for c, f in features.items() if isinstance(f, datasets.Image)]
    image = _column("image", wanted.image, features, pictures, name)
    named = [c for c, f in features.items() if isinstance(f, datasets.ClassLabel)]
    named = ["label"] if "label" in named else named or _plain(features)
    label = _column("label", wanted.label, features, named, name)
    domain = wanted.domain or ("domain" if "domain" in features and label != "domain" else None)

    labelled = {key: part for key, part in parts.items() if label in part.features and image in part.features}
    pooled = datasets.concatenate_datasets(
        [part.select_columns([c for c in (image, label, domain) if c]) for part in labelled.values()]
    )
    pooled = pooled.cast_column(image, datasets.Image(decode=False))  # decoded later, to skip corrupt images
    classes, labels = _names(pooled, label)
    domains, where = _names(pooled, domain) if domain else ((), None)
    cells = pooled.data.column(image)  # arrow: indexed ten times faster than the dataset
    sizes = [len(part) for part in labelled.values()]
    starts = np.cumsum([0, *sizes])

    def title(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{list(labelled)[part]}[{i - starts[part]}]"

    def picture(i: int) -> Image.Image:
        cell = cells[i].as_py()
        return Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"])

    split = np.repeat([SPLITS.get(key.lower(), 0) for key in labelled], sizes).astype(np.int8)
    source = Source(
        labels=labels, classes=classes, image=picture, name=title, domains=domains, domain=where, split=split
    )
    source = source.take(np.flatnonzero(labels >= 0))  # -1 marks a missing label on the hub
    if len(source) == 0:
        raise UserError(f'dataset.name = "{name}" holds no labelled images in {", ".join(parts)}')
    return source


def _plain(features: Any) -> list[str]:
    """A label column without class names: integers or words under one of the usual names."""
    kinds = {c: str(getattr(f, "dtype", "")) for c, f in features.items()}
    usable = ("int", "uint", "string", "large_string", "bool")
    return [c for c in LABEL_NAMES if kinds.get(c, "").startswith(usable)][:1]


def _column(role: str, given: str | None, features: Any, candidates: list[str], name: str) -> str:
    setting = f"dataset.{role}_column"
    if given is not None:
        if given not in features:
            raise UserError(f'{setting} = "{given}" is not a column of "{name}" (allowed: {", ".join(features)})')
        return given
    if len(candidates) == 1:
        return candidates[0]
    unclear = f"none of its columns ({', '.join(features)}) is clearly a {role}"
    reason = f"it could be {' or '.join(candidates)}" if candidates else unclear
    raise UserError(f'{setting} must be set for "{name}": {reason}')


def _names(pooled: Any, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names and int64 labels of a column; names in the source's order, or sorted where it has none."""
    feature = pooled.features[column]
    values = pooled.data.column(column).to_pylist()
    if hasattr(feature, "names"):
        return tuple(feature.names), np.array([-1 if v is None else v for v in values], dtype=np.int64)
    known = sorted({v for v in values if v is not None and v != -1})
    index = {v: i for i, v in enumerate(known)}
    return tuple(str(v) for v in known), np.array([index.get(v, -1) for v in values], dtype=np.int64)
