"""Flower's own simulation ends as the local engine does; mistakes are one sentence."""

import json
import os

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from loopback import same, timeless

import promptfed
from fitting import SMALL
from promptfed import UserError
from promptfed.clients.wire import unpack
from promptfed.flower.clients import FlowerClients
from promptfed.methods import METHODS
from promptfed.runs import build
from promptfed.runs import config as C
from promptfed.server import Plan, run
from promptfed.testing import Memory, equal

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
    """Slow to start; it listens on all of the machine's addresses while it runs, and `unshare -n` keeps it apart."""
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
    from promptfed.flower.simulation import expected as wanted

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
                (tmp_path / "0" / "clients" / "host.json").write_text(json.dumps(build.describe(parts, folder)))
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
