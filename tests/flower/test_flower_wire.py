"""Messages survive Flower's formats, and what does not fit the schema is refused."""

import io
import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from loopback import case_of, host_of

from promptfed.clients.messages import Enroll, Evaluate, EvaluateResult, ModelScores, Request, Second, SplitScore, Train
from promptfed.clients.wire import pack
from promptfed.flower import wire as flower_wire
from promptfed.flower.app import client_app
from promptfed.flower.wire import (
    Identify,
    Malformed,
    array,
    read_answer,
    read_request,
    tensors,
    write_answer,
    write_request,
)
from promptfed.testing import equal

TASK = {"ask": "train", "round": 1, "score": True}
TO = {"client": 0, "blob": 0, "once": {}}
ASK = {"task": TASK, "clients": [TO], "new": {}}
REQUEST = Request.model_validate(ASK)
BLOB = pack({"w": torch.arange(3.0)})
DIGEST = "0" * 64
LARGE = pack({"w": torch.zeros(3_000_000)})  # three of Flower's chunks, two of them alike


def through(content, how):
    message = Message(content, 5, "train.round")
    message.metadata.__dict__["_message_id"] = "m"
    if how == "protobuf":
        return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString())).content
    objects = {name: found.deflate() for name, found in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, objects).content


@pytest.mark.parametrize("how", ["protobuf", "objects"])
@pytest.mark.parametrize(
    "blobs", [[BLOB], [b"", BLOB, b""], [b""], [BLOB, BLOB], [pack({"w": torch.zeros(3_000_000)})]]
)
def test_a_request_survives_both_of_flowers_formats(how, blobs):
    sent = write_request(REQUEST, [array(blob) for blob in blobs], {"seed": DIGEST})
    asked, found = read_request(through(sent, how))
    assert asked.note == REQUEST
    assert asked.fingerprint == {"seed": DIGEST}
    assert found == blobs


def test_blobs_travel_as_they_are():
    content = write_request(REQUEST, [array(BLOB)])
    assert content["blobs"]["0"].data == BLOB
    assert BLOB in message_to_proto(Message(content, 5, "train.round")).SerializeToString()


def raw(head, blobs=None):
    text = head if isinstance(head, str) else json.dumps(head)
    content = RecordDict({"promptfed": ConfigRecord({"json": text})})
    if blobs is not None:
        content["blobs"] = ArrayRecord(blobs)
    return content


def head(note=ASK, sizes=(len(BLOB),), version=3):
    return {"version": version, "note": note, "sizes": list(sizes)}


def changed(task=None, clients=None, **recipient):
    return {
        "task": {**TASK, **(task or {})},
        "clients": [{**TO, **recipient}] if clients is None else clients,
        "new": {},
    }


def pickled():
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", buffer.getvalue())


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"promptfed": ArrayRecord()}),
        RecordDict({"promptfed": ConfigRecord({"json": b"{}"})}),
        RecordDict({"promptfed": ConfigRecord({"json": "{}", "more": 1})}),
        raw("{" * 100_000),
        raw("[" * 100_000 + "]" * 100_000),
        raw("nonsense"),
        raw({key: value for key, value in head().items() if key != "version"}, {"0": array(BLOB)}),
        raw({key: value for key, value in head().items() if key != "sizes"}),
        raw(head(changed(clients=[])), {"0": array(BLOB)}),
        raw(head(version=2), {"0": array(BLOB)}),
        raw(head(), {}),
        raw(head(), {"1": array(BLOB)}),
        raw(head(), {"0": array(BLOB), "1": array(BLOB)}),
        raw(head(sizes=[len(BLOB) + 1]), {"0": array(BLOB)}),
        raw(head(sizes=[1 << 40]), {"0": array(BLOB)}),
        raw(head(sizes=[-1]), {"0": array(BLOB)}),
        raw(head(sizes=[True]), {"0": array(BLOB)}),
        raw(head(), {"0": Array(np.frombuffer(BLOB, np.uint8))}),
        raw(head(), {"0": pickled()}),
        raw(head(), {"0": Array("uint8", (1 << 40,), "safetensors", BLOB)}),
        raw(head(changed(task={"ask": "stop"})), {"0": array(BLOB)}),
        raw(head({**ASK, "more": 1}), {"0": array(BLOB)}),
        raw(head(changed(clients=[TO, {**TO, "client": 1}])), {"0": array(BLOB)}),
        raw(head(changed(client=-1)), {"0": array(BLOB)}),
        raw(head(changed(task={"round": 1 << 32})), {"0": array(BLOB)}),
        raw(head(changed(task={"round": 1.0})), {"0": array(BLOB)}),
        raw(head(changed(task={"score": 1})), {"0": array(BLOB)}),
        raw(head(changed(blob=1)), {"0": array(BLOB)}),
        raw(head({**ASK, "new": {DIGEST: 7}}), {"0": array(BLOB)}),
        raw(head({**ASK, "new": {"../../passwords": 0}}), {"0": array(BLOB)}),
        raw(head({**ASK, "new": {DIGEST + "\n": 0}}), {"0": array(BLOB)}),
        raw(head(changed(once={"set": "../../passwords"})), {"0": array(BLOB)}),
    ],
)
def test_what_does_not_fit_the_schema_is_malformed(content):
    with pytest.raises(Malformed, match="malformed message"):
        read_request(content)


