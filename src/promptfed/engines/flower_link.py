"""The server's end: the SuperLink, with a door in front of it, and what is asked of it from the same machine.

Flower serves three interfaces on one port. The Fleet interface is for nodes, which sign what they ask with their keys.
The Control interface starts and stops runs, takes apps whose code is then run, and registers nodes; the Runtime
interface is for the processes that run them. Neither of these asks who is there, so the door lets nobody in from other
machines.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import certificates
from ..consortium import APP, DATABASE, TLS, read
from ..errors import UserError
from .flower_server import FOLDER

# isort: split
import httpx
import uvicorn
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ISOLATION_MODE_SUBPROCESS, TRANSPORT_TYPE_GRPC_RERE
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Any, Any], Awaitable[None]]
_OPEN = "/v1/fleet/"  # what other machines may ask for


class Door:
    """From other machines nothing is let in but what nodes ask for."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope.get("path", "").startswith(_OPEN) or _here(scope.get("client")):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only nodes are answered from other machines"})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _here(client: Any) -> bool:
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except (TypeError, ValueError, IndexError):
        return False


def link(folder: Path, host: str = "127.0.0.1", insecure: bool = False) -> None:
    """Runs the consortium's SuperLink until it is stopped. `insecure`: without TLS and keys, on this machine alone."""
    folder = folder.expanduser().absolute()
    agreed = read(folder).consortium
    assert agreed
    if insecure and not _here((host,)):
        raise UserError(f'--host = "{host}" needs TLS: without it the SuperLink serves 127.0.0.1 alone')
    tls = {name: str(folder / TLS / name) for name in (certificates.CA, certificates.SERVER, certificates.SERVER_KEY)}
    if not insecure and not all(Path(file).exists() for file in tls.values()):
        raise UserError(f'"{folder / TLS}" holds no certificates: promptfed flower certs {folder} makes them')
    os.umask(0o077)
    os.environ |= {FOLDER: str(folder), "FLWR_HOME": str(folder / ".flwr")}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower's programs
    port = int(agreed.address.rpartition(":")[2])
    ca, server, key = (None, None, None) if insecure else tls.values()
    config = SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=insecure,
        certificates=None if insecure else (_bytes(ca), _bytes(server), _bytes(key)),
        superexec_auth_secret=None,
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=not insecure,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=ca,
        ssl_certfile=server,
        ssl_keyfile=key,
        database=":flwr-in-memory:" if insecure else str(folder / DATABASE),
        isolation=ISOLATION_MODE_SUBPROCESS,
        runtime_dependency_install=False,  # nothing is fetched
    )
    logging.getLogger("flwr").addFilter(lambda said: "ListRuns" not in said.getMessage())  # submit asks all the time
    app = create_app(config, SuperLinkLifespan)
    app.add_middleware(Door)  # outermost
    uvicorn.run(
        app,
        host=host,
        port=port,
        access_log=False,
        log_config=get_uvicorn_log_config(30),
        ssl_keyfile=key,
        ssl_certfile=server,
        proxy_headers=False,  # nobody is believed who says where a request comes from
    )


def _bytes(file: str | None) -> bytes:
    assert file
    return Path(file).read_bytes()


# ---- asked of it


@contextmanager
def control(folder: Path, insecure: bool) -> Iterator[ControlHttpClient]:
    """The SuperLink's Control interface, from its own machine."""
    agreed = read(folder).consortium
    assert agreed
    address = f"127.0.0.1:{agreed.address.rpartition(':')[2]}"
    if not insecure and not (folder / TLS / certificates.CA).exists():
        raise UserError(f'"{folder / TLS}" holds no certificates: promptfed flower certs {folder} makes them')
    authority = None if insecure else (folder / TLS / certificates.CA).read_bytes()
    client = ControlHttpClient.from_server_address(
        address, insecure, authority, [RuntimeVersionHttpInterceptor(component_name="flwr")]
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        told = FlowerError.from_json(error.response.text)
        raise UserError(f"the SuperLink refuses: {told.message if told else error.response.text[:500]}") from None
    except httpx.HTTPError as error:
        raise UserError(f"no SuperLink answers at {address} ({type(error).__name__}): start it first") from None
    finally:
        client.close()


def register(client: ControlHttpClient, key: Path) -> int:
    """-> the node's number"""
    public = public_key_to_bytes(certificates.read_public(key))
    return int(client.RegisterNode(RegisterNodeRequest(public_key=public, name=key.stem)).node_id)


def start(client: ControlHttpClient, folder: Path, name: str) -> int:
    """Submits the consortium's app; -> Flower's number of the run"""
    packed = build_fab_from_disk(folder / APP)
    fab = Fab(hashlib.sha256(packed).hexdigest(), packed, {})
    request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({"run": name}))
    return int(client.StartRun(request).run_id)


def stop(client: ControlHttpClient, run: int) -> None:
    client.StopRun(StopRunRequest(run_id=run))


def status(client: ControlHttpClient, run: int) -> tuple[str, str, str]:
    """-> "pending", "starting", "running" or "finished"; then how it finished, and why"""
    found = client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
    return found.status, found.sub_status, found.details


__all__ = ["Door", "control", "link", "register", "start", "status", "stop"]
