"""Protocols on unseen data: over Flower's messages as on this machine."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import Loopback, timeless

import promptfed
from promptfed.flower import app, simulation
from promptfed.runs.record import read_lines

RUN = {"rounds": 1, "progress": False}
CASES = {
    "base_to_novel": {
        "method": {"name": "promptfl", "context": 2, "epochs": 1},
        "backbone": "clip-mini",
        "dataset": {"name": "shapes", "limit": 64},
        "partition": {"name": "iid", "clients": 2},
        "eval": {"novel": 0.5},
    },
    "cross_dataset": {
        "method": {"name": "promptfl", "context": 2, "epochs": 1},
        "backbone": "clip-mini",
        "dataset": {"name": "shapes", "limit": 64},
        "partition": {"name": "iid", "clients": 2},
        "eval": {"datasets": ["parts"], "limit": 32},
    },
    "unseen_domain": {
        "method": {"name": "head-tune", "epochs": 1},
        "backbone": "vit-mini",
        "dataset": {"name": "shapes", "limit": 96},
        "partition": {"name": "domain"},
        "eval": {"leave_out": "outline"},
    },
}


class InProcess:
    """Flower's simulation without Ray: its nodes are in this process."""

    def __init__(self, app, nodes, workers, gpus):
        self._grid = Loopback(app, range(nodes))

    def grid(self):
        return self._grid

    def check(self): ...

    def close(self):
        while app._hosts:  # of processes that would end now
            app._hosts.popitem()[1].close()


@pytest.mark.parametrize("protocol", CASES)
def test_a_protocol_ends_as_on_this_machine(protocol, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "Simulation", InProcess)
    local, flower = (
        promptfed.run(**CASES[protocol], **RUN, engine={"name": name, "workers": 1}, out=tmp_path / name)
        for name in ("local", "flower")
    )
    assert timeless(read_lines(flower.folder)) == timeless(read_lines(local.folder))
    assert flower.numbers["protocols"] == local.numbers["protocols"]
    assert local.numbers["protocols"].keys() == {protocol, "scored"}
    assert None not in local.numbers["protocols"][protocol].values()
