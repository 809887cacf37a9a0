"""What a site's node says and refuses, without a server."""

import fcntl
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import case_of, looped

from promptfed import UserError
from promptfed.flower import node as flower_node
from promptfed.flower import superexec
from promptfed.flower.node import SuperNode
from promptfed.flower.server import told
from promptfed.flower.site import SiteFolder
from site_folders import consortium, site


@pytest.fixture
def place(tmp_path):
    server, _ = consortium(tmp_path, clients=2, address="fl.example:9092")
    return SiteFolder.open(site(server, tmp_path, 0))


def heard(*lines):
    """What a SuperNode makes of its own words."""
    node, said = object.__new__(SuperNode), []
    node._said, node._client, node._address, node._tls, node._told = said.append, 0, "fl.example:9092", "with TLS", -99
    node.connected = node.refused = False
    node.fault = node.last = ""
    for line in lines:
        node.hear(line)
    return node, said


def test_a_node_is_connected_when_it_has_a_number():
    node, said = heard("INFO :      Starting Flower SuperNode")
    assert (node.connected, said) == (False, [])
    node, said = heard("INFO :      SuperNode ID: 12684982148306340154")
    assert (node.connected, said) == (True, ["client 0 is connected, as node 12684982148306340154"])


def test_a_server_that_does_not_answer_is_told_once_a_minute():
    _, said = heard(*["WARNING :   Connection attempt failed, retrying in 7.68 seconds"] * 9)
    assert said == ["no SuperLink answers at fl.example:9092 with TLS; trying until one does"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            "certificate verify failed: certificate has expired (_ssl.c:1006)",
            "has expired: the server's engineer renews",
        ),
        (
            "certificate verify failed: Hostname mismatch, certificate is not valid for 'x'.",
            "is not for fl.example:9092",
        ),
        ("certificate verify failed: IP address mismatch, certificate is not valid for '::1'.", "is not for fl.exam"),
        (
            "certificate verify failed: unable to get local issuer certificate",
            "ca.pem is not the authority of the server",
        ),
    ],
)
def test_a_certificate_that_does_not_do_is_told_in_words(line, fault):
    node, said = heard("ERROR :     SSL/TLS handshake error detected.", f"[SSL: CERTIFICATE_VERIFY_FAILED] {line}")
    assert fault in node.fault
    assert not node.refused
    assert said == []


def test_a_site_that_is_not_admitted_is_told_apart():
    node, _ = heard("ERROR :     Exit Code: 305", "[code: 2004] Failed to activate SuperNode.")
    assert (node.refused, node.fault) == (True, "")


def test_a_token_is_passed_in_a_file_that_only_the_app_inherits():
    words = [sys.executable, "-c", "import sys; print(sys.argv[1], open(sys.argv[2]).read())"]
    with superexec.start([*words, "--token", "secret"], stdout=subprocess.PIPE) as process:
        assert "secret" not in process.args
        assert process.stdout.read() == b"--token-file secret\n"


def test_refusals_are_counted_from_the_first_and_not_from_the_start(place, monkeypatch):
    """A busy server may take minutes to answer at all, and then for a moment refuse whom it takes for connected."""
    now, said, turns = [0.0], [], iter([(500.0, True), (20.0, True), (20.0, True), (60.0, True)])

    def attend(*_):
        seconds, refused = next(turns)
        now[0] += seconds
        return SimpleNamespace(connected=False, refused=refused, fault=""), 1

    monkeypatch.setattr(flower_node, "_attend", attend)
    monkeypatch.setattr(flower_node, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    with pytest.raises(UserError, match="its key is not admitted"):
        flower_node._keep_up(place, None, False, said.append)
    assert len(said) == 3


def test_one_node_at_a_time_has_a_sites_folder(place):
    with (place.folder / ".node").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(os.getpid()))
        file.flush()
        with pytest.raises(UserError, match=rf"this site's node is running already \(process {os.getpid()}\)"):
            flower_node.run(place)


def test_a_node_does_not_start_where_others_can_read(place):
    place.folder.chmod(0o750)
    with pytest.raises(UserError, match="can be read by others: chmod 700"):
        flower_node.run(place)


def test_who_is_waited_for_at_the_start_is_in_the_log(tmp_path, caplog):
    case = case_of("fedavg", tmp_path)
    caplog.set_level("INFO", logger="flwr")
    with looped(case, tmp_path / "clients"):
        assert "waiting" not in caplog.text
    with (
        pytest.raises(UserError, match="no node is client 2, 3, 4"),
        looped(case, tmp_path / "others", patience=0.3, there=range(2)),
    ):
        pass
    assert caplog.text.count("waiting for client 2, 3, 4, for 0.3 s at most") == 1


def test_a_mean_over_fewer_sites_is_told_as_one():
    line = {"round": 3, "train_loss": None, "seconds": {"train": 2.0}, "left_out": []}
    scored = {"aggregated": {"summary": {"local": {"mean": 0.75}}, "clients": [{}, {}]}}
    assert told({**line, **scored}, 3) == "round 3, mean test accuracy 75.0 % (of 2 of 3 sites), 2.0 s"
    assert told({**line, **scored}, 2) == "round 3, mean test accuracy 75.0 %, 2.0 s"
