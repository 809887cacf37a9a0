"""The client's end of a Flower federation: one ClientApp that answers for any method, through a Host.

Flower may start a fresh process for every message, and forgets a node's Context between runs: nothing is kept in
either. What a client remembers is in the Host's store on its own disk. A node is one client.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

import torch

from .. import files, methods
from ..clients.frozen import normalisation
from ..clients.host import Host
from ..clients.messages import Request
from ..data import Dataset
from ..data.augment import Augment, configured
from ..errors import UserError
from ..method import Method
from ..models import Model
from ..params import digest as digest_of
from ..privacy import Privacy
from ..runs.build import Parts, host_from
from ..secure import Secure
from . import wire
from ._flwr import ClientApp, Context, Message, RecordDict, log
from .site import SiteFolder, SiteHost, run_name

_PATH = re.compile(r"(/[^\s/\"':;,]+){2,}/?")  # of the site: a server need not know where its files are
Find = Callable[[Context], tuple[Host, int]]  # a node's host, and which client it is


Verify = Callable[[Message, Context], None]  # raises UserError if the server has not signed a request


def client_app(find: Find, verify: Verify | None = None) -> ClientApp:
    """`verify`: checks signatures; None: on one machine, nothing is signed."""
    app = ClientApp()
    handle = partial(answer, find, verify)
    for kind in wire.TYPES.values():
        category, action = kind.split(".")
        getattr(app, category)(action)(handle)
    return app


def answer(find: Find, verify: Verify | None, message: Message, context: Context) -> Message:
    """Never raises: an error is answered in one sentence, so that the server can record it."""
    try:
        if verify:
            verify(message, context)
        content = _answered(find, message, context)
    except UserError as error:
        log(WARNING, "%s", error)  # the site should know too
        content = wire.write_answer(None, _PATH.sub("(a path of the site)", str(error))[:2000])
    except Exception as error:
        # An exception's message may quote data, so it stays here.
        log(ERROR, "%s", traceback.format_exc())
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}, line {at.lineno}"
        full = isinstance(error, OSError) and error.errno in files.FULL
        what = "no space is left at the site" if full else f"{type(error).__name__} in {where}"
        content = wire.write_answer(None, f"{what}; the node's log says more")
    return Message(content, reply_to=message)


def _answered(find: Find, message: Message, context: Context) -> RecordDict:
    asked, blobs = wire.read_request(message.content)
    if message.metadata.message_type != wire.TYPES[asked.task.ask]:
        raise wire.Malformed(f'malformed message: "{asked.task.ask}" is asked in a message of another type')
    host, client = find(context)
    sites = host.federation.sites
    if not 0 <= client < len(sites):
        raise UserError(f"this node is client {client}, and its partition has clients 0 to {len(sites) - 1}")
    about = _about(host)
    other = differing(asked.fingerprint, about)
    if isinstance(asked.note, wire.Identify):
        if other:
            log(WARNING, "this site has %s than the server, which will refuse it", other)
        own = wire.IdentifyResult(client=client, n=len(sites[client].train), fingerprint=about)
        return wire.write_answer(own)
    if other:
        raise UserError(f"client {client} has {other} than the server")
    _check(asked.note, blobs, client)
    said = host(asked.note, blobs)
    return wire.write_answer(said.results[0], blobs=[wire.array(blob) for blob in said.blobs])


def _check(request: Request, blobs: list[bytes], client: int) -> None:
    (to,) = request.clients
    if to.client != client:
        raise UserError(f"client {to.client} is asked, and this node is client {client}")
    if not set(request.new) <= set(to.once.values()):
        raise wire.Malformed("malformed message: it holds what is sent once and does not name it")
    for digest, index in request.new.items():
        if sha256(blobs[index]).hexdigest() != digest:
            raise wire.Malformed("malformed message: a blob that is sent once has another digest than it says")
    for blob in blobs:
        wire.tensors(blob)


def fingerprint(
    method: Method,
    model: Model,
    dataset: Dataset,
    seed: int,
    privacy: Privacy | None = None,
    augment: Augment | None = None,
    secure: Secure | None = None,
) -> dict[str, str]:
    """What must be the same at every node and at the server, since it is never sent."""
    scale = [v.flatten().tolist() for v in normalisation(model, dataset, torch.device("cpu"))]
    kind, layers = type(method), [type(layer).__qualname__ for layer in methods.layers(method.tuning)]
    parts: dict[str, Any] = {
        "backbone": [model.name, digest_of(model.weights)],
        "preprocessing": [list(dataset.images.shape[1:]), scale, asdict(model.resize)],
        "class list": list(dataset.classes),
        "method": [kind.__module__, kind.__qualname__, layers],
        **{f"method.{name}": value for name, value in methods.settings(method).items()},
        "seed": seed,
        "privacy": privacy.model_dump() if privacy and privacy.on else None,
        "dataset.augment": asdict(augment) if augment else None,
        "secure": secure.model_dump() if secure and secure.aggregation else None,
    }
    texts = {part: json.dumps(value, sort_keys=True, default=str) for part, value in parts.items()}
    return {part: sha256(text.encode()).hexdigest() for part, text in texts.items()}


def parts_fingerprint(parts: Parts) -> dict[str, str]:
    data, config = parts.federation.dataset, parts.config
    varied = configured(config.dataset)
    return fingerprint(parts.method, parts.model, data, config.seed, config.privacy, varied, config.secure)


def differing(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Where two fingerprints differ, in words: "another backbone and another seed"; empty if they do not."""
    return " and ".join(f"another {part}" for part, value in wanted.items() if found.get(part) != value)


_last: list[tuple[Model, dict[str, str]]] = []  # a model's weights are hashed once, not for every message


def _about(host: Host) -> dict[str, str]:
    if not _last or _last[0][0] is not host.model:
        secure = host.masker.settings if host.masker else None
        data = host.federation.dataset
        about = fingerprint(host.method, host.model, data, host.seed, host.privacy, host.augment, secure)
        _last[:] = [(host.model, about)]
    return _last[0][1]


# ---- a node's host


_hosts: dict[str, Host] = {}  # of this process: at most one, by its description


def _described(description: str) -> Host:
    """The host of a simulation's JSON description, kept while it is asked for: a model is not loaded per message."""
    if description not in _hosts:
        while _hosts:
            _hosts.popitem()[1].close()
        given = json.loads(description)
        # Appended, since Ray's own entries must stay.
        sys.path.extend(entry for entry in given["path"] if entry not in sys.path)
        _hosts[description] = host_from(given)
    return _hosts[description]


def simulated(file: str, context: Context) -> tuple[Host, int]:
    """In a simulation one host, described in a file of the run, serves all clients; Flower numbers the nodes."""
    return _described(Path(file).read_text()), int(context.node_config["partition-id"])


class Resident:
    """The site's parts, loaded once, and the host of the run that is asked for."""

    def __init__(self, site: SiteFolder) -> None:
        self.site = site
        self.parts: Parts = site.parts()
        self._name, self._host = "", None  # type: str, SiteHost | None

    def __call__(self, context: Context) -> tuple[SiteHost, int]:
        """Each run has its own memory, by the name that the server gives it."""
        name = run_name(context.run_config.get("run"))
        if self._host is None or name != self._name:
            self.close()
            self._host, self._name = self.site.host(name, self.parts), name
        self._host.run = context.run_id
        return self._host, self.site.settings.client

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._host = None
