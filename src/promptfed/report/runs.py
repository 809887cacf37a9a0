"""What the pictures need to know of a run, read from its folder. The run may still be going on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..runs import config as C
from ..runs import record
from ..server import Line

Stage = Literal["aggregated", "after_local", "after_local_all"]


@dataclass(frozen=True)
class Share:
    """How many samples a client has."""

    name: str
    train: int
    val: int
    test: int


@dataclass(frozen=True)
class Run:
    folder: Path
    settings: dict[str, Any]  # config.toml
    lines: list[Line]
    shares: list[Share]  # by client

    @classmethod
    def read(cls, folder: Path) -> Run:
        file = folder / "config.toml"
        split = folder / "partition.json"
        clients = json.loads(split.read_text())["clients"] if split.exists() else []
        shares = [Share(c["name"], len(c["train"]), len(c["val"]), len(c["test"])) for c in clients]
        return cls(folder, C.read(file) if file.exists() else {}, record.read_lines(folder), shares or _told(folder))

    @property
    def last(self) -> int:
        """The last completed round."""
        return int(self.lines[-1]["round"]) if self.lines else 0

    @cached_property
    def scored(self) -> list[Line]:
        """The rounds that were evaluated."""
        return [line for line in self.lines if "aggregated" in line]

    @property
    def clients(self) -> int:
        """How many clients there are."""
        agreed = int(self.consortium.get("clients", 0))
        return (
            len(self.shares) or agreed or max((len(line["aggregated"]["clients"]) for line in self.scored), default=0)
        )

    @property
    def consortium(self) -> dict[str, Any]:
        """What sites that hold their images themselves have agreed on; empty where all images are in one place."""
        return self.settings.get("consortium") or {}

    def covered(self, line: Line, stage: str = "aggregated") -> tuple[int, int]:
        """How many clients an evaluation has reached, of how many. Who came later counts elsewhere."""
        return len(line[stage]["clients"]), self.clients - len(self.late)

    def away(self, line: Line) -> list[int]:
        """The clients that an evaluation has not reached."""
        reached = {row["client"] for row in line["aggregated"]["clients"]} | self.late
        return [client for client in range(self.clients) if client not in reached]

    @property
    def late(self) -> set[int]:
        """The clients that are not there from the start: join.clients names them, or says how many of the last."""
        late = self.settings.get("join", {}).get("clients") or ()
        return set(range(self.clients - late, self.clients)) if isinstance(late, int) else set(late)

    @property
    def trained(self) -> list[int]:
        """The clients that have taken part in a round to its end."""
        found: set[int] = set()
        for line in self.lines:
            found |= set(line["clients"]) - {who["client"] for who in line["left_out"]}
        return sorted(found)

    @property
    def setting(self) -> str:
        """cifar10, dirichlet (alpha 0.3), 20 clients; nobody has partitioned what the sites of a consortium hold"""
        dataset = self.settings.get("dataset", {}).get("name")
        partition = self.settings.get("partition", {})
        words = [Path(dataset).name] if dataset else []
        if self.consortium:
            return ", ".join([*words, f"{self.clients} site{'s' if self.clients > 1 else ''}"])
        if partition.get("file"):
            words.append(Path(partition["file"]).name)
        elif partition.get("name"):
            alpha = f" (alpha {partition['alpha']:g})" if "alpha" in partition else ""
            words.append(partition["name"] + alpha)
        if self.clients:
            words.append(f"{self.clients} client{'s' if self.clients > 1 else ''}")
        return ", ".join(words)

    @property
    def title(self) -> str:
        name = self.settings.get("method", {}).get("name", self.folder.name)
        parts = (f"{name} on {self.setting}" if self.setting else name, f"seed {self.settings.get('seed', 0)}")
        return ", ".join(parts)

    def name(self, client: int) -> str:
        return self.shares[client].name if client < len(self.shares) else f"client-{client}"

    def accuracies(self, line: Line, stage: Stage = "aggregated") -> dict[int, float]:
        """Accuracy of each client that has test data, in per cent."""
        rows = line[stage]["clients"]
        return {row["client"]: 100 * row["accuracy"] for row in rows if row["accuracy"] is not None}

    def series(self, *path: str, stage: Stage = "aggregated") -> tuple[np.ndarray, np.ndarray]:
        """Evaluated rounds, and a number of their summaries in per cent: series("local", "mean"). NaN: not known."""
        found = []
        for line in self.lines:
            if stage in line:
                value: Any = line[stage]["summary"]
                for key in path:
                    value = value[key]
                found.append((line["round"], percent(value)))
        table = np.array(found, float).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def sent(self) -> dict[int, float]:
        """Round -> MB exchanged with the server so far, both ways, a client: the mean over all clients."""
        total, found = 0.0, {}
        for line in self.lines:
            total += line["bytes"]["up"] + line["bytes"]["down"]
            found[line["round"]] = total / 1e6 / max(1, self.clients)
        return found


def _told(folder: Path) -> list[Share]:
    """What the sites of a consortium have said of their sizes, once the run is done."""
    try:
        sites = json.loads((folder / "result.json").read_text())["sites"]
        return [Share(s["name"], s["n_train"], s["n_val"] or 0, s["n_test"] or 0) for s in sites]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def percent(value: float | None) -> float:
    return 100 * value if value is not None else math.nan


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of what is known; (NaN, 0) of nothing, (value, 0) of one."""
    known = [value for value in values if value == value]
    if not known:
        return math.nan, 0.0
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
