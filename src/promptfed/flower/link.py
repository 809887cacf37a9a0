"""The server's end: the SuperLink, with a door in front of it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from ..errors import UserError
from . import _flwr as F
from . import certificates, metrics
from .consortium import DATABASE, NODES, TLS
from .control import HERE, STARTED
from .door import Admitted, Door, signed_by
from .server import FOLDER, LINK
from .site import AGREED, read_agreed

_LISTEN = {HERE: [HERE], "0.0.0.0": ["0.0.0.0"], "::": ["0.0.0.0", "::"]}  # as asked for  # nosec B104
_CONNECTIONS = 1000  # at once


def link(
    folder: Path,
    host: str = HERE,
    insecure: bool = False,
    say: Callable[[str], None] = lambda text: None,
    metrics_port: int | None = None,
) -> None:
    """Runs the consortium's SuperLink until it is stopped. `insecure`: without TLS and keys, on this machine alone."""
    folder = folder.expanduser().absolute()
    _, agreed = read_agreed(folder)
    if host not in _LISTEN:
        raise UserError(
            f'--host = "{host}" must be {HERE}, for this machine alone, or 0.0.0.0, for all of its addresses; '
            "::, for those of IPv6 too"
        )
    if insecure and host != HERE:
        raise UserError(f'--host = "{host}" needs TLS: without it the SuperLink serves {HERE} alone')
    name, _, port = agreed.address.rpartition(":")
    end = "" if insecure else f"; its certificate is valid until {_checked(folder, [name, HERE])}"
    if not insecure and not agreed.key:
        raise UserError(f"consortium.key in {AGREED} is missing: promptfed flower certs {folder} makes it")
    listeners = [_bound(address, int(port)) for address in _LISTEN[host]]
    os.umask(0o077)
    (folder / STARTED).touch()
    if (folder / NODES).exists():
        (folder / NODES).chmod(0o600)  # whoever knows a node's number can name it
    os.environ |= {FOLDER: str(folder), LINK: str(os.getpid()), "FLWR_HOME": str(folder / ".flwr")}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower's programs
    config = _config(folder, host, int(port), insecure)
    logging.getLogger("flwr").addFilter(lambda said: "ListRuns" not in said.getMessage())  # submit polls it
    F.hide_tokens()
    app = F.create_app(config, F.SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    admitted: Admitted = (lambda headers: True) if insecure else signed_by(state.get_node_id_by_public_key)
    refused = metrics.Count()
    app.add_middleware(Door, admitted=admitted, answer=agreed.answer_mb * 10**6, refused=refused.add)  # outermost
    if metrics_port:
        metrics.serve(metrics_port, lambda: metrics.of_link(folder, insecure, refused))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=F.get_uvicorn_log_config(30),
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            limit_concurrency=_CONNECTIONS,
            proxy_headers=False,  # headers that claim another origin are not trusted
        )
    )
    say(f"sites find the SuperLink at {agreed.address}{end}; requests from other machines are accepted from nodes only")
    try:
        server.run(sockets=listeners)
    except KeyboardInterrupt:
        return
    if not server.started:
        raise UserError("the SuperLink could not be started: its log says why")


def _config(folder: Path, host: str, port: int, insecure: bool) -> F.SuperLinkLifespanConfig:
    files = [folder / TLS / name for name in (certificates.CA, certificates.SERVER, certificates.SERVER_KEY)]
    ca, pem, key = (None, None, None) if insecure else map(str, files)
    return F.SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=host,
        port=port,
        insecure=insecure,
        certificates=None if insecure else (files[0].read_bytes(), files[1].read_bytes(), files[2].read_bytes()),
        superexec_auth_secret=None,
        authn_plugin=F.load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=not insecure,
        fleet_api_type=F.TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=ca,
        ssl_certfile=pem,
        ssl_keyfile=key,
        database=":flwr-in-memory:" if insecure else str(folder / DATABASE),
        isolation=F.ISOLATION_MODE_SUBPROCESS,
        runtime_dependency_install=False,  # nothing is fetched
    )


def _checked(folder: Path, names: Sequence[str]) -> str:
    """Checks the server's certificate for these names; -> when it expires"""
    tls, again = folder / TLS, f"promptfed flower certs {folder}"
    if not all((tls / name).exists() for name in (certificates.CA, certificates.SERVER, certificates.SERVER_KEY)):
        raise UserError(f'"{tls}" holds no certificates: {again} makes them')
    certificates.read_authority(tls / certificates.CA)
    found = certificates.read_certificate(tls / certificates.SERVER)
    end = certificates.until(found)
    if certificates.expired(found):
        raise UserError(f"the server's certificate expired on {end}: {again} renews it")
    held = certificates.hosts(found)
    for name in names:
        if name not in held:
            raise UserError(f'the server\'s certificate is not valid for "{name}": {again} makes one that does')
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            tls / certificates.SERVER, tls / certificates.SERVER_KEY
        )
    except ssl.SSLError:
        raise UserError(f'"{tls / certificates.SERVER_KEY}" is not the key of the certificate: {again}') from None
    return end


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the port, not yet listening."""
    six = ":" in host
    try:
        listener = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # so that the door sees 127.0.0.1 as such
        listener.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use: is this consortium's SuperLink running already?") from None
        raise UserError(f"port {port} of {host} cannot be listened on: {error.strerror}") from None
    return listener
