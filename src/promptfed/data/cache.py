"""Decoded datasets on disk: one folder each, written once, memory-mapped from then on.

images.bin   uint8 pixels, C order, (N, C, H, W)
*.npy        labels, and domain, site, split where the source has them
meta.json    everything else; its presence marks a finished entry
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..errors import UserError

FORMAT = 1  # part of every key: raise it when the pixels of an unchanged source would come out differently
_ABANDONED = 2 * 24 * 3600  # seconds after which the temporary folder of a killed process is deleted


def root() -> Path:
    """The cache folder: PROMPTFED_CACHE, or ~/.cache/promptfed."""
    return Path(os.environ.get("PROMPTFED_CACHE") or "~/.cache/promptfed").expanduser().absolute()


def key(**parts: Any) -> str:
    """The name of the entry for exactly these settings of this source."""
    return sha256(json.dumps({"format": FORMAT, **parts}, sort_keys=True, default=str).encode()).hexdigest()[:20]


def slug(name: str) -> str:
    """A folder name a person recognises: the last part of a path or hub id."""
    tail = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in tail)[:40] or "dataset"


def finished(path: Path) -> bool:
    """Whether another process has completed this entry."""
    return (path / "meta.json").is_file()


def holds(path: Path) -> bool:
    """Whether this folder is a decoded dataset."""
    return finished(path) and (path / "images.bin").is_file()


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends, and vanishes when it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=path.parent))
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        temporary.rename(path)
    except OSError as error:
        if finished(path):  # by another process: same key, same content
            return
        if error.filename and not str(error.filename).startswith(str(path.parent)):
            raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error
        raise _unwritable(path.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: Path) -> None:
    for left in folder.glob(".writing-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the image cache {folder} cannot be written ({error.strerror or error}); "
        "free some space there or set PROMPTFED_CACHE to another folder"
    )
