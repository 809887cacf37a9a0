"""A Grid double: nodes in this process, with random numbers in random order, behind Flower's protobuf format."""

import random
from contextlib import contextmanager
from itertools import count

import torch
from flwr.app import Context, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid

from fitting import SMALL, where
from promptfed import methods, models
from promptfed.clients.host import Host
from promptfed.clients.store import Store
from promptfed.clients.wire import unpack
from promptfed.flower.agreement import Agreement
from promptfed.flower.app import client_app, fingerprint
from promptfed.flower.clients import Expected, FlowerClients
from promptfed.secure.site import Masker
from promptfed.server import Plan, run
from promptfed.testing import NAMES, SIZES, Case, Memory, equal, tiny_federation

SHORT = {"epochs": 1, "batch_size": 8, "prompt_epochs": 1, "head_epochs": 1, "iterations": 4, "mean_size": 4}


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
        raise AssertionError("promptfed asks a Grid for nothing of this")

    def create_message(self, *args, **kwargs):
        raise AssertionError("promptfed asks a Grid for nothing of this")

    def send_and_receive(self, messages, *, timeout=None):
        raise AssertionError("promptfed asks a Grid for nothing of this")

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


class Wary:
    """A host that refuses what a site would refuse: private names, and other shapes than agreed."""

    def __init__(self, host):
        self._host = host
        self._agreed = Agreement.of(None, lambda: Plan(2, 1.0, host.seed), host.method, host.model, host.init)

    def __call__(self, request, blobs):
        down = unpack(blobs[request.clients[0].blob])[0]
        assert self._agreed.unexpected(request.task, down) == ""
        return self._host(request, blobs)

    def __getattr__(self, name):
        return getattr(self._host, name)


FEW = (9, 1, 5)  # clients' samples where every method runs


def case_of(name, folder, sizes=SIZES, **settings):
    given = {**SMALL.get(name, {}), **settings}
    short = {key: value for key, value in SHORT.items() if key in methods.fields(name)}
    backbone, size = where(name).get("backbone", "cnn"), where(name).get("size", 16)
    model = models.build(backbone, (3, size, size), 4, 5, NAMES)
    return Case(methods.create(name, {**short, **given}), model, tiny_federation(folder, sizes, size=size))


def expected(case):
    data, shared = case.federation.dataset, case.method.shared(case.init)
    if case.secure.aggregation:
        shared = {name: p.int() for name, p in shared.items()}
    about = fingerprint(case.method, case.model, data, case.seed, augment=case.augment, secure=case.secure)
    return Expected(len(case.federation.sites), case.model.classes, shared, about, len(data.domains))


def host_of(case, folder):
    return Host(
        method=case.method,
        model=case.model,
        federation=case.federation,
        store=Store(folder),
        seed=case.seed,
        device=torch.device("cpu"),
        augment=case.augment,
        masker=Masker(case.secure, case.seed, folder / "secure") if case.secure.aggregation else None,
    )


@contextmanager
def looped(case, folder, wrap=lambda host: host, there=None, **settings):
    """-> clients over a Grid double, and the double. `there`: the clients that have nodes; none: all"""
    host = host_of(case, folder)
    node = wrap(host)
    clients = range(len(case.federation.sites)) if there is None else there
    grid = Loopback(client_app(lambda context: (node, context.node_config["partition-id"])), clients)
    try:
        yield FlowerClients(grid, expected(case), **{"poll": 0.001, **settings}), grid
    finally:
        host.close()


def go(case, clients, rounds=2, every=1):
    recorder = Memory()
    plan = case.plan(rounds, eval_every=every, after_local="all", pooled="last")
    run(case.method, case.model, case.init, clients, plan, recorder)
    return recorder


def timeless(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def same(a, b):
    """Lines and parameters to the last bit. Losses may be none of a number, and those are alike."""
    assert equal(a.state, b.state)
    assert repr(timeless(a.lines)) == repr(timeless(b.lines))
