"""A site's node: Flower's SuperNode, and next to it one process that holds model, images and private state and answers.

Left to itself a SuperNode starts a process for every message, which unpacks the app that the server has sent, imports
it and loads the model. With `--isolation process` it leaves that to others: here, to `serve()`, which takes the
SuperNode's tasks as they come and answers them with the promptfed that is installed at the site. So the model is loaded
once, and no code that comes over the network is ever run. Tasks are handed out to whoever has the secret that is made
for each start.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from logging import WARNING
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import httpx

from .. import files
from ..errors import UserError
from . import _flwr as F
from . import metrics
from ._flwr import ClientApp, Context, Message, log
from .app import Resident, client_app
from .certificates import CA, KEY, PUBLIC, write_private
from .signing import Verifier
from .site import SiteFolder
from .wire import TYPES

_POLL = 0.1  # seconds between looks for a task
_GHOST = 30.0  # seconds in which a node is admitted again after Flower has noticed that it was killed
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
LOG = "node.log"  # all that the SuperNode prints
_MOST = 10_000_000  # bytes after which the log starts anew
_QUIET = 60.0  # seconds between messages about a server that does not answer
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# It ends with its parent: alone, it would take messages and never answer.
_PROGRAM = """
import os
from promptfed.processes import end_with_parent
end_with_parent(int(os.environ["PROMPTFED_PARENT"]))
from promptfed.flower._flwr import flower_supernode, set_heartbeat
set_heartbeat(float(os.environ["PROMPTFED_HEARTBEAT"]))
flower_supernode()
"""


def run(
    site: SiteFolder,
    insecure: bool = False,
    said: Callable[[str], None] = partial(print, flush=True),
    metrics_port: int | None = None,
) -> None:
    """Runs the site's node until it is stopped, or cannot connect."""
    os.umask(0o077)
    site.private()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # an exception, so that everything is closed
    with _alone(site):
        if metrics_port:
            metrics.serve(metrics_port, lambda: metrics.of_node(site.log().entries()))
        resident = Resident(site)
        try:
            verify = None if insecure else Verifier(site.agreed.key)
            _keep_up(site, client_app(resident, verify), insecure, said)
        except KeyboardInterrupt:
            said("stopped; what is private is kept")
        finally:
            resident.close()


def _keep_up(site: SiteFolder, app: ClientApp, insecure: bool, said: Callable[[str], None]) -> None:
    """Tries again while refused: until two heartbeats are missing, Flower considers a killed node connected."""
    ghost = 2 * site.settings.heartbeat + _GHOST
    until: float | None = None  # counted from the first refusal: connecting may have taken long
    while True:
        node, code = _attend(site, app, insecure, said)
        if until is None or node.connected:
            until = time.monotonic() + ghost
        if node.fault:
            raise UserError(node.fault)
        if not node.refused and not node.connected:
            raise UserError(_why_ended(site, insecure, node, code))
        if time.monotonic() > until:
            raise UserError(
                f"the SuperLink refuses this site: its key is not admitted (send {site.folder / PUBLIC} to the "
                "server's engineer), or another node has it"
            )
        refused = "the SuperLink refuses this site so far: not admitted, or its last node ended a moment ago"
        said(f"{refused if node.refused else 'the SuperNode has ended'}; trying again")
        time.sleep(5)


def _why_ended(site: SiteFolder, insecure: bool, node: SuperNode, code: int) -> str:
    ahead = 0.0 if insecure else _ahead(site)
    if not -F.TIMESTAMP_TOLERANCE < ahead < F.SYSTEM_TIME_TOLERANCE:
        return (
            f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's, and "
            f"{F.SYSTEM_TIME_TOLERANCE} s ahead or {F.TIMESTAMP_TOLERANCE} s behind are allowed: set it, as NTP does"
        )
    said = f": {node.last}" if node.last else ""
    return f"the SuperNode has ended (exit code {code}{said}); all it said is in {site.folder / LOG}"


def _ahead(site: SiteFolder) -> float:
    """Seconds by which this machine's clock is ahead of the server's, by the date of an answer; 0 if there is none."""
    try:
        trust = ssl.create_default_context(cafile=site.folder / CA)
        answer = httpx.head(f"https://{site.agreed.address}/", verify=trust, timeout=10)
        return time.time() - parsedate_to_datetime(answer.headers["date"]).timestamp() - 0.5  # it has whole seconds
    except (OSError, httpx.HTTPError, KeyError, ValueError):
        return 0.0


@contextmanager
def _alone(site: SiteFolder) -> Iterator[None]:
    """One node at a time has the site's folder."""
    held = site.folder / ".node"
    try:
        with files.lock(held, seconds=0) as file:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
    except files.Locked:
        raise UserError(f"this site's node is running already (process {held.read_text().strip()})") from None


def _attend(site: SiteFolder, app: ClientApp, insecure: bool, said: Callable[[str], None]) -> tuple[SuperNode, int]:
    """Answers for one SuperNode until it ends; -> it, and its exit code"""
    with tempfile.TemporaryDirectory(dir=site.folder, prefix=".node-") as scratch:
        secret, port = secrets.token_bytes(32), _free_port()
        write_private(Path(scratch) / "secret", secret)
        node = SuperNode(site, insecure, port, Path(scratch), said)
        try:
            serve(app, f"127.0.0.1:{port}", secret, node.alive, said)
        finally:
            code = node.close()
        return node, code


_Task = tuple[ExitStack, F.RuntimeHttpClient, Message, Context]  # what to close afterwards, and what is asked


def serve(
    app: ClientApp, address: str, secret: bytes, alive: Callable[[], bool], said: Callable[[str], None] = lambda _: None
) -> None:
    """Takes tasks from the SuperNode at this address while it is alive, and answers them one after the other.

    Tasks are fetched in threads: a fetch may hang if the SuperLink has died, and other tasks must not wait.
    """
    ready: SimpleQueue[_Task] = SimpleQueue()
    with _client(address, F.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_ACQUIRE])) as client:
        while alive():
            try:
                found = client.AcquireTask(F.AcquireTaskRequest(supported_task_types=[F.TaskType.CLIENT_APP]))
                if found.HasField("task") and found.token:
                    threading.Thread(target=_fetch, args=(address, found.token, ready), daemon=True).start()
            except httpx.HTTPError:  # it is not up yet, or going down
                time.sleep(_POLL)
            with suppress(Empty):
                while True:
                    task = ready.get(timeout=_POLL)
                    begun = time.monotonic()
                    _answer(app, *task)
                    said(f"{_told(*task[2:])}, {time.monotonic() - begun:.1f} s")


def _told(message: Message, context: Context) -> str:
    """What was asked, in words."""
    about = message.metadata
    round = f", round {about.group_id}" if about.group_id else ""
    words = {kind: ask for ask, kind in TYPES.items()}
    return f"run {context.run_config.get('run')}{round}: {words.get(about.message_type, about.message_type)}"


def _fetch(address: str, token: str, ready: SimpleQueue[_Task]) -> None:
    """Fetches what is asked. The server's app comes with it, and is ignored."""
    with ExitStack() as stack:
        try:
            client = stack.enter_context(_client(address, F.RuntimeTokenHttpInterceptor(token)))
            stack.enter_context(_heartbeat(client))
            message, context, _, _ = F.pull_task_input(client)
        except Exception as error:  # the SuperNode is gone, the task has expired, or the message is malformed
            log(WARNING, "a message could not be fetched: %s: %s", type(error).__name__, error)
            return
        ready.put((stack.pop_all(), client, message, context))


def _answer(app: ClientApp, stack: ExitStack, client: F.RuntimeHttpClient, message: Message, context: Context) -> None:
    """Answers one message as Flower's own process would, but with this app."""
    with stack, suppress(httpx.HTTPError):  # the SuperNode is gone, or the task has expired
        try:
            F.push_message(client, app(message=message, context=context), context)
        except Exception as error:  # a malformed message; the next one may be fine
            log(WARNING, "a message could not be answered: %s: %s", type(error).__name__, error)
            F.push_task_output(client, context, F.SubStatus.FAILED, type(error).__name__)
        else:
            F.push_task_output(client, context, F.SubStatus.COMPLETED, "")


def _client(address: str, interceptor: object) -> closing[F.RuntimeHttpClient]:
    version = F.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
    return closing(F.RuntimeHttpClient.from_server_address(address, True, None, [version, interceptor]))


@contextmanager
def _heartbeat(client: F.RuntimeHttpClient) -> Iterator[None]:
    """Reports that the task is in progress. Flower's own heartbeat would end this process when a task expires."""

    def beat() -> bool:
        with suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(F.SendTaskHeartbeatRequest())
        return True

    sender = F.HeartbeatSender(beat)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class SuperNode:
    """Flower's SuperNode as a process of its own, its output in plain words for a site's engineer.

    `fault`: why it cannot connect, if it said so. `refused`: whether the SuperLink rejects it. `last`: its last line.
    """

    def __init__(self, site: SiteFolder, insecure: bool, port: int, scratch: Path, said: Callable[[str], None]) -> None:
        self._said, self._client, self._address = said, site.settings.client, site.agreed.address
        self._tls = "without TLS" if insecure else "with TLS"
        self.connected, self.refused, self.fault, self.last = False, False, "", ""
        self._told = -_QUIET
        keys = ["--root-certificates", str(site.folder / CA), "--auth-supernode-private-key", str(site.folder / KEY)]
        options = {
            "--superlink": site.agreed.address,
            "--isolation": "process",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--superexec-auth-secret-file": str(scratch / "secret"),
        }
        command = [sys.executable, "-P", "-c", _PROGRAM, *(word for pair in options.items() for word in pair)]
        self._process = subprocess.Popen(
            [*command, *(["--insecure"] if insecure else keys)],
            env={
                **os.environ,
                "FLWR_HOME": str(scratch),
                "PROMPTFED_HEARTBEAT": str(site.settings.heartbeat),
                "PROMPTFED_PARENT": str(os.getpid()),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends it in order
        )
        said(f"client {self._client}: connecting to {self._address}; its SuperNode is process {self._process.pid}")
        assert self._process.stdout
        log = site.folder / LOG
        if log.exists() and log.stat().st_size > _MOST:
            log.unlink()
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout, log), daemon=True)
        self._listener.start()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """-> its exit code"""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(5)
        return int(self._process.returncode)

    def _listen(self, spoken: IO[str], log: Path) -> None:
        with log.open("a") as kept:
            for line in spoken:
                kept.write(line)
                kept.flush()
                self.hear(_COLOUR.sub("", line).strip())

    def hear(self, line: str) -> None:
        """A line of its output."""
        self.last = line or self.last
        found = re.search(r"SuperNode ID: (\d+)", line)
        if found:
            self.connected = True
            self._said(f"client {self._client} is connected, as node {found[1]}")
        elif "retrying in" in line:
            if time.monotonic() - self._told > _QUIET:
                self._told = time.monotonic()
                self._said(f"no SuperLink answers at {self._address} {self._tls}; trying until one does")
        elif "[code: 2004]" in line:
            self.refused = True
        elif "CERTIFICATE_VERIFY_FAILED" in line:
            self.fault = self._certificate(line)

    def _certificate(self, line: str) -> str:
        if "expired" in line:
            return f"the certificate of {self._address} has expired: the server's engineer renews it"
        if "mismatch" in line or "not valid for" in line:
            return f"the certificate of the server is not for {self._address}: promptfed flower certs --host adds names"
        return f"{CA} is not the authority of the server at {self._address}: it is another consortium's, or outdated"
