"""The process that starts a SuperLink's apps. Flower passes each its token as an argument, which all accounts of the
machine can read in the list of processes; here it is in an unnamed file that only the app inherits."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any

from . import _flwr as F

_TOKEN = "--token"


def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """subprocess.Popen for a program of Flower's."""
    if _TOKEN not in words:
        return subprocess.Popen(words, **options)
    at = words.index(_TOKEN)
    with tempfile.TemporaryFile() as file:
        file.write(words[at + 1].encode())
        file.flush()
        file.seek(0)
        hidden = [*words[:at], f"{_TOKEN}-file", f"/dev/fd/{file.fileno()}", *words[at + 2 :]]
        return subprocess.Popen(hidden, pass_fds=[file.fileno()], **options)


if __name__ == "__main__":
    F.replace_popen(start)
    F.flower_superexec()
