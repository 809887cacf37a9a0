"""A site's log of all that was asked of it and of all that left it, over all runs.

asked.jsonl  one line per request before it is done, one after it; each has the digest of itself and the line before
asked.head   number of lines and digest of the last one: without it, lines missing at the end would go unnoticed

A site answers by this log: what was asked before is not answered again. The log is appended to before anything is done,
so a crash leaves it complete or with a last line that was cut off, whose request nobody has begun.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .. import files
from ..errors import UserError

LOG, HEAD = "asked.jsonl", "asked.head"
_NAMES = 100  # of what has left that a line lists
Entry = Mapping[str, Any]


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    lines: int
    digest: str


@dataclass(frozen=True)
class AuditLog:
    """The log of the site in `folder`."""

    folder: Path

    def entries(self) -> list[Entry]:
        """All lines, verified. Raises UserError if one was changed or is missing."""
        return self._read()[0]

    def append(self, **entry: Any) -> None:
        """Writes a line; it is on disk when this returns."""
        entries, size = self._read()
        told = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **entry}
        line = {**told, "digest": _chained(entries[-1]["digest"] if entries else "", told)}
        file = self.folder / LOG
        if file.exists() and file.stat().st_size > size:  # a last line that was cut off
            files.write(file, file.read_bytes()[:size], private=True)
        file.touch(0o600)
        files.append(file, json.dumps(line) + "\n")
        self._write_head(line["digest"], len(entries) + 1)

    def updates(self) -> dict[float, int]:
        """Number of updates released under differential privacy so far, per noise."""
        counts: list[dict[str, int]] = [entry["updates"] for entry in self.entries() if "updates" in entry]
        return {float(noise): n for noise, n in counts[-1].items()} if counts else {}

    def begin_anew(self) -> Path:
        """Moves a damaged log away; -> where it is now"""
        aside = self.folder / f"{LOG}.{datetime.now(UTC):%Y%m%d-%H%M%S}"
        (self.folder / LOG).touch(0o600)
        (self.folder / LOG).rename(aside)
        self._write_head("", 0)
        self.append(kind="begun anew", before=sha256(aside.read_bytes()).hexdigest())
        return aside

    def _read(self) -> tuple[list[Entry], int]:
        """-> all lines, and their size in bytes without one that was cut off"""
        file, head = self.folder / LOG, self._head()
        content = file.read_bytes() if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        entries: list[Entry] = []
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(text)
                told = {key: value for key, value in entry.items() if key != "digest"}
                as_written = entry["digest"] == _chained(entries[-1]["digest"] if entries else "", told)
            except (ValueError, KeyError, AttributeError):
                as_written = False
            if not as_written:
                raise self._damaged(LOG, f"line {number} was changed, or one before it is missing")
            entries.append(entry)
        known = head.lines if head else 0
        if len(entries) < known or (head and known and entries[known - 1]["digest"] != head.digest):
            raise self._damaged(LOG, f"it has {len(entries)} of at least {known} lines")
        if entries and not head:
            raise self._damaged(HEAD, "it is missing")
        if not head and any((self.folder / "runs").glob("*/clients")):
            raise self._damaged(LOG, "it is missing, and there are runs")
        return entries, len(whole)

    def _write_head(self, digest: str, lines: int) -> None:
        content = _Head(lines=lines, digest=digest).model_dump_json().encode()
        files.write(self.folder / HEAD, content, private=True)

    def _head(self) -> _Head | None:
        file = self.folder / HEAD
        try:
            return _Head.model_validate_json(file.read_bytes()) if file.exists() else None
        except ValidationError:
            raise self._damaged(HEAD, "it must hold the number of lines and a digest") from None

    def _damaged(self, name: str, why: str) -> UserError:
        return UserError(
            f'"{self.folder / name}" is damaged ({why}): put {LOG} and {HEAD} back from a copy, or begin anew by '
            f"promptfed flower audit {self.folder} --anew, which keeps models and the count of released updates"
        )


def _chained(before: str, told: Entry) -> str:
    return sha256(f"{before}{json.dumps(told, sort_keys=True)}".encode()).hexdigest()


def listed(names: list[str]) -> list[str]:
    """Names of what has left, shortened if there are many."""
    return names if len(names) <= _NAMES else [*names[:_NAMES], f"and {len(names) - _NAMES} more"]


def told(entry: Entry) -> str:
    """A line, for a person."""
    what = [entry["time"], entry["kind"]]
    if "run" in entry:
        what.append(f'run "{entry["run"]}"')
    if "task" in entry:
        what.append(f"{entry['task']} (submission {entry['number']})")
    if entry["kind"] == "asked":
        what.append(f"{entry['bytes']} bytes received, signed by {entry['by'] or 'nobody'}")
    if entry["kind"] == "left":
        what.append(f"{entry['bytes']} bytes: {', '.join(entry['names'])}")
    if entry.get("epsilon") is not None:
        what.append(f"epsilon so far {entry['epsilon']:.3g}")
    return ", ".join([*what, *([entry["why"]] if "why" in entry else [])])
