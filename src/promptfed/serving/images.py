"""Images that a user has, of any size and in any place, as a model wants them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from ..data.images import Resize, pixels
from ..data.sources import IMAGE_SUFFIXES
from ..errors import UserError

Images = str | Path | Image.Image | np.ndarray | Tensor | Sequence[str | Path | Image.Image | np.ndarray]


def decode(image: Any, channels: int, resize: Resize) -> np.ndarray | None:
    """A path, a PIL image or an array -> uint8 (C, H, W), as a dataset's images are; None: it cannot be read."""
    try:
        if isinstance(image, np.ndarray):
            if image.shape == (channels, *resize.size):
                return image
            image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 and image.ndim == 3 else image)
        if isinstance(image, Path):
            with Image.open(image) as opened:
                return pixels(opened, channels, resize)
        return pixels(image, channels, resize)
    except Exception:  # decoders raise anything at all on broken bytes
        return None


def complain(skipped: Sequence[str], count: int, setting: str) -> None:
    """Names what could not be read: a warning, or an error if that is everything."""
    if not count:
        raise UserError(f"{setting}: no images given")
    if not skipped:
        return
    shown = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    said = f"{len(skipped)} corrupt image{'s' if len(skipped) > 1 else ''} ({shown})"
    if len(skipped) == count:
        raise UserError(f"{setting}: {said}, and no other")
    warnings.warn(f"{setting}: {said} skipped", stacklevel=3)


def listed(images: Images, shape: tuple[int, int, int]) -> list[tuple[str, Path | Image.Image | np.ndarray]]:
    """What to predict, one by one, with names."""
    if isinstance(images, Tensor):
        images = images.cpu().numpy()
    if isinstance(images, np.ndarray):
        images = _rows(images, shape)
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    found: list[tuple[str, Path | Image.Image | np.ndarray]] = []
    for i, item in enumerate(images):
        if isinstance(item, str | Path):
            found += [(str(path), path) for path in _files(Path(item).expanduser())]
        elif isinstance(item, Image.Image) or (isinstance(item, np.ndarray) and item.dtype == np.uint8):
            found.append((str(i), item))
        else:
            raise UserError(f"images[{i}] is {type(item).__name__}; allowed: paths, PIL images and uint8 arrays")
    return found


def _rows(images: np.ndarray, shape: tuple[int, int, int]) -> list[np.ndarray]:
    """The images of an array: channels first if that is the model's own shape, or if channels cannot be last."""
    if images.dtype == np.uint8 and images.ndim == 4 and 0 not in images.shape[1:]:
        if images.shape[1:] == shape or images.shape[-1] in (1, 3, 4):
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
    below = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()]
    found = [p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not found:
        raise UserError(f'images: "{path}" holds no images ({", ".join(sorted(IMAGE_SUFFIXES))})')
    return found
