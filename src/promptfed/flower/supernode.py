"""Flower's SuperNode as a process of its own, and its output in plain words for a site's engineer.

The whole output is in the site's node.log.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .certificates import CA, KEY
from .site import SiteFolder

LOG = "node.log"
_MOST = 10_000_000  # bytes after which the log starts anew
_QUIET = 60.0  # seconds between messages about a server that does not answer
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# It ends with its parent: alone, it would take messages and never answer.
_PROGRAM = """
import os, signal, threading, time
def watch(parent=os.getppid()):
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, daemon=True).start()
from promptfed.flower._flwr import flower_supernode
flower_supernode()
"""


class SuperNode:
    """`fault`: why it cannot connect, if it said so. `refused`: whether the SuperLink rejects it."""

    def __init__(self, site: SiteFolder, insecure: bool, port: int, scratch: Path, said: Callable[[str], None]) -> None:
        self._said, self._client, self._address = said, site.settings.client, site.agreed.address
        self._tls = "without TLS" if insecure else "with TLS"
        self.connected, self.refused, self.fault = False, False, ""
        self._told = -_QUIET
        keys = ["--root-certificates", str(site.folder / CA), "--auth-supernode-private-key", str(site.folder / KEY)]
        options = {
            "--superlink": site.agreed.address,
            "--isolation": "process",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--superexec-auth-secret-file": str(scratch / "secret"),
        }
        command = [sys.executable, "-c", _PROGRAM, *(word for pair in options.items() for word in pair)]
        self._process = subprocess.Popen(
            [*command, *(["--insecure"] if insecure else keys)],
            env={**os.environ, "FLWR_HOME": str(scratch)},
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
