"""The conformance suite over Flower's messages, for every method."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import Loopback, expected

from fitting import SMALL, where
from promptfed.flower.app import client_app
from promptfed.flower.clients import FlowerClients
from promptfed.methods import ALIASES, METHODS
from promptfed.testing import Case, check_method


class Node:
    """A host whose answers go through `answer`."""

    def __init__(self, host, answer):
        self._host, self._answer = host, answer

    def __call__(self, note, blobs):
        return self._answer(note, blobs)

    def __getattr__(self, name):
        return getattr(self._host, name)


class OverFlower(Case):
    def engine(self, host, answer):
        node = Node(host, answer)
        app = client_app(lambda context: (node, context.node_config["partition-id"]))
        grid = Loopback(app, range(len(self.federation.sites)))
        return FlowerClients(grid, expected(self), poll=0.001)


# FedMGP runs the image tower for every group.
SLOW = {"fedmgp": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in (*METHODS, *ALIASES)])
def test_every_method_holds_over_flower(name):
    check_method(name, over=OverFlower, **where(name), **SMALL.get(name, {}))
