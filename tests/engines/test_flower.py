"""Flower changes nothing: the same parameters, lines and bytes as on this machine, and no private value in a message.

Most tests run on a Grid double. Every message goes through Flower's own protobuf format to bytes and back, and to the
ClientApp that nodes run; nodes have random numbers in random order. The real simulation runs methods that need most of
the contract: private state, a payload of each client's own, a second message. It is slow to start, and Ray listens on
all of the machine's addresses while it runs; `unshare -n` keeps it apart.
"""

import io
import json
import math
import os
import pickle
import random
import time
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

import promptfed
from promptfed import UserError, build, methods, models
from promptfed import config as C
from promptfed.engines import flower_client, flower_wire
from promptfed.engines.base import ONCE
from promptfed.engines.flower import Expected, FlowerClients
from promptfed.engines.flower_client import client_app, fingerprint
from promptfed.engines.flower_wire import Malformed, array, read_answer, read_request, tensors, write
from promptfed.host import Host
from promptfed.methods import ALIASES, METHODS
from promptfed.server import Plan, run
from promptfed.store import Store
from promptfed.testing import NAMES, SIZES, Case, Memory, begun, equal, private_values, tiny_federation
from promptfed.wire import pack, unpack
from site_folders import consortium, site

SMALL = {
    "sgpt": {"groups": 3, "rare": 4, "shared_layers": (0,), "group_layers": (4, 5)},
    "pfedpg": {"tokens": 2},
    "tpfl": {"context": 2, "prompt_size": 2},
    "atpfl": {"context": 2, "prompt_size": 2},
    "dp2fl": {"depth": 2},
    "promptfl": {"context": 3},
}
SHORT = {"epochs": 1, "batch_size": 8, "prompt_epochs": 1, "head_epochs": 1, "iterations": 4, "mean_size": 4}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _identity():
    """Whom messages come from: Flower sets it when it starts a ServerApp."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


class Loopback(Grid):
    """Nodes at the other end of Flower's protobuf format, in this process."""

    def __init__(self, app, clients):
        self.app, self.numbers, self.said, self.replies = app, random.Random(3), [], {}
        self.nodes = {self.number(): client for client in clients}  # node -> partition-id
        self.ids, self.silent, self.asked = count(), set(), []

    def number(self):
        return self.numbers.getrandbits(62) + 1

    def set_run(self, run): ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return self.numbers.sample(list(self.nodes), len(self.nodes))

    def push_messages(self, messages):
        for message in messages:
            name = f"m{next(self.ids)}"
            message.metadata.__dict__["_message_id"] = name
            sent = message_to_proto(message).SerializeToString()
            node = message.metadata.dst_node_id
            client = self.nodes[node]
            self.asked.append((message.metadata.message_type, client, sent))
            if client not in self.silent:
                context = Context(1, node, {"partition-id": client}, RecordDict(), {})
                reply = self.app(message_from_proto(ProtoMessage.FromString(sent)), context)
                self.said.append(message_to_proto(reply).SerializeToString())
                self.replies[name] = self.said[-1]
                assert not context.state
            yield name

    def pull_messages(self, message_ids):
        there = [name for name in message_ids if name in self.replies]
        self.numbers.shuffle(there)
        return [message_from_proto(ProtoMessage.FromString(self.replies.pop(name))) for name in there]


FEW = (9, 1, 5)  # clients' samples where every method runs


def case_of(name, folder, sizes=SIZES, **settings):
    needed, given = methods.backbones(methods.create(name)), {**SMALL.get(name, {}), **settings}
    short = {key: value for key, value in SHORT.items() if key in methods.fields(name)}
    backbone = "clip-mini" if needed.startswith("CLIP") else "vit-mini" if needed == "transformers" else "cnn"
    size = 16 if backbone == "cnn" else 32
    model = models.build(backbone, (3, size, size), 4, 5, NAMES)
    return Case(methods.create(name, {**short, **given}), model, tiny_federation(folder, sizes, size=size))


