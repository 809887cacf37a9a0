"""Between real sites: a SuperLink, SuperNodes with folders of their own, TLS, keys; and what goes wrong, by doing it.

Everything that takes a SuperLink is slow: Flower looks for messages every three seconds. The tests of one deployment
are one story, in the order of this file.
"""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

import re
import time
from base64 import b64encode

import httpx
from cryptography.hazmat.primitives import serialization
from deployment import Recorder, deployed, mode, numbers, reference, state
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from typer.testing import CliRunner

import promptfed
from limits import HANG
from promptfed import UserError
from promptfed.cli.main import app
from promptfed.clients.store import Store
from promptfed.clients.wire import unpack
from promptfed.flower import certificates, consortium
from promptfed.runs import config as C
from promptfed.testing import equal, private_values
from site_folders import NAMES

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """Three sites, admitted by their keys and taking part, over TLS."""
    with deployed(tmp_path_factory.mktemp("secure"), engine={"patience": 600, "deadline": 300}) as made:
        made.running = made.link()
        for client in range(3):
            made.admit(client)
        made.nodes = [made.node(client) for client in range(3)]
        yield made


def test_three_sites_end_with_the_parameters_of_one_machine(secure, tmp_path):
    lines = secure.submit("first")
    expected = reference(secure, tmp_path, rounds=2)
    assert equal(state(secure, "first"), expected.state)
    for line, other in zip(lines, expected.lines, strict=True):
        assert line["left_out"] == []
        assert line["aggregated"]["clients"] == other["aggregated"]["clients"]
        assert line["bytes"] == other["bytes"]
    found = numbers(secure, "first")
    assert [one["n_train"] for one in found["sites"]] == [21, 21, 21]
    assert [one["n_test"] for one in found["sites"]] == [6, 6, 6]
    assert not (secure.server / "runs" / "first" / "partition.json").exists()
    assert not (secure.server / "runs" / "first" / "clients").exists()  # what is private is at the sites


def test_a_site_uses_its_own_model_and_the_server_cannot(secure, tmp_path):
    line = numbers(secure, "first")["clients"]["aggregated"][1]
    model = promptfed.load(secure.sites[1])
    assert model.card["client"] == 1
    assert model.card["metrics"]["aggregated"]["accuracy"] == line["accuracy"]
    found = model.predict(secure.folder / "images1" / "grass")
    assert set(found.classes) == set(NAMES)
    file = promptfed.export(secure.sites[1], tmp_path / "mine.safetensors")
    again = promptfed.load(file).predict(secure.folder / "images1" / "grass")
    assert (again.probabilities == found.probabilities).all()
    folder = secure.server / "runs" / "first"
    with pytest.raises(UserError, match="has its model at its site"):
        promptfed.load(folder, client=1)
    said = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "report.html")])
    assert said.exit_code == 0, said.output
    assert "pfedpg" in (tmp_path / "report.html").read_text()


def test_private_parameters_survive_a_restart_and_a_new_run(secure, tmp_path):
    kept = secure.sites[0] / "runs" / "first" / "clients"
    assert [mode(kept), mode(kept / "data.mdb"), mode(kept / "lock.mdb")] == [0o700, 0o600, 0o600]
    assert mode(secure.sites[0]) == 0o700
    secure.nodes[0].end()
    assert not list(secure.sites[0].glob(".node-*"))  # nor is its secret left behind
    secure.nodes[0] = secure.node(0)
    secure.change(rounds=3)
    lines = secure.submit("first")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert equal(state(secure, "first"), reference(secure, tmp_path, rounds=3).state)


def test_a_node_that_is_not_admitted_is_refused(secure):
    stranger = secure.sites[2]
    secure.nodes[2].end()
    known = {name: (stranger / name).read_bytes() for name in (certificates.KEY, certificates.PUBLIC)}
    for name in known:
        (stranger / name).unlink()
    try:
        certificates.make_pair(stranger)
        process = secure.node(2)
        process.popen.wait(HANG)
        assert process.popen.returncode == 1
        assert "Failed to initialize the connection to the SuperLink" in (stranger / "node.log").read_text()
        assert "promptfed: the SuperLink refuses this site: its key is not admitted" in process.said()
    finally:
        for name, content in known.items():
            (stranger / name).write_bytes(content)
        secure.nodes[2] = secure.node(2)


def test_the_port_serves_nodes_and_nobody_without_a_key(secure):
    trust = str(secure.server / "tls" / certificates.CA)
    with httpx.Client(base_url=f"https://127.0.0.1:{secure.port}", verify=trust) as client:
        assert client.post("/v1/fleet/pull-messages", content=b"").status_code in (400, 401, 415)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{secure.port}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{secure.port}/health")


