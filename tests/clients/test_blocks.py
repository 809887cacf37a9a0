"""Blocks of clients by the memory of an accelerator, estimated on the CPU."""

import pytest
import torch

import promptfed
from promptfed import UserError, methods, models
from promptfed.clients import blocks, host, local
from promptfed.clients.messages import Answer, TrainResult
from promptfed.methods import create
from promptfed.runs import build
from promptfed.runs import config as C
from promptfed.testing import Case, begun, tiny_federation
from tiny import linear, work


def test_a_client_needs_memory_for_its_samples_parameters_and_activations() -> None:
    """By hand, for a linear body (4) and head (3) on 2 x 4 x 4 images, in fp32 and with four samples per step."""
    model, method = linear(), create("fedavg", {"batch_size": 4})
    phase = method.schedule(1)[0]
    one = work(model.weights, 10)
    trained = sum(p.numel() for p in model.weights.values())
    activations = 4 * (one.samples.x[0].numel() + 4 + 3)  # of a step: normalised images, features, logits
    least = 4 * (4 * trained + activations) + one.samples.x.numel()
    found = blocks.client_bytes(method, model, one, phase)
    assert least <= found < 4 * least
    assert blocks.client_bytes(method, model, work(model.weights, 40), phase) > found
    more = create("fedavg", {"batch_size": 8}).schedule(1)[0]
    assert blocks.client_bytes(method, model, one, more) > found


@pytest.mark.parametrize(("clients", "expected"), [(0.5, 1), (1, 1), (3, 2), (5, 4), (8, 8), (1000, blocks.MOST)])
def test_a_block_fits_into_half_of_the_free_memory(clients: float, expected: int) -> None:
    model, method = linear(), create("fedavg", {"batch_size": 4})
    one, phases = work(model.weights, 10), method.schedule(1)
    needs = blocks.client_bytes(method, model, one, phases[0])
    assert blocks.fitting(method, model, one, phases, int(2 * clients * needs) + 1) == expected


def test_a_host_trains_blocks_of_that_size(tmp_path, monkeypatch) -> None:
    model = models.build("cnn", (3, 16, 16), 4, 0)
    case = Case(methods.create("fedavg", {"epochs": 1}), model, tiny_federation(tmp_path, (3,) * 8))
    seen, train = [], host.train

    def counted(method, model, block, *rest):
        seen.append(len(block))
        return train(method, model, block, *rest)

    monkeypatch.setattr(host, "train", counted)
    asked = []
    with case.clients(block=4) as (clients, there):
        needs = blocks.client_bytes(case.method, model, there.work(0, begun(case), 1), case.method.schedule(1)[0])
        monkeypatch.setattr(blocks, "free_bytes", lambda device: asked.append(device) or 2 * 4 * needs + 1)
        there.block = 0
        updates, _ = clients.train(dict.fromkeys(range(8), begun(case)), 1, score=False)
    assert len(updates) == 8
    assert seen == [4, 4]
    assert len(asked) == 1, "all blocks of a run have one size"


def test_a_request_has_as_many_clients_as_a_block_unless_their_answers_are_large(monkeypatch) -> None:
    monkeypatch.setattr(local, "_ANSWERS", 4000)
    asked = []

    def there(request, given):
        asked.append(len(request.clients))
        return Answer([TrainResult(client=to.client, n=1, passes=1) for to in request.clients], [])

    clients = local.LocalClients(dict.fromkeys(range(100), 1), [there], block=0)
    for values in (10, 100, 2000):
        down = {"w": torch.zeros(values)}
        clients.train(dict.fromkeys(range(100), down), 1, score=False)
    assert asked == [blocks.MOST, 36] + [10] * 10 + [8] * 12 + [4]


def test_on_a_cpu_auto_is_one_client(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    settings = {"dataset": {"name": "digits", "limit": 60, "size": 16}, "partition": {"name": "iid", "clients": 3}}
    config = C.make({**settings, "engine": {"block": "auto", "device": "cpu"}})
    assert build._block(build.assemble(config)) == 1


@pytest.mark.parametrize("block", [0, -1, "x", 1.5])
def test_other_blocks_are_refused(block: object) -> None:
    with pytest.raises(UserError, match=r"engine\.block = .* positive number of clients, or auto"):
        promptfed.run(engine={"block": block})