def expected(case):
    data, shared = case.federation.dataset, case.method.shared(case.init)
    about = fingerprint(case.method, case.model, data, case.seed)
    return Expected(len(case.federation.sites), case.model.classes, shared, about, len(data.domains))


@contextmanager
def looped(case, folder, wrap=lambda host: host, **settings):
    """-> clients over a Grid double, and the double"""
    host = Host(case.method, case.model, case.federation, Store(folder), case.seed, torch.device("cpu"))
    node = wrap(host)
    clients = range(len(case.federation.sites))
    grid = Loopback(client_app(lambda context: (node, context.node_config["partition-id"])), clients)
    yield FlowerClients(grid, expected(case), **{"poll": 0.001, **settings}), grid
    host.close()


def go(case, clients, rounds=2, every=1):
    recorder = Memory()
    plan = Plan(rounds, 1.0, case.seed, every, after_local="all", pooled="last")
    run(case.method, case.model, case.init, clients, plan, recorder)
    return recorder


def timeless(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def same(a, b):
    """Lines and parameters to the last bit. Losses may be none of a number, and those are alike."""
    assert equal(a.state, b.state)
    assert repr(timeless(a.lines)) == repr(timeless(b.lines))


# ---- fidelity


@pytest.mark.parametrize("name", [*METHODS, *ALIASES, "dp2fl open", "dp2fl sealed"])
def test_every_method_ends_with_the_bits_and_bytes_of_the_local_engine(name, tmp_path):
    name, _, privacy = name.partition(" ")
    case = case_of(name, tmp_path, FEW, **({"privacy": privacy} if privacy else {}))
    hosts = []
    with looped(case, tmp_path / "clients", wrap=lambda host: hosts.append(host) or host) as (clients, grid):
        found = go(case, clients, every=2)
        held = [hosts[0].store.get(client, before) for client in clients.ids() for before in (2, 3)]
    with case.clients() as (local, _):
        same(found, go(case, local, every=2))
    kept = [value for state in held for value in private_values(state)]
    if len(case.method.shared(case.init)) < len(case.init) or privacy == "sealed":
        assert len(kept) >= 2 * len(FEW)
    for said in grid.said:  # every byte that left a node
        for value in kept:
            assert value not in said
    if name == "dp2fl":
        check_once(case, grid)
    assert any(kind == "train.settle" for kind, _, _ in grid.asked) is (privacy == "sealed")


def check_once(case, grid):
    """Validation sets travel with the first message only."""
    down = case.method.down(begun(case), 0)
    large = [p.numpy().tobytes() for name, p in down.items() if name.startswith(ONCE) and name.endswith(".x")]
    first, second = (sent for kind, client, sent in grid.asked if kind == "train.round" and client == 0)
    assert large
    for value in large:
        assert value in first
        assert value not in second


def test_how_far_parameters_move_is_told_as_on_this_machine(tmp_path):
    case = case_of("fedper", tmp_path, FEW)

    def drifting(host):
        host.drift = True
        return host

    with looped(case, tmp_path / "clients", wrap=drifting) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [told["client"] for told in line["moved"]] == [0, 1, 2]
    assert all(told["roles"].keys() == {"body", "head"} and min(told["roles"].values()) > 0 for told in line["moved"])


def test_few_messages_under_way_change_nothing(tmp_path):
    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients", window=2) as (clients, _), case.clients() as (local, _):
        same(go(case, clients), go(case, local))


# ---- who is there


class Edited:
    """A host, some of whose answers are replaced."""

    def __init__(self, host, edit):
        self._host, self._edit = host, edit

    def __getattr__(self, name):
        return getattr(self._host, name)

    def __call__(self, note, blobs):
        return self._edit(note, lambda: self._host(note, blobs))


def test_two_nodes_for_one_client_or_an_unknown_one_are_one_sentence(tmp_path):
    case = case_of("fedavg", tmp_path)
    for last, complaint in ((2, "it says it is client 2, as does node"), (9, "this node is client 9")):
        with (
            pytest.raises(UserError, match=complaint),
            looped_with(case, tmp_path / f"clients{last}", [0, 1, 2, 3, last]),
        ):
            pass


@contextmanager
def looped_with(case, folder, numbers):
    host = Host(case.method, case.model, case.federation, Store(folder), case.seed, torch.device("cpu"))
    grid = Loopback(client_app(lambda context: (host, context.node_config["partition-id"])), numbers)
    try:
        yield FlowerClients(grid, expected(case), poll=0.001, patience=0.2)
    finally:
        host.close()


def test_nodes_that_do_not_come_are_one_sentence(tmp_path):
    case = case_of("fedavg", tmp_path)
    with pytest.raises(UserError, match=r"4 of 5 nodes are there"), looped_with(case, tmp_path / "clients", range(4)):
        pass


@pytest.mark.parametrize("part", ["backbone", "preprocessing", "class list", "method", "seed"])
def test_a_node_that_differs_is_refused_and_told_in_what(part, tmp_path):
    case = case_of("fedavg", tmp_path)
    other = Expected(len(SIZES), 4, {}, {**expected(case).fingerprint, part: "0"})
    host = Host(case.method, case.model, case.federation, Store(tmp_path / "clients"), 11, torch.device("cpu"))
    grid = Loopback(client_app(lambda context: (host, context.node_config["partition-id"])), range(len(SIZES)))
    with pytest.raises(UserError, match=f"has another {part} than the server"):
        FlowerClients(grid, other, poll=0.001)
    host.close()


def test_the_fingerprint_tells_weights_settings_and_classes_apart(tmp_path):
    case = case_of("pfedpt", tmp_path)
    data, model = case.federation.dataset, case.model
    base = fingerprint(case.method, model, data, 0)
    name = next(iter(model.weights))
    model.weights[name] = model.weights[name].clone()
    model.weights[name].view(-1)[0] += 1e-6
    assert differing(base, fingerprint(case.method, model, data, 0)) == {"backbone"}
    lr = case.method.model_copy(update={"lr": 0.3})
    assert differing(fingerprint(case.method, model, data, 0), fingerprint(lr, model, data, 1)) == {"method", "seed"}


def differing(a, b):
    return {part for part in a if a[part] != b[part]}


def test_a_node_that_comes_back_under_another_number_is_known_again(tmp_path):
    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients") as (clients, grid):
        state = begun(case)
        first, _ = clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
        node = next(n for n, client in grid.nodes.items() if client == 2)
        del grid.nodes[node]
        assert [u.client for u in clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)[0]] == [0, 1, 3, 4]
        grid.nodes[grid.number()] = 2
        again, _ = clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
        assert [u.client for u in again] == [0, 1, 2, 3, 4]
        assert all(equal(a.up, b.up) for a, b in zip(first, again, strict=True))


def test_nobody_takes_the_place_of_a_node_that_is_there(tmp_path):
    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients") as (clients, grid):
        mine = dict(clients._nodes)
        grid.nodes[grid.number()] = 2
        with pytest.warns(UserWarning, match="it says it is client 2, as does node"):
            assert len(clients.train(dict.fromkeys(range(5), begun(case)), 1, score=False)[0]) == 5
        assert clients._nodes == mine


# ---- faults


def test_a_client_that_fails_is_recorded_and_the_run_goes_on(tmp_path):
    def edit(note, said):
        if note["ask"] == "train" and note["clients"] == [1] and note["round"] == 1:
            raise ValueError("a secret of the site")
        if note["ask"] == "train" and note["clients"] == [2]:
            raise UserError("the disk of this site is full")
        return said()

    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, grid):
        lines = go(case, clients).lines
    why = [{entry["client"]: entry["why"] for entry in line["left_out"]} for line in lines]
    assert why[0][1].startswith("ValueError in test_flower.py, line")
    assert why == [{1: why[0][1], 2: "the disk of this site is full"}, {2: "the disk of this site is full"}]
    assert not any(b"a secret of the site" in said for said in grid.said)
    assert all(len(line["aggregated"]["clients"]) == len(SIZES) for line in lines)