def test_a_site_cannot_command_another(secure):
    """With a site's key alone, an instruction is pushed to another node as if it were the server's."""
    numbers = {client: node for node, client in consortium.nodes(secure.server).items()}
    key = serialization.load_ssh_private_key((secure.sites[1] / certificates.KEY).read_bytes(), None)
    stamp = now().isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp.encode())).decode(),
        TIMESTAMP_HEADER: stamp,
        "content-type": "application/x-protobuf",
    }

    def push(**about):
        request = PushMessagesRequest(node=Node(node_id=numbers[1]))
        request.messages_list.add().metadata.CopyFrom(
            Metadata(message_id="0" * 64, message_type="train.round", **about)
        )
        with httpx.Client(base_url=f"https://127.0.0.1:{secure.port}", verify=trust, headers=headers) as client:
            return client.post("/v1/fleet/push-messages", content=request.SerializeToString())

    trust = str(secure.server / "tls" / certificates.CA)
    refused = push(src_node_id=1, dst_node_id=numbers[2])
    assert (refused.status_code, refused.text) == (403, "a node may only answer the server")
    refused = push(src_node_id=numbers[2], dst_node_id=1, reply_to_message_id="1" * 64)
    assert (refused.status_code, refused.text) == (403, "a node may only answer for itself")
    own = push(src_node_id=numbers[1], dst_node_id=1, reply_to_message_id="1" * 64)
    assert own.status_code not in (401, 403)  # the key is admitted: it is Flower that finds no such run
    assert mode(secure.server / "nodes.json") == 0o600


def test_a_site_with_other_settings_is_refused_by_name(secure):
    secure.nodes[2].end()
    file = secure.sites[2] / "consortium.toml"
    agreed = file.read_text()
    file.write_text(C.dump(C.make(C.read(file), {"method": {"lr": 0.5}}).complete()))
    try:
        other = secure.node(2)
        other.wait_for("is connected")
        with pytest.raises(
            UserError, match=r"client 2 \(node \d+\) cannot take part: client 2 has another method.lr than the server"
        ):
            secure.submit("other")
        other.end()
    finally:
        file.write_text(agreed)
        secure.nodes[2] = secure.node(2)


FAULTS = """
    if task.ask == "train" and task.round == 1:
        return edited(true(self, request, blobs), lambda p: p * float("nan"))
    if task.ask == "train" and task.round == 2:
        return edited(true(self, request, blobs), lambda p: p[..., :1].clone())
    if task.ask == "train" and task.round == 3:
        print("I am about to be killed", flush=True)
        time.sleep(600)
"""
SLOW = """
    if task.ask == "train" and task.round == 2:
        time.sleep(130)
    while task.ask == "train" and task.round == 3 and not Path("{back}").exists():
        time.sleep(0.2)
"""


def test_a_run_goes_on_without_those_who_fail(secure, tmp_path):
    secure.change(**{"rounds": 4, "engine.deadline": 120})
    for client in (1, 2):
        secure.nodes[client].end()
    secure.nodes[1:] = [secure.node(1, FAULTS), secure.node(2, SLOW.format(back=tmp_path / "back"))]
    with secure.submitted("faults") as found:
        secure.nodes[1].wait_for("I am about to be killed")
        secure.nodes[1].kill()
        secure.nodes[1] = secure.node(1)
        secure.nodes[1].wait_for("is connected")
        (tmp_path / "back").touch()
    why = [{one["client"]: one["why"] for one in line["left_out"]} for line in found["lines"]]
    assert why[0] == {1: "non-finite update"}
    assert why[1].pop(2).startswith("no answer")  # by our clock or by Flower's, whichever is first
    assert why[1] == {1: "names or shapes differ from the shared parameters"}
    assert list(why[2]) == [1]
    assert why[2][1].startswith("no answer")
    assert why[3] == {}
    expected = reference(secure, tmp_path, rounds=4, absent={(3, 1)}, unheard={(1, 1), (2, 1), (2, 2)})
    assert equal(state(secure, "faults"), expected.state)
    secure.nodes[2].end()
    secure.nodes[2] = secure.node(2)


def test_a_run_whose_superlink_was_killed_is_resumed_to_the_same_parameters(secure, tmp_path):
    secure.change(**{"rounds": 3, "engine.deadline": 300})
    with secure.submitted("killed") as found:
        until = time.monotonic() + HANG
        file = secure.server / "runs" / "killed" / "rounds.jsonl"
        while not (file.exists() and file.read_text().count("\n")):
            assert time.monotonic() < until
            time.sleep(0.2)
        secure.running.kill()
    assert re.match("no SuperLink answers", str(found["error"]))
    assert not (secure.server / "runs" / "killed" / "result.json").exists()
    secure.running = secure.link()
    lines = secure.submit("killed")
    assert [line["left_out"] for line in lines] == [[], [], []]
    assert equal(state(secure, "killed"), reference(secure, tmp_path, rounds=3).state)


def test_no_byte_that_leaves_a_node_is_private(tmp_path):
    """Without TLS, so that the bytes can be read; with it they are the same, encrypted."""
    with deployed(tmp_path, clients=2, insecure=True, engine={"patience": 600, "deadline": 300}) as made:
        made.link()
        between = Recorder(made.port)
        between.start()
        file = made.sites[0] / "consortium.toml"
        file.write_text(file.read_text().replace(f":{made.port}", f":{between.port}"))
        for client in range(2):
            made.node(client)
        made.submit("recorded")
    between.listener.close()
    left = bytes(between.left)
    held = Store(made.sites[0] / "runs" / "recorded" / "clients")
    kept = [held.get(0, before) for before in (2, 3)]
    held.close()
    secrets = [value for one in kept for value in private_values(one)]
    assert len(secrets) >= 4  # a head's weights and biases, of two rounds
    for value in secrets:
        assert not any(value[i : i + 32] in left for i in range(0, len(value) - 31, 16))
    sent = unpack((made.sites[0] / "runs" / "recorded" / "received.safetensors").read_bytes())[0]
    assert sent
    assert b"up/" in left  # what is shared did leave it, and was recorded
