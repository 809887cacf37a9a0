"""A consortium's folder at its server: what the sites have agreed on, and the Flower app that is submitted.

consortium.toml  what all have agreed on; every site has a copy
app/             the Flower app: two modules of one line, which name what is installed
requests.key     signs the server's requests; sites know its public half
tls/             the authority and the server's certificate
nodes.json       which client each admitted node is
superlink.db     the SuperLink's state: nodes and their keys
runs/NAME/       the folders of runs
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import files
from ..errors import UserError
from ..runs import build
from ..runs import config as C
from .site import AGREED, INTEGERS, read_agreed, read_numbers

APP, TLS, DATABASE, NODES, REQUESTS = "app", "tls", "superlink.db", "nodes.json", "requests.key"

_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "promptfed-consortium"
version = "1.0.0"
description = "Prompt-based federated learning between sites"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["promptfed[flower]=={version}"]

[tool.flwr.app]
publisher = "promptfed"

[tool.flwr.app.components]
serverapp = "consortium_app.server:server_app"
clientapp = "consortium_app.site:site_app"

[tool.flwr.app.config]
run = "first"
"""
_FILES = {
    "consortium_app/__init__.py": "",
    "consortium_app/server.py": "from promptfed.flower.server import server_app as server_app\n",
    # Flower wants a ClientApp, and nodes use none that comes from the server (node.py).
    "consortium_app/site.py": "from flwr.clientapp import ClientApp\n\nsite_app = ClientApp()\n",
}


def create(folder: Path, config: C.Config) -> None:
    """Writes a new consortium's folder, if its model and method fit together."""
    if (folder / AGREED).exists():
        raise UserError(f'"{folder}" holds a consortium already')
    config = _with(config, answer_mb=_largest(build.assemble(config)))
    app = folder / APP
    for name, text in {"pyproject.toml": _PROJECT.format(version=version("promptfed")), **_FILES}.items():
        (app / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (app / name).write_text(text)
    _agree(folder, config)


def make_key(folder: Path) -> bool:
    """The key that signs the server's requests, with its public half in consortium.toml; -> whether that has changed"""
    from .certificates import signing_key  # needs the package cryptography, as does Flower
    from .signing import public_half

    config, agreed = read_agreed(folder)
    public = public_half(signing_key(folder / REQUESTS))
    if agreed.key == public:
        return False
    _agree(folder, _with(config, key=public))
    return True


def _with(config: C.Config, **settings: Any) -> C.Config:
    """With other settings of [consortium]."""
    assert config.consortium
    return config.model_copy(update={"consortium": config.consortium.model_copy(update=settings)})


def _largest(parts: build.Parts) -> int:
    """MB of the largest answer: an update, and as much again and 64 MB for what methods send besides."""
    shared = parts.method.shared(parts.init).values()
    return int(min(2047, 64 + 2 * sum(p.numel() * p.element_size() for p in shared) // 10**6))


def _agree(folder: Path, config: C.Config) -> None:
    # Images are not split: each site has its own.
    agreed = {key: value for key, value in config.complete().items() if key != "partition"}
    files.write(folder / AGREED, C.dump(agreed).encode())


# ---- which node is which client


def nodes(folder: Path) -> dict[int, int] | None:
    """Which client each node is, where sites were admitted by their keys; None: none was."""
    return read_numbers(folder / NODES, INTEGERS, "node", "client")


def taken(folder: Path, client: int, node: int | None) -> int | None:
    """Another node that is this client."""
    known = nodes(folder) or {}
    return next((other for other, number in known.items() if number == client and other != node), None)


def remember(folder: Path, node: int, client: int) -> None:
    """Notes which client a node is; earlier entries of either are removed."""
    known = nodes(folder) or {}
    _write(folder, {**{other: n for other, n in known.items() if n != client and other != node}, node: client})


def forget(folder: Path, client: int) -> int:
    """-> the node that was this client"""
    node = taken(folder, client, None)
    if node is None:
        raise UserError(f"--client = {client} is not admitted")
    _write(folder, {other: number for other, number in (nodes(folder) or {}).items() if number != client})
    return node


def _write(folder: Path, nodes: dict[int, int]) -> None:
    files.write(folder / NODES, (json.dumps(nodes, indent=1) + "\n").encode(), private=True)