def test_a_client_that_does_not_answer_in_time_is_left_out(tmp_path):
    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", timeout=0.3) as (clients, grid):
        state = begun(case)
        grid.silent.add(3)
        begun_at = time.monotonic()
        updates, _ = clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
        assert 0.25 < time.monotonic() - begun_at < 20
        assert [u.client for u in updates] == [0, 1, 2, 4]
        assert clients.settle({3: state}, 1) == {}
        assert [s.client for s in clients.evaluate({3: state, 4: state}, 1, False, False)] == [4]
        with pytest.raises(UserError, match="client 3 cannot be enrolled: no answer"):
            clients.enroll([2, 3])


def test_in_a_simulation_it_is_an_error_if_everybody_fails(tmp_path):
    def edit(note, said):
        raise ZeroDivisionError

    case = case_of("fedavg", tmp_path)
    with (
        looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit), strict=True) as (clients, _),
        pytest.raises(UserError, match="every client failed; the first with: ZeroDivisionError in test_flower"),
    ):
        clients.train(dict.fromkeys(range(5), begun(case)), 1, score=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "client": 4}]}, blobs), "it answers for client 4"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "n": "many"}]}, blobs), "valid integer"),
        (lambda note, blobs: ({"clients": []}, blobs), "malformed message"),
        (lambda note, blobs: (note, []), "0 blobs in place of 1"),
        (lambda note, blobs: (note, [blobs[0][:-4]]), "do not fill it"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "loss": 1e308}]}, blobs), "non-finite update"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "moved": {"x": math.inf}}]}, blobs), "non-finite"),
        (lambda note, blobs: ({"clients": [{**note["clients"][0], "error": "a\x1b[31m\nb"}]}, blobs), "a?[31m b"),
        (lambda note, blobs: (note, [pickle.dumps({"up/head.bias": 1})]), "malformed blob"),
        (lambda note, blobs: (note, [pack({"up/head.bias": torch.zeros(9)})]), "other names or shapes"),
        (lambda note, blobs: (note, [changed(blobs[0], lambda p: p.double())]), "other types"),
        (lambda note, blobs: (note, [changed(blobs[0], lambda p: p * float("nan"))]), "non-finite update"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_with_its_reason(change, why, tmp_path):
    def edit(note, said):
        return change(*said()) if note["ask"] == "train" and note["clients"] == [0] else said()

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


def changed(blob, how):
    return pack({name: how(p) for name, p in unpack(blob)[0].items()})


def test_what_is_said_to_be_nothing_is_not_said(tmp_path):
    def edit(note, said):
        answer, blobs = said()
        if note["ask"] in ("train", "evaluate"):
            nothing = {"after_local": None} if note["ask"] == "train" else {"groups": None, "global": None}
            answer["clients"][0] |= nothing
        return answer, blobs

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert not line["left_out"]
    assert len(line["aggregated"]["clients"]) == 5


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("dp2fl", lambda stats: {}, "losses on other validation sets"),
        ("dp2fl", lambda stats: {**stats, "stats/total": torch.tensor([-3.0])}, "losses that are none"),
        ("dp2fl", lambda stats: {**stats, "stats/total": torch.ones(3)}, "losses that are none"),
        ("sgpt", lambda stats: {"stats/selected": torch.ones(2)}, "counts of other groups"),
        ("sgpt", lambda stats: {"stats/selected": -torch.ones(3)}, "counts of other groups"),
    ],
)
def test_stats_that_cannot_be_aggregated_are_refused(name, change, why, tmp_path):
    def edit(note, said):
        answer, blobs = said()
        if note["ask"] == "train" and note["clients"] == [0]:
            params = unpack(blobs[0])[0]
            up = {key: p for key, p in params.items() if key.startswith("up/")}
            blobs = [pack({**up, **change({key: p for key, p in params.items() if key not in up})})]
        return answer, blobs

    case = case_of(name, tmp_path, FEW)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [entry["client"] for entry in line["left_out"]] == [0]
    assert why in line["left_out"][0]["why"]


