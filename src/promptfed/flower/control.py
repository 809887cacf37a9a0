"""What is asked of a running SuperLink, from its own machine: admission of nodes, and runs."""

from __future__ import annotations

import hashlib
import math
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx

from ..errors import UserError
from ..runs import record
from . import _flwr as F
from . import certificates
from .consortium import APP, TLS
from .site import read_agreed

STARTED = ".link"  # an empty file whose time is that of the SuperLink's start
HERE = "127.0.0.1"  # where commands on this machine reach the SuperLink
_ENDED = {  # why a run has ended: Flower's words, and those of the server's engineer
    "No heartbeat received from the task": "its process at the server was killed: submit it again to resume it",
}


@contextmanager
def control(folder: Path, insecure: bool) -> Iterator[F.ControlHttpClient]:
    """The SuperLink's Control interface, from its own machine."""
    _, agreed = read_agreed(folder)
    address = f"{HERE}:{agreed.address.rpartition(':')[2]}"
    if not insecure and not (folder / TLS / certificates.CA).exists():
        raise UserError(f'"{folder / TLS}" holds no certificates: promptfed flower certs {folder} makes them')
    authority = None if insecure else (folder / TLS / certificates.CA).read_bytes()
    client = F.ControlHttpClient.from_server_address(
        address, insecure, authority, [F.RuntimeVersionHttpInterceptor(component_name="flwr")]
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        told = F.FlowerError.from_json(error.response.text)
        raise UserError(f"the SuperLink refuses: {told.message if told else error.response.text[:500]}") from None
    except httpx.HTTPError as error:
        raise UserError(_unanswered(error, address, folder, insecure)) from None
    finally:
        client.close()


def _unanswered(error: httpx.HTTPError, address: str, folder: Path, insecure: bool) -> str:
    cause: BaseException | None = error
    while cause and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of what answers at {address} is not trusted ({cause.verify_message}): promptfed flower "
            f"certs {folder} renews it, and the SuperLink reads it when it starts"
        )
    if cause:
        return f"what answers at {address} does not speak TLS: is it a SuperLink that was started with --insecure?"
    if insecure and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return f"what answers at {address} closes the connection: is it a SuperLink with TLS? then leave out --insecure"
    return f"no SuperLink answers at {address} ({type(error).__name__}): start it first"


def registered(client: F.ControlHttpClient, key: Path) -> int | None:
    """-> the number of the node that has this key"""
    public = F.public_key_to_bytes(certificates.read_public(key))
    for node in client.ListNodes(F.ListNodesRequest()).nodes_info:
        if node.public_key == public and node.status != F.NodeStatus.UNREGISTERED:
            return int(node.node_id)
    return None


def register(client: F.ControlHttpClient, key: Path) -> int:
    """-> the new node's number"""
    public = F.public_key_to_bytes(certificates.read_public(key))
    return int(client.RegisterNode(F.RegisterNodeRequest(public_key=public, name=key.stem)).node_id)


def start(client: F.ControlHttpClient, folder: Path, name: str) -> int:
    """Submits the consortium's app; -> Flower's number of the run"""
    packed = F.build_fab_from_disk(folder / APP)
    fab = F.Fab(hashlib.sha256(packed).hexdigest(), packed, {})
    request = F.StartRunRequest(fab=F.fab_to_proto(fab), override_config=F.user_config_to_proto({"run": name}))
    return int(client.StartRun(request).run_id)


@dataclass(frozen=True)
class Submission:
    """One submission of a run; one that is resumed has several."""

    number: int  # Flower's
    name: str
    status: str  # "pending", "starting", "running" or "finished"
    how: str  # it has finished: "completed", "failed" or "stopped"
    why: str
    since: str  # when it was submitted

    @property
    def over(self) -> bool:
        return self.status == "finished"


def submissions(client: F.ControlHttpClient) -> list[Submission]:
    """The latest first."""
    found = client.ListRuns(F.ListRunsRequest()).run_dict.values()
    return sorted(map(_submission, found), key=lambda one: one.since, reverse=True)


def status(client: F.ControlHttpClient, run: int) -> Submission:
    return _submission(client.ListRuns(F.ListRunsRequest(run_id=run)).run_dict[run])


def _submission(run: F.Run) -> Submission:
    now = run.status
    why = now.details.removeprefix("ServerApp failed with exception: ")
    name = run.override_config["run"].string
    return Submission(run.run_id, name, now.status, now.sub_status, _ENDED.get(why, why), run.pending_at)


def under_way(client: F.ControlHttpClient, folder: Path, name: str) -> Submission | None:
    """The submission that trains this run now, or is about to. One that a killed SuperLink has left behind is listed as
    running, too."""
    mark = folder / STARTED
    started = mark.stat().st_mtime if mark.exists() else math.inf
    for one in submissions(client):
        if one.name != name or one.over:
            continue
        here = datetime.fromisoformat(one.since).timestamp() >= started
        if here or one.status != "running" or record.at_work(folder / "runs" / name):
            return one
    return None


def stop(client: F.ControlHttpClient, run: int) -> None:
    client.StopRun(F.StopRunRequest(run_id=run))


def node_states(client: F.ControlHttpClient) -> dict[int, tuple[str, str]]:
    """Of each node "registered" (never connected), "online" or "offline", and since when."""
    found = {}
    for node in client.ListNodes(F.ListNodesRequest()).nodes_info:
        since = {"online": node.last_activated_at, "offline": node.last_deactivated_at or node.last_activated_at}
        if node.status != F.NodeStatus.UNREGISTERED:
            found[int(node.node_id)] = node.status, since.get(node.status, node.registered_at)
    return found
