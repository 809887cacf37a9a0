"""Datasets of the `datasets` library: by hub id, or in one of its layouts on disk."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UserError
from .hub import failed, first_line, snapshot, unreachable
from .sources import SPLIT_NAMES, SPLITS, Located, Source, identify

LABEL_NAMES = ("label", "fine_label", "labels", "class", "target", "category")  # in order of preference
_TABLES = frozenset({".parquet", ".arrow"})


def find(path: Path) -> list[Path]:
    """The parquet and arrow files at or below a path."""
    if path.is_file():
        return [path] if path.suffix in _TABLES else []
    found = (p for p in path.rglob("*") if p.suffix in _TABLES and p.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts))


def of_hub(
    name: str,
    *,
    config: str | None = None,
    splits: tuple[str, ...] = (),
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
) -> Located:
    """A dataset of the hub at its newest revision, or, without a connection, as downloaded before."""
    revision, folder = snapshot("dataset", name)
    if folder and not find(folder):
        raise unreachable("dataset", name)

    def read(scratch: Path) -> Source:
        return _source(
            _pooled(_fetch(name, config, revision, folder, scratch), name, splits), name, image, label, domain
        )

    return Located(f"hub {name} {config} {revision}", read)


def of_files(
    path: Path,
    *,
    splits: tuple[str, ...] = (),
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
) -> Located:
    """Parquet or arrow files: the hub's layout, `save_to_disk`'s, or a single file."""
    files = find(path)
    folder = path if path.is_dir() else path.parent

    def read(scratch: Path) -> Source:
        return _source(_pooled(_open(path, files, scratch), str(path), splits), str(path), image, label, domain)

    return Located(identify(folder, files), read)


def _open(path: Path, files: list[Path], scratch: Path) -> Any:
    import datasets  # slow to import, and only needed for these sources

    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return datasets.load_from_disk(str(path))
        where = str(scratch)  # the library converts parquet to arrow, which is of no use once the images are decoded
        with _quiet():
            if path.is_file():
                kind = "parquet" if path.suffix == ".parquet" else "arrow"
                return datasets.load_dataset(kind, data_files=str(path), cache_dir=where)
            return datasets.load_dataset(str(path), cache_dir=where)
    except Exception as error:  # the library wraps arbitrary exceptions of its readers
        _reraise_disk(error)
        raise UserError(f'dataset.name = "{path}" cannot be read: {first_line(error)}') from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, which are for downloads."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _reraise_disk(error: BaseException) -> None:
    """Raise the OSError in the chain of causes, if there is one: the cache reports it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
            raise cause
        cause = cause.__cause__ or cause.__context__


def _fetch(name: str, config: str | None, revision: str, folder: Path | None, scratch: Path) -> Any:
    import datasets

    try:
        if folder is not None:
            return datasets.load_dataset(str(folder), config, cache_dir=str(scratch))
        return datasets.load_dataset(name, config, revision=revision, cache_dir=str(scratch))
    except ConnectionError as error:
        raise unreachable("dataset", name) from error
    except Exception as error:  # the library wraps arbitrary exceptions of its readers
        _reraise_disk(error)
        raise failed("dataset", name, error) from error


def _pooled(loaded: Any, name: str, splits: tuple[str, ...]) -> dict[str, Any]:
    """The splits asked for, by name; a dataset without splits counts as train."""
    parts: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    kept = {key: part for key, part in parts.items() if not splits or key in splits or _split(key) in splits}
    if not kept:
        raise UserError(f'dataset.splits: "{name}" has no split {" or ".join(splits)}, only {", ".join(parts)}')
    return kept


def _split(key: str) -> str:
    return SPLIT_NAMES[SPLITS[key.lower()]] if key.lower() in SPLITS else key


def _source(parts: dict[str, Any], name: str, image: str | None, label: str | None, domain: str | None) -> Source:
    import datasets

    features = next(iter(parts.values())).features
    image = _column("image", image, features, [c for c, f in features.items() if isinstance(f, datasets.Image)], name)
    named = [c for c, f in features.items() if isinstance(f, datasets.ClassLabel)]
    label = _column("label", label, features, _preferred(named) or _plain(features), name)
    if domain is None and "domain" in features and label != "domain":
        domain = "domain"

    labelled = {key: part for key, part in parts.items() if label in part.features and image in part.features}
    pooled = datasets.concatenate_datasets(
        [part.select_columns(_some(image, label, domain)) for part in labelled.values()]
    )
    pooled = pooled.cast_column(image, datasets.Image(decode=False))  # decoded later, to skip corrupt images
    classes, labels = _names(pooled, label)
    domains, where = _names(pooled, domain) if domain else ((), None)
    cells = pooled.data.column(image)  # arrow: indexed ten times faster than the dataset
    starts = np.cumsum([0, *(len(part) for part in labelled.values())])
    keys = list(labelled)

    def title(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{keys[part]}[{i - starts[part]}]"

    source = Source(
        labels=labels,
        classes=classes,
        image=lambda i: _decode(cells[i].as_py()),
        name=title,
        domains=domains,
        domain=where,
    )
    if labels.min(initial=0) < 0:  # -1 marks a missing label on the hub
        source = source.take(np.flatnonzero(labels >= 0))
    if len(source.labels) == 0:
        raise UserError(f'dataset.name = "{name}" holds no labelled images in {", ".join(parts)}')
    return source


def _some(*columns: str | None) -> list[str]:
    return [column for column in columns if column is not None]


def _preferred(columns: list[str]) -> list[str]:
    """The one called label, if there is one; otherwise all of them."""
    return ["label"] if "label" in columns else columns


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
    if candidates:
        raise UserError(f'{setting} must be set for "{name}": it could be {" or ".join(candidates)}')
    raise UserError(
        f'{setting} must be set for "{name}": none of its columns ({", ".join(features)}) is clearly a {role}'
    )


def _names(pooled: Any, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names and int64 labels of a column; names in the source's order, or sorted where it has none."""
    feature = pooled.features[column]
    values = pooled.data.column(column).to_pylist()
    if hasattr(feature, "names"):
        return tuple(feature.names), np.array([-1 if v is None else v for v in values], dtype=np.int64)
    known = sorted({v for v in values if v is not None and v != -1})
    index = {v: i for i, v in enumerate(known)}
    return tuple(str(v) for v in known), np.array([index.get(v, -1) for v in values], dtype=np.int64)


def _decode(cell: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"])