def test_scores_of_other_classes_are_refused(tmp_path):
    def edit(note, said):
        answer = said()
        if note["ask"] == "evaluate" and note["clients"] == [0]:
            answer[0]["clients"][0]["test"]["tp"].append(1)
        return answer

    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients", wrap=lambda host: Edited(host, edit)) as (clients, _):
        found = clients.evaluate(dict.fromkeys(range(5), begun(case)), 1, False, False)
    assert [s.client for s in found] == [1, 2, 3, 4]


def test_what_a_node_has_lost_is_sent_again(tmp_path):
    case = case_of("dp2fl", tmp_path, FEW)
    with looped(case, tmp_path / "clients") as (clients, _):
        state = begun(case)
        down = {client: case.method.down(state, client) for client in clients.ids()}
        first, _ = clients.train(down, 1, score=False)
        for file in (tmp_path / "clients" / "once").iterdir():
            file.unlink()
        lost, _ = clients.train(down, 1, score=False)
        assert any(u.error.startswith("FileNotFoundError") for u in lost)
        again, _ = clients.train(down, 1, score=False)
        assert not any(u.error for u in again)
        assert all(equal(a.up, b.up) for a, b in zip(first, again, strict=True))


# ---- messages

ASK = {"ask": "train", "round": 1, "score": True, "clients": [0], "blob": [0], "once": [{}], "new": {}}
BLOB = pack({"w": torch.arange(3.0)})
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
    note, found = read_request(through(write(ASK, [array(blob) for blob in blobs]), how))
    assert note == ASK
    assert found == blobs


def test_blobs_travel_as_they_are():
    content = write(ASK, [array(BLOB)])
    assert content["blobs"]["0"].data == BLOB
    assert BLOB in message_to_proto(Message(content, 5, "train.round")).SerializeToString()


def raw(head, blobs=None):
    text = head if isinstance(head, str) else json.dumps(head)
    content = RecordDict({"promptfed": ConfigRecord({"json": text})})
    if blobs is not None:
        content["blobs"] = ArrayRecord(blobs)
    return content


def head(note=ASK, sizes=(len(BLOB),), version=1):
    return {"version": version, "note": note, "sizes": list(sizes)}


def pickled():
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", buffer.getvalue())


DIGEST = "0" * 64


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
        raw(head({**ASK, "ask": "stop"}), {"0": array(BLOB)}),
        raw(head({**ASK, "more": 1}), {"0": array(BLOB)}),
        raw(head({**ASK, "clients": [0, 1]}), {"0": array(BLOB)}),
        raw(head({**ASK, "clients": [-1]}), {"0": array(BLOB)}),
        raw(head({**ASK, "round": 1 << 32}), {"0": array(BLOB)}),
        raw(head({**ASK, "round": 1.0}), {"0": array(BLOB)}),
        raw(head({**ASK, "score": 1}), {"0": array(BLOB)}),
        raw(head({**ASK, "blob": [1]}), {"0": array(BLOB)}),
        raw(head({**ASK, "new": {DIGEST: 7}}), {"0": array(BLOB)}),
        raw(head({**ASK, "new": {"../../passwords": 0}}), {"0": array(BLOB)}),
        raw(head({**ASK, "new": {DIGEST + "\n": 0}}), {"0": array(BLOB)}),
        raw(head({**ASK, "once": [{"set": "../../passwords"}]}), {"0": array(BLOB)}),
    ],
)
def test_what_does_not_fit_the_schema_is_malformed(content):
    with pytest.raises(Malformed, match="malformed message"):
        read_request(content)


