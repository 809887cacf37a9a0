"""Repositories of the Hugging Face hub, online or as downloaded before."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..errors import UserError

OFFLINE = {  # what helps without the hub
    "dataset": "pass a local path as dataset.name",
    "model": "pass a local folder as backbone.name, with config.json and model.safetensors (or open_clip_config.json "
    "and open_clip_model.safetensors) and, for CLIP, tokenizer.json",
}
Kind = Literal["dataset", "model"]
Wanted = Callable[[set[str]], list[str]]


def snapshot(kind: Kind, name: str, wanted: Wanted | None = None) -> tuple[str, Path | None]:
    """The newest revision, and the folder to which the files that are `wanted` of it were downloaded, if any.

    Without a connection: the revision and the folder of an earlier download.
    """
    from huggingface_hub import HfApi, snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        if os.environ.get("HF_HUB_OFFLINE") == "1":  # huggingface_hub reads it only when it is first imported
            raise ConnectionError("HF_HUB_OFFLINE = 1")
        info = (HfApi().model_info if kind == "model" else HfApi().dataset_info)(name, timeout=10)
        if wanted is None:
            return str(info.sha), None
        files = wanted({sibling.rfilename for sibling in info.siblings or ()})
        folder = snapshot_download(name, repo_type=kind, revision=info.sha, allow_patterns=files)
        return str(info.sha), Path(folder)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{_asked(kind, name)} is not on the hub, or needs a login there; check the id, or {OFFLINE[kind]}"
        ) from error
    except HfHubHTTPError as error:
        raise failed(kind, name, error) from error
    except Exception as offline:  # the HTTP client's own errors, which differ between its versions
        try:
            folder = snapshot_download(name, repo_type=kind, local_files_only=True)  # fetches nothing  # nosec B615
        except Exception:
            raise unreachable(kind, name) from offline
        return Path(folder).name, Path(folder)


def unreachable(kind: Kind, name: str) -> UserError:
    return UserError(
        f"{_asked(kind, name)} was asked for but the hub cannot be reached; {OFFLINE[kind]}, or set HF_HOME to a "
        "folder that already has it"
    )


def failed(kind: Kind, name: str, error: BaseException) -> UserError:
    return UserError(f"{_asked(kind, name)} cannot be read: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _asked(kind: Kind, name: str) -> str:
    return f'{"backbone" if kind == "model" else "dataset"}.name = "{name}"'