def test_a_message_over_the_limits_is_malformed():
    content = write_request(REQUEST, [array(BLOB)])
    assert read_request(content)
    for limits in (flower_wire.Limits(head=10), flower_wire.Limits(bytes=10)):
        with pytest.raises(Malformed, match="more than 10"):
            read_request(content, limits)
    for limits in (flower_wire.Limits(header=10), flower_wire.Limits(tensors=0)):
        with pytest.raises(Malformed, match="malformed blob"):
            tensors(BLOB, limits)


def safetensors(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


META = {"__metadata__": {"promptfed": "{}"}}


@pytest.mark.parametrize(
    "blob",
    [
        b"short",
        b"\xff" * 64,
        safetensors({}),
        safetensors({"__metadata__": {"promptfed": '{"a": 1}'}}),
        safetensors({**META, "w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors({**META, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)),
        safetensors({**META, "w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(4)),
        safetensors({**META, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
        safetensors({**META, "w": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors({**META, "w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors({**META, **{n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}}, bytes(4)),
    ],
)
def test_a_blob_that_is_none_is_malformed(blob):
    with pytest.raises(Malformed, match="malformed blob"):
        tensors(blob)


def test_a_blob_holds_what_was_put_into_it():
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    held = {str(kind): torch.ones(2, 3).to(kind) for kind in kinds} | {
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2),
    }
    assert equal(tensors(pack(held)), held)
    assert tensors(b"") == {}


def test_answers_are_held_against_what_was_asked():
    score = SplitScore(n=1, loss=float("inf"), tp=[1], fp=[0], fn=[0])
    one = EvaluateResult(client=0, passes=0, scores=ModelScores(val=score, test=score), groups=[[1]])
    tasks = {"evaluate": Evaluate(as_of=2, pooled=False, after_local=False), "train": Train(round=1, score=False)}
    answered, blobs = read_answer(write_answer(one), tasks["evaluate"])
    assert (answered.result, answered.error, blobs) == (one, "", [])
    answered, blobs = read_answer(write_answer(None, "no"), tasks["train"])
    assert (answered.result, answered.error, blobs) == (None, "no", [])
    for task in (tasks["train"], Enroll(), Second(round=1), Identify()):
        with pytest.raises(Malformed):
            read_answer(write_answer(one), task)


def ask_node(folder, note, blobs, kind="train.round", client=0):
    """What a node answers to a request made by hand."""
    case = case_of("fedavg", folder)
    host = host_of(case, folder / "clients")
    app = client_app(lambda context: (host, client))
    sent = raw(note) if isinstance(note, str) else write_request(Request.model_validate(note), list(map(array, blobs)))
    reply = app(Message(sent, 5, kind), Context(1, 5, {}, RecordDict(), {}))
    host.close()
    return read_answer(reply.content, Train(round=1, score=True))[0].error


def test_a_node_refuses_what_is_not_for_it_and_says_so(tmp_path):
    assert "and this node is client 1" in ask_node(tmp_path, ASK, [BLOB], client=1)
    assert "of another type" in ask_node(tmp_path, ASK, [BLOB], kind="evaluate.round")
    assert "does not name it" in ask_node(tmp_path, {**ASK, "new": {DIGEST: 0}}, [BLOB])
    named = {**changed(once={"x": DIGEST}), "new": {DIGEST: 0}}
    assert "another digest" in ask_node(tmp_path, named, [BLOB])
    assert "malformed blob" in ask_node(tmp_path, ASK, [b"no safetensors"])
    assert "malformed message" in ask_node(tmp_path, "{}", [])
    assert not list((tmp_path / "clients").glob("once/*"))