def test_a_message_over_the_limits_is_malformed():
    content = write(ASK, [array(BLOB)])
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
    score = {"n": 1, "loss": float("inf"), "tp": [1], "fp": [0], "fn": [0]}
    one = {"client": 0, "passes": 0, "val": score, "test": score, "groups": [[1]]}
    assert read_answer(write({"clients": [one]}, []), "evaluate") == ({"clients": [one]}, [])
    assert read_answer(write({"error": "no"}, []), "train") == ({"error": "no"}, [])
    for ask in ("train", "enroll", "settle", "identify"):
        with pytest.raises(Malformed):
            read_answer(write({"clients": [one]}, []), ask)


def ask_node(folder, note, blobs, kind="train.round", client=0):
    """What a node answers to a request made by hand."""
    case = case_of("fedavg", folder)
    host = Host(case.method, case.model, case.federation, Store(folder / "clients"), 11, torch.device("cpu"))
    app = client_app(lambda context: (host, client))
    message = Message(raw(note) if isinstance(note, str) else write(note, [array(b) for b in blobs]), 5, kind)
    reply = app(message, Context(1, 5, {}, RecordDict(), {}))
    host.close()
    return read_answer(reply.content, "train")[0]


def test_a_node_refuses_what_is_not_for_it_and_says_so(tmp_path):
    assert "and this node is client 1" in ask_node(tmp_path, ASK, [BLOB], client=1)["error"]
    assert "of another type" in ask_node(tmp_path, ASK, [BLOB], kind="evaluate.round")["error"]
    assert "does not name it" in ask_node(tmp_path, {**ASK, "new": {DIGEST: 0}}, [BLOB])["error"]
    named = {**ASK, "once": [{"x": DIGEST}], "new": {DIGEST: 0}}
    assert "another digest" in ask_node(tmp_path, named, [BLOB])["error"]
    assert "malformed blob" in ask_node(tmp_path, ASK, [b"no safetensors"])["error"]
    assert "malformed message" in ask_node(tmp_path, "{}", [])["error"]
    assert not list((tmp_path / "clients").glob("once/*"))


# ---- a site's own description


def test_a_site_is_what_its_node_configuration_says(tmp_path, monkeypatch):
    from promptfed.engines.flower_app import site_app

    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    folder, server = consortium(tmp_path, clients=2)
    site(folder, tmp_path, client=1)

    def identified(node_config, run="first"):
        context = Context(1, 5, node_config, RecordDict(), {"run": run})
        message = Message(write({"ask": "identify"}, []), 5, "query.identify")
        return read_answer(site_app(message, context).content, "identify")[0]

    found = identified({"site": str(tmp_path / "site1")})
    assert found["client"] == 1
    assert found["n"] == 28
    assert found["fingerprint"] == fingerprint(server.method, server.model, server.federation.dataset, 0)
    first = next(iter(flower_client._residents.values())).parts.model
    identified({"site": str(tmp_path / "site1")}, run="second")
    assert next(iter(flower_client._residents.values())).parts.model is first  # it is not loaded again
    assert {path.name for path in (tmp_path / "site1" / "runs").iterdir()} == {"first", "second"}
    assert 'run = "../x" must be letters' in identified({"site": str(tmp_path / "site1")}, run="../x")["error"]
    flower_client._residents.pop(str(tmp_path / "site1")).close()
    assert "has no site" in identified({})["error"]
    assert "is not the folder of a site" in identified({"site": str(tmp_path / "none")})["error"]


# ---- the real simulation

RUN = {
    "dataset": {"name": "shapes", "limit": 36, "size": 32},
    "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 3, "min_samples": 3},
    "rounds": 2,
    "eval": {"after_local": "all"},
}


REPRESENTATIVE = [
    ({"name": "pfedpt", "epochs": 1}, "cnn"),  # private state
    ({"name": "pfedpg", "epochs": 1, **SMALL["pfedpg"]}, "vit-mini"),  # a payload of each client's own
    ({"name": "dp2fl", "epochs": 1, "privacy": "sealed", **SMALL["dp2fl"]}, "clip-mini"),  # secrets, a second message
]


@pytest.fixture
def _ray():
    found = pytest.importorskip("ray", reason='Ray is not installed: pip install "promptfed[flower]"')
    before = os.environ.get("PYTHONPATH")
    assert not found.is_initialized()
    yield
    assert not found.is_initialized()
    assert os.environ.get("PYTHONPATH") == before


def whole(parts, clients, folder):
    recorder = Memory()
    plan = Plan(parts.config.rounds, 1.0, parts.config.seed, after_local="all")
    run(parts.method, parts.model, parts.init, clients, plan, recorder)
    assert (folder / "clients").is_dir()
    return recorder


def started(parts, folder):
    try:
        return build.clients(parts, folder)
    except UserError as error:
        if "timed out during startup" in str(error):
            pytest.skip("this machine is too busy: Ray did not start in the 30 s that it gives itself")
        raise


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_flowers_simulation_ends_with_the_bits_of_the_local_engine(tmp_path):
    """Methods one after the other in one simulation: starting it is what takes long."""
    from promptfed.engines.flower_app import describe
    from promptfed.engines.flower_app import expected as wanted

    simulation = None
    try:
        for number, (method, backbone) in enumerate(REPRESENTATIVE):
            folder = tmp_path / str(number)
            given = {"method": method, "backbone": backbone, "engine": {"name": "flower", "workers": 2}, **RUN}
            parts = build.assemble(C.make(given))
            parts.federation.save(folder / "partition.json")
            if simulation is None:
                simulation = clients = started(parts, folder)
            else:
                (tmp_path / "0" / "clients" / "host.json").write_text(describe(parts, folder))
                clients = FlowerClients(simulation._grid, wanted(parts), poll=0.02, alive=simulation._alive)
            found = whole(parts, clients, folder)
            local = build.assemble(C.make(given, {"engine": {"name": "local", "workers": 1}}))
            local.federation.save(tmp_path / f"local{number}" / "partition.json")
            hosts = build.clients(local, tmp_path / f"local{number}")
            same(found, whole(local, hosts, tmp_path / f"local{number}"))
            hosts.close()
    finally:
        if simulation is not None:
            simulation.close()


def outcome(folder):
    state = unpack((folder / "checkpoint.safetensors").read_bytes())[0]
    return state, timeless(json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_a_simulated_run_is_a_run_like_any_other_and_can_be_resumed(tmp_path):
    settings = {"method": {"name": "pfedpt", "epochs": 1}, **RUN}
    promptfed.run(**settings, out=tmp_path / "local", engine={"workers": 1})
    promptfed.run(**{**settings, "rounds": 1}, out=tmp_path / "flower", engine={"name": "flower", "workers": 1})
    result = promptfed.run(out=tmp_path / "flower", resume=True, rounds=2)
    (a, a_lines), (b, b_lines) = outcome(tmp_path / "local"), outcome(tmp_path / "flower")
    assert equal(a, b)
    assert a_lines[-1] == b_lines[-1]
    assert result.numbers["config"]["engine"]["name"] == "flower"


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
def test_what_is_wrong_in_a_simulation_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(
        "from promptfed import Method\n\n\nclass Broken(Method):\n"
        "    def loss(self, model, params, batch, ctx):\n        raise ZeroDivisionError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"every client failed; the first with: ZeroDivisionError in broken\.py"):
        promptfed.run(method="broken:Broken", **RUN, out=tmp_path / "run", engine={"name": "flower", "workers": 1})


def test_a_method_of_the_main_script_is_refused_in_one_sentence(tmp_path, monkeypatch):
    import __main__

    monkeypatch.setattr(__main__, "Mine", METHODS["fedavg"], raising=False)
    with pytest.raises(UserError, match="put it into a module"):
        promptfed.run(method="__main__:Mine", **RUN, out=tmp_path / "run", engine="flower")
