"""Tiny finished runs of many methods on an image folder, each made when it is first asked for."""

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import promptfed
from promptfed import Federation
from promptfed.clients.store import Store
from promptfed.clients.wire import unpack
from promptfed.runs import build
from promptfed.runs import config as C

NAMES = ("circle", "ring", "square", "star")
SMALL: dict[str, Any] = {"rounds": 1, "eval": {"pooled": "never"}, "engine": {"workers": 1}}
FULL: dict[str, Any] = {"backbone": "cnn-code", "size": 16}
VIT: dict[str, Any] = {"backbone": "vit-mini", "size": 32}
CLIP: dict[str, Any] = {"backbone": "clip-mini", "size": 32}
DP2FL = {"name": "dp2fl", "depth": 2, "batch_size": 8}
RUNS: dict[str, dict[str, Any]] = {
    "pfedpt": {"method": {"name": "pfedpt", "prompt_epochs": 1, "prompt": "random-patch"}, "rounds": 2, **FULL},
    "fedavg": {"method": {"name": "fedavg"}, **FULL},
    "fedper": {"method": {"name": "fedper"}, **FULL},
    "fedbabu": {"method": {"name": "fedbabu", "finetune_steps": 2, "lr": 0.05}, **FULL},
    "fedem": {"method": {"name": "fedem", "components": 2}, **FULL},
    "fedrod": {"method": {"name": "fedrod"}, **FULL},
    "head-tune": {"method": {"name": "head-tune"}, **FULL},
    "head-tune+ft": {"method": {"name": "head-tune+ft", "finetune_epochs": 1}, **VIT},
    "fedvpt": {"method": {"name": "fedvpt", "tokens": 2}, **VIT},
    "sgpt": {"method": {"name": "sgpt", "groups": 3, "shared_layers": [0], "group_layers": [1]}, **VIT},
    "pfedpg": {"method": {"name": "pfedpg", "tokens": 2, "server_lr": 0.1}, **VIT},
    "promptfl": {"method": {"name": "promptfl", "context": 2}, **CLIP},
    "atpfl": {"method": {"name": "atpfl", "context": 2, "prompt_size": 3}, **CLIP},
    "dp2fl": {"method": {**DP2FL, "privacy": "embeddings"}, **CLIP},
    "dp2fl-sealed": {"method": {**DP2FL, "privacy": "sealed"}, **CLIP},
    "zero-shot": {"method": {"name": "zero-shot"}, **CLIP},
}


def pictures(folder: Path, each: int, seed: int, names: tuple[str, ...] = NAMES) -> Path:
    """class/*.png of 40 x 32 pixels; a class is a stripe of brightness, so that training moves something."""
    g = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(each):
            x = g.integers(0, 120, (32, 40, 3))
            x[8 * NAMES.index(name) : 8 * NAMES.index(name) + 8] += 120
            Image.fromarray(x.astype(np.uint8)).save(folder / name / f"{i:02}.png")
    return folder


@dataclass
class Runs:
    folder: Path
    made: dict[str, "promptfed.Result"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = pictures(self.folder / "data", 15, 0)
        self.files = sorted(self.data.rglob("*.png"))  # in the order of the dataset

    def __getitem__(self, name: str) -> "promptfed.Result":
        if name not in self.made:
            given = RUNS[name]
            self.made[name] = promptfed.run(
                **SMALL
                | {
                    "rounds": given.get("rounds", 1),
                    "method": {"epochs": 1, **given["method"]},
                    "backbone": given["backbone"],
                    "dataset": {"name": str(self.data), "size": given["size"]},
                    "partition": {"name": "iid", "clients": 3},
                    "out": self.folder / "runs" / name,
                }
            )
        return self.made[name]

    def federation(self, name: str) -> Federation:
        folder = self[name].folder
        return build.split(C.make(C.read(folder / "config.toml")), folder / "partition.json")

    def secrets(self, name: str, client: int) -> dict[str, bytes]:
        """What clients other than this one keep to themselves, and what the server keeps of each client."""
        folder, found = self[name].folder, {}
        store = Store(folder / "clients")
        mine = store.get(client, 99)
        for other in {0, 1, 2} - {client}:
            for key, p in store.get(other, 99).items():
                if key not in mine or not torch.equal(p, mine[key]):
                    found[f"client {other}: {key}"] = p
        store.close()
        state, _ = unpack((folder / "checkpoint.safetensors").read_bytes())
        parts = ("descriptor.", "val.", *(f"own.{other}." for other in {0, 1, 2} - {client}))
        found |= {f"server: {key}": p for key, p in state.items() if key.startswith(parts)}
        long = {key: p.numpy().tobytes() for key, p in found.items()}
        return {key: raw for key, raw in long.items() if len(raw) >= 8 and len(set(raw)) > 2}


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of every file."""
    return {
        str(p.relative_to(folder)): (sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }
