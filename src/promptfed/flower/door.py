"""The door in front of a SuperLink: what is refused before Flower reads it.

Flower serves three interfaces on one port. The Fleet interface is for nodes, which sign what they ask with their keys.
The Control interface starts and stops runs, takes apps whose code is then run, and registers nodes; the Runtime
interface is for the processes that run them. Neither authenticates its callers, so the door closes both to other
machines.

The Fleet interface reads a request whole before it looks at the key, and stores a node's message under the source
that the message names: without `reply_to` it becomes an instruction to another node. So the door bounds the bytes of
requests and the time they may take, much closer for callers without an admitted key, and lets a node push nothing but
its own answers.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from logging import WARNING
from typing import Any

from . import _flwr as F
from . import wire

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
Admitted = Callable[[Mapping[str, str]], bool]  # whether a request's headers are signed with an admitted key

_OPEN = "/v1/fleet/"  # what other machines may ask for
_PUSH, _OBJECT = f"{_OPEN}push-messages", f"{_OPEN}push-object"
# Bytes of a request. Flower cuts arrays into objects of 5 MB; a head is 4 MB at most (wire.Limits).
_MOST = {_PUSH: 1 << 20, _OBJECT: 6 << 20}
_PART = 5 * 10**6  # bytes of an object at least, if there are many
_FEW = 64  # objects of an answer besides
_SMALL = 1 << 16  # of any other request, and of callers without an admitted key
_HELD = {True: 512 << 20, False: 4 << 20}  # of all requests under way, of admitted nodes and of others
_SECONDS = 120.0  # in which a request must have arrived


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Door:
    """Admits only nodes' requests from other machines, and of those only what a node has to send."""

    def __init__(
        self,
        app: App,
        admitted: Admitted = lambda headers: True,
        answer: int = wire.LIMITS.bytes,
        seconds: float = _SECONDS,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`answer`: bytes of the largest answer. `seconds`: in which a request must have arrived. `refused`: called
        for every request that is refused."""
        self._app, self._admitted, self._seconds = app, admitted, seconds
        self._objects = answer // _PART + _FEW
        self._refused = refused
        self._held = dict.fromkeys(_HELD, 0)  # bytes of requests under way

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        fleet = scope.get("path", "").startswith(_OPEN)
        if scope["type"] == "lifespan" or (not fleet and _here(scope.get("client"))):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                if not fleet:
                    raise _Refused(403, "only nodes are answered from other machines")
                await self._fleet(scope, receive, send)
            except _Refused as refused:
                self._refused()
                F.log(WARNING, "refused: %s (%s)", refused, (scope.get("client") or ["?"])[0])
                await send({"type": "http.response.start", "status": refused.status, "headers": []})
                await send({"type": "http.response.body", "body": str(refused).encode()})

    async def _fleet(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a node's request on, once it has arrived and been checked."""
        known = self._admitted({k.decode("latin-1"): v.decode("latin-1") for k, v in scope.get("headers", ())})
        most = _MOST.get(scope["path"], _SMALL) if known else _SMALL
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._read(receive, body, most, known)
            except TimeoutError:
                raise _Refused(408, f"a request must arrive within {self._seconds:g} s") from None
            if scope["path"] == _PUSH:
                _check_push(bytes(body), self._objects)
            await self._app(scope, _replay(bytes(body), receive), send)
        finally:
            self._held[known] -= len(body)

    async def _read(self, receive: Any, body: bytearray, most: int, known: bool) -> None:
        more = True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise _Refused(400, "the request is incomplete")
            part, more = event.get("body", b""), event.get("more_body", False)
            if len(body) + len(part) > most:
                raise _Refused(413, f"a request of more than {most} bytes")
            if self._held[known] + len(part) > _HELD[known]:
                raise _Refused(503, "too many requests are under way")
            body += part
            self._held[known] += len(part)


def _replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """Receives what has been read already, then whatever comes."""
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return events.pop() if events else await receive()

    return again


def _check_push(body: bytes, most: int) -> None:
    """A node may push one answer, of its own, to the server. `most`: objects that it may consist of."""
    request = F.PushMessagesRequest()
    try:
        request.ParseFromString(body)
    except F.DecodeError:
        raise _Refused(400, "the request is malformed") from None
    if len(request.messages_list) != 1:
        raise _Refused(403, "a node must push one message at a time")
    about = request.messages_list[0].metadata
    if not about.reply_to_message_id or about.dst_node_id != F.SUPERLINK_NODE_ID:
        raise _Refused(403, "a node may only answer the server")
    if about.src_node_id != request.node.node_id:
        raise _Refused(403, "a node may only answer for itself")
    trees, count = list(request.message_object_trees), 0
    while trees:
        count, found = count + 1, trees.pop()
        trees += found.children
    if count > most:
        raise _Refused(413, f"an answer of {count} objects, more than {most}")


def _here(client: Any) -> bool:
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except (TypeError, ValueError, IndexError):
        return False


def signed_by(node_of: Callable[[bytes], int | None]) -> Admitted:
    """Whether headers are signed with a key that `node_of` knows. Flower checks the time and the node afterwards."""

    def admitted(headers: Mapping[str, str]) -> bool:
        try:
            key, signature = (
                base64.b64decode(headers[name], validate=True)
                for name in (F.FLEET_HTTP_PUBLIC_KEY_HEADER, F.FLEET_HTTP_SIGNATURE_HEADER)
            )
            text = headers[F.TIMESTAMP_HEADER].encode()
            return node_of(key) is not None and bool(F.verify_signature(F.bytes_to_public_key(key), text, signature))
        except (KeyError, ValueError, TypeError):
            return False

    return admitted
