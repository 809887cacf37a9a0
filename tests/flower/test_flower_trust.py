"""Who may command a site: requests are signed by the server, and the door lets nodes answer and nothing else."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

import asyncio

import torch
from deployment import mode
from flwr.app import Context, Message, RecordDict
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Metadata
from flwr.proto.node_pb2 import Node
from test_flower_sites import Loopback

from promptfed import UserError
from promptfed.clients.messages import Enroll, Recipient, Request, Train
from promptfed.clients.wire import pack
from promptfed.flower import consortium as consortia
from promptfed.flower import door, wire
from promptfed.flower.app import Resident, client_app
from promptfed.flower.clients import FlowerClients
from promptfed.flower.signing import Signer, Verifier
from promptfed.flower.simulation import expected
from promptfed.flower.site import SiteFolder, read_agreed
from site_folders import consortium, site

NODE, RUN, NAME = 5, 1, "first"


@pytest.fixture
def keyed(tmp_path):
    """A consortium with a key, and one of its sites. -> the server's folder, the site's and the server's signer"""
    server, parts = consortium(tmp_path, clients=1)
    assert consortia.make_key(server)
    assert not consortia.make_key(server)  # the second time, nothing changes
    at = site(server, tmp_path, 0)
    public = read_agreed(server)[1].key
    return server, at, Signer(server / consortia.REQUESTS, public, NAME), parts


def request(task=None, node=NODE, kind="query.enroll"):
    asked = Request(task=task or Enroll(), clients=[Recipient(client=0, blob=0)])
    return Message(wire.write_request(asked, [wire.array(pack({"x": torch.zeros(2)}))]), node, kind)


def context(run=NAME, run_id=RUN, node=NODE):
    return Context(run_id, node, {}, RecordDict(), {"run": run})


def test_a_request_is_valid_for_its_run_its_node_and_its_content_only(keyed):
    _, at, sign, _ = keyed
    verify = Verifier(SiteFolder.open(at).agreed.key)
    message = request()
    with pytest.raises(UserError, match="the consortium's server has not signed it"):
        verify(message, context())
    sign(message)
    verify(message, context())
    for other in (context(run="second"), context(run_id=2), context(node=6)):
        with pytest.raises(UserError, match="has not signed it"):
            verify(message, other)
    for changed in (request(Train(round=1, score=False)), request(kind="train.round")):
        wire.attach_signature(changed.content, wire.signature(message.content))
        with pytest.raises(UserError, match="has not signed it"):
            verify(changed, context())
    message.content["blobs"]["0"] = wire.array(b"other")
    with pytest.raises(UserError, match="has not signed it"):
        verify(message, context())


def test_an_instruction_that_is_not_the_servers_changes_nothing_at_a_site(keyed, caplog):
    _, at, sign, _ = keyed
    resident = Resident(SiteFolder.open(at))
    app = client_app(resident, Verifier(resident.site.agreed.key))

    def asked(message):
        return wire.read_answer(app(message, context()).content, Enroll())[0]

    try:
        assert "has not signed it" in asked(request()).error
        assert "has not signed it" in caplog.text  # and the site's engineer can read it
        assert not (at / "runs").exists()
        message = request()
        sign(message)
        assert "has another" not in asked(message).error
    finally:
        resident.close()


def test_a_server_is_not_told_where_a_sites_files_are(keyed):
    _, at, _, parts = keyed
    resident = Resident(SiteFolder.open(at))
    app = client_app(resident)
    (at / "asked.jsonl").write_text("{\n")
    down = parts.method.down(parts.method.begin(parts.model, parts.init, 0), 0)
    asked = Request(task=Train(round=1, score=False), clients=[Recipient(client=0, blob=0)])
    try:
        reply = app(Message(wire.write_request(asked, [wire.array(pack(down))]), NODE, "train.round"), context())
        error = wire.read_answer(reply.content, Train(round=1, score=False))[0].error
        assert error.startswith('"(a path of the site)" is damaged')
        assert str(at) not in error
    finally:
        resident.close()


def test_a_run_is_signed_from_its_first_message_on(keyed):
    _, at, sign, parts = keyed
    resident = Resident(SiteFolder.open(at))
    verify = Verifier(resident.site.agreed.key)

    def named(message, context):
        context.run_config = {"run": NAME}
        verify(message, context)

    grid = Loopback(client_app(resident, named), [0])
    try:
        clients = FlowerClients(grid, expected(parts), poll=0.001, sign=sign)
        assert list(clients.enroll([0])) == [0]
        with pytest.raises(UserError, match="has not signed it"):
            FlowerClients(grid, expected(parts), poll=0.001)
    finally:
        resident.close()


def test_the_key_of_requests_is_the_one_that_was_agreed_on(keyed, tmp_path):
    server, *_ = keyed
    assert mode(server / consortia.REQUESTS) == 0o600
    with pytest.raises(UserError, match=r"is not the key that consortium.toml names"):
        Signer(server / consortia.REQUESTS, "other", NAME)
    with pytest.raises(UserError, match=r'consortium.key = "" in consortium.toml must be the public key'):
        Verifier("")
    consortia.remember(tmp_path, 7, 0)
    assert mode(tmp_path / "nodes.json") == 0o600


# ---- the door


def passed(path, parts, admitted=True, seconds=5.0):
    """What the door makes of a request: its status, and what Flower was given."""
    sent, given = [], []

    async def flower(scope, receive, send):
        given.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    async def receive():
        if not parts:
            await asyncio.sleep(60)
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts) or part == b"..."}

    async def send(event):
        sent.append(event)

    gate = door.Door(flower, lambda headers: admitted, answer=100_000_000, seconds=seconds)
    asyncio.run(gate({"type": "http", "path": path, "client": ("192.0.2.9", 5)}, receive, send))
    assert not any(gate._held.values())
    return sent[0]["status"], given


def pushed(objects=1, **about):
    own = {"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "asked", **about}
    request = PushMessagesRequest(node=Node(node_id=7))
    tree = request.message_object_trees.add()
    for _ in range(objects - 1):
        tree.children.add().object_id = "0" * 64
    request.messages_list.add().metadata.CopyFrom(Metadata(**own))
    return request.SerializeToString()


PUSH = "/v1/fleet/push-messages"


def test_a_node_may_push_its_own_answers_to_the_server_and_nothing_else():
    own = pushed()
    assert passed(PUSH, [own[:5], own[5:]]) == (200, [own])
    for other in ({"reply_to_message_id": ""}, {"src_node_id": 1}, {"src_node_id": 8}, {"dst_node_id": 8}):
        assert passed(PUSH, [pushed(**other)]) == (403, [])
    assert passed(PUSH, [own + own]) == (403, [])  # two messages
    assert passed(PUSH, [b"\xff\xff"]) == (400, [])
    assert passed(PUSH, [pushed(84)])[0] == 200
    assert passed(PUSH, [pushed(85)]) == (413, [])  # more than 100 MB can need


def test_a_request_is_bounded_in_bytes_and_in_time_before_flower_reads_it():
    megabyte = bytes(1 << 20)
    assert passed("/v1/fleet/push-object", [megabyte] * 5)[0] == 200
    assert passed("/v1/fleet/push-object", [megabyte] * 7) == (413, [])
    assert passed("/v1/fleet/push-object", [megabyte], admitted=False) == (413, [])
    assert passed("/v1/fleet/pull-messages", [megabyte]) == (413, [])
    assert passed("/v1/fleet/pull-messages", [b"..."], seconds=0.05) == (408, [])
