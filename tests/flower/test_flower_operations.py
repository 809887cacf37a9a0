"""What operators do to a deployment while it runs, by doing it. One deployment, one story."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

import os
import re
import signal
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from deployment import deployed
from flwr.proto.control_pb2 import ListNodesRequest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.flower import certificates, control

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operated")
    with deployed(folder, clients=2, rounds=3, engine={"patience": 600, "deadline": 300}) as made:
        made.running = made.link()
        for client in range(2):
            made.admit(client)
        made.nodes = [made.node(0)]
        yield made


def command(*words):
    said = CliRunner().invoke(app, ["flower", *map(str, words)])
    assert said.exit_code == 0, said.output + str(said.exception)
    return said.output


# A machine whose clock is 8 s ahead: read by every process of Python that starts with it in its path.
AHEAD = """
import time
real = time.time
time.time = lambda: real() + 8
import datetime
import flwr.supercore.date as date
date.now = lambda: datetime.datetime.now(tz=datetime.UTC) + datetime.timedelta(seconds=8)
"""


def test_a_site_whose_clock_is_ahead_is_told_so(made, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(AHEAD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process = made.node(1)
    process.popen.wait()
    assert process.popen.returncode == 1
    assert re.search(r"clock is \d+ s ahead of the server's, and 5 s ahead or 300 s behind are allowed", process.said())


def test_a_killed_submit_is_attached_to_its_run_again(made):
    assert "no runs yet" in command("status", made.server)
    assert "client 1 (node" in command("nodes", made.server)
    made.nodes.append(made.node(1))
    for node in made.nodes:
        node.wait_for("is connected")
    submitted = made.start("submit", "submit", made.server, "--name", "long")
    submitted.wait_for("is submitted")
    submitted.popen.send_signal(signal.SIGKILL)
    submitted.popen.wait()
    again = made.start("submit", "submit", made.server, "--name", "long")
    again.wait_for("round 1,")
    assert "is under way" in again.said()
    assert tokens() == []
    assert "running" in command("status", made.server)
    assert command("nodes", made.server).count(": online since 20") == 2
    with control.control(made.server, insecure=False) as client:
        beats = {node.heartbeat_interval for node in client.ListNodes(ListNodesRequest()).nodes_info}
    assert beats == {10.0}  # Flower's own, 30, would hold up a round for a minute when a node is killed
    again.popen.wait()
    assert "everything is in" in again.said()
    assert "long: 3 of 3 rounds, completed" in command("status", made.server)


def tokens():
    """Command lines that hold a token."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"flwr-serverapp" in b" ".join(words):
            assert b"--token-file" in words
        if b"--token" in words:
            found.append(words)
    return found


def test_a_run_is_stopped_from_elsewhere_and_resumed(made):
    made.change(rounds=20)
    first = made.start("submit", "submit", made.server, "--name", "stopped")
    first.wait_for("round 1,")
    assert "is stopped" in command("stop", made.server, "--name", "stopped")
    first.popen.wait()
    assert "promptfed: " in first.said()
    done = len((made.server / "runs" / "stopped" / "rounds.jsonl").read_text().splitlines())
    made.change(rounds=done + 1)
    made.submit("stopped")
    assert f"stopped: {done + 1} of {done + 1} rounds, completed" in command("status", made.server)


def memory(pid):
    """Of a process and those that it has started, in MB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6 + sum(map(memory, children))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("length", ["Content-Length: 1500000000", "Transfer-Encoding: chunked"])
def test_a_strangers_unfinished_request_takes_no_memory(made, length):
    before, sent = memory(made.running.popen.pid), 0
    trusted = ssl.create_default_context(cafile=made.server / "tls" / certificates.CA)
    with (
        socket.create_connection(("127.0.0.1", made.port), 60) as plain,
        trusted.wrap_socket(plain, server_hostname="127.0.0.1") as stranger,
    ):
        stranger.sendall(f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: link\r\n{length}\r\n\r\n".encode())
        part = bytes(1 << 20)
        with suppress(OSError):  # the connection is closed
            while sent < 300:
                stranger.sendall(b"100000\r\n" + part + b"\r\n" if "chunked" in length else part)
                sent += 1
    assert memory(made.running.popen.pid) - before < 60, f"after {sent} MB"
