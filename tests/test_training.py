"""Local training: optimisers, blocks of unequal clients, losses that are not finite."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client_blocks import MODEL, SMALL, WEIGHTS, agree, block_of, run
from promptfed import training as client_module
from promptfed.clients.messages import Recipient, Request, Train, TrainResult
from promptfed.clients.wire import pack
from promptfed.methods import create
from promptfed.models import Model
from promptfed.models.cnn import cnn
from promptfed.models.vit import vit
from promptfed.optimizers import Sgd
from promptfed.params import Params
from promptfed.phases import Optimizer, Phase
from promptfed.training import Samples, train
from tiny import BODY, CLASSES, HEAD, IMAGE, PLAIN, ROUND, SEED, arrays, descend, numbers, plan, same, toy_host, work

# ---- optimisers, against torch.optim on nn.Linear


def pytorch(params: Params, data: Samples, steps: Sequence[np.ndarray], make: Any) -> Params:
    body, head = nn.Linear(math.prod(IMAGE), 4), nn.Linear(4, CLASSES)
    named = {"body.weight": body.weight, "body.bias": body.bias, "head.weight": head.weight, "head.bias": head.bias}
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(params[name])
    optimizer = make([*body.parameters(), *head.parameters()])
    x, y = arrays(data)
    for index in steps:
        optimizer.zero_grad()
        out = head(body(torch.from_numpy(x[index]).float().flatten(1)))
        nn.CrossEntropyLoss()(out, torch.from_numpy(y[index])).backward()
        optimizer.step()
    return {name: p.detach() for name, p in named.items()}


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    ),
    "adam": ({"lr": 0.03, "weight_decay": 0.05}, lambda p: torch.optim.Adam(p, lr=0.03, weight_decay=0.05)),
    "adamw": ({"lr": 0.03, "weight_decay": 0.5}, lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.5)),
}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_one_client_equals_a_plain_pytorch_loop(kind: str) -> None:
    own, make = OPTIMIZERS[kind]
    method = create("fedavg", {"optimizer": kind, "batch_size": 4, "epochs": 2, **own})
    one = work(MODEL.weights, 10)
    same(run(method, [one])[0].params, numbers(pytorch(MODEL.weights, one.samples, plan(10, 4, 2), make)))


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_stacked_clients_of_unequal_sizes_equal_plain_pytorch_loops(kind: str) -> None:
    """Clients that are done stand still, whatever momentum, moments or decay would do to them."""
    own, make = OPTIMIZERS[kind]
    method = create("fedavg", {"optimizer": kind, "batch_size": 4, "epochs": 2, **own})
    block = block_of(method)
    for one, done in zip(block, run(method, block), strict=True):
        steps = plan(len(one.samples), 4, 2, client=one.client)
        same(done.params, numbers(pytorch(one.params, one.samples, steps, make)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_our_sgd_is_that_of_torch_to_the_last_bit(momentum: float, decay: float) -> None:
    g = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(7, 5, generator=g), "b": torch.randn(3, generator=g)}
    ours, theirs = ({n: p.clone().requires_grad_() for n, p in start.items()} for _ in range(2))
    own = Sgd(Optimizer(lr=0.3, momentum=momentum, weight_decay=decay), ours)
    peer = torch.optim.SGD(theirs.values(), 0.3, momentum, weight_decay=decay)
    for _ in range(5):
        for name in start:
            ours[name].grad = theirs[name].grad = torch.randn(start[name].shape, generator=g)
        own.step()
        peer.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in start)
    assert not torch.equal(ours["a"], start["a"])


# ---- blocks

CASES = [(name, {}) for name in PLAIN] + [
    ("perfedavg", {"order": "second"}),
    ("pfedpt", {"prompt_size": 1}),
    ("pfedpt", {"prompt_size": 2, "prompt": "fixed-patch", "joint": True}),
    ("pfedpt", {"prompt_size": 2, "prompt": "random-patch"}),
    ("moon+pt", {"prompt_size": 1}),
    ("fedrep+pt", {"prompt_size": 1, "prompt_momentum": 0.5}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_block_of_unequal_clients_equals_one_by_one(name: str, settings: dict[str, Any]) -> None:
    own = {"iterations": 20} if name == "fedmtl" else {}
    method = create(name, {**SMALL, **own, **settings})
    block = block_of(method)
    for one, together in zip(block, run(method, block), strict=True):
        agree(run(method, [one])[0], together)


@pytest.mark.parametrize("order", ["first", "second"])
def test_a_lone_sample_in_a_block_takes_perfedavgs_steps_as_it_does_alone(order: str) -> None:
    method = create("perfedavg", {**SMALL, "alpha": 0.3, "order": order})
    block = block_of(method, (8, 1, 5))  # 5 samples are a batch of 4 and one of 1
    for one, together in zip(block, run(method, block), strict=True):
        agree(run(method, [one])[0], together)


@pytest.mark.parametrize(
    "model", [cnn((1, 16, 16), 3, 0, filters=(2, 3), hidden=(5,)), vit((1, 8, 8), 3, 0, width=8, depth=1, heads=2)]
)
def test_a_block_on_a_backbone_equals_one_by_one(model: Model) -> None:
    name = "pfedpt" if model.width is None else "pfedpt-tokens"
    method = create(name, {**SMALL, "prompt_epochs": 1, "epochs": 1, "prompt_lr": 0.1})
    block = block_of(method, (6, 1, 3), model)
    for one, together in zip(block, run(method, block, model), strict=True):
        agree(run(method, [one], model)[0], together)


def test_the_order_of_a_block_does_not_matter() -> None:
    method = create("pfedpt", {**SMALL, "prompt": "random-patch", "prompt_size": 2})
    block = block_of(method)
    forwards, backwards = run(method, block), run(method, block[::-1])
    for a, b in zip(forwards, backwards[::-1], strict=True):
        agree(a, b, 1e-6)


def test_a_client_with_one_sample_is_trained_on_it() -> None:
    method = create("fedavg", {**SMALL, "epochs": 3})
    one = work(MODEL.weights, 1)
    done = run(method, [one])[0]
    same(done.params, descend(numbers(MODEL.weights), one.samples, [np.array([0])] * 3, dict.fromkeys(WEIGHTS, 0.1)))
    assert done.passes == 3


@pytest.mark.parametrize("name", [*PLAIN, "pfedpt", "moon+pt"])
def test_a_client_without_samples_stands_still(name: str) -> None:
    own = {"prompt_size": 1} if "pt" in name else {"iterations": 20} if name == "fedmtl" else {}
    method = create(name, {**SMALL, **own})
    block = block_of(method, (0, 6, 0))
    alone, together = run(method, [block[0]])[0], run(method, block)
    for one, done in ((block[0], alone), (block[0], together[0]), (block[2], together[2])):
        assert all(torch.equal(p, one.params[n]) for n, p in done.params.items())
        assert (done.passes, done.loss, done.stats) == (0, 0.0, {})
    agree(run(method, [block[1]])[0], together[1])
    assert together[1].passes > 0
    for done in run(method, [block[0], block[2]]):
        assert done.passes == 0


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("role", "moving"), [("head", HEAD), ("body", BODY)])
def test_nothing_outside_of_a_phase_moves(role: str, moving: tuple[str, ...], k: int) -> None:
    method = create("fedavg", {"momentum": 0.5, "weight_decay": 0.5})
    block = block_of(method, (9, 5)[:k])
    before = [{name: p.clone() for name, p in one.params.items()} for one in block]
    phase = Phase({role: method.sgd(0.1)}, 4, epochs=1)
    for old, done in zip(before, train(method, MODEL, block, [phase], SEED, ROUND), strict=True):
        assert {name for name, p in done.params.items() if not torch.equal(p, old[name])} == set(moving)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["fedprox+pt", "moon+pt", "fedrep+pt", "fedmtl"])
def test_what_goes_into_training_is_left_alone(name: str, k: int) -> None:
    """Received and remembered values are shared between clients, and the model's own weights between all."""
    method = create(name, {**SMALL, **({"prompt_size": 1} if "pt" in name else {"iterations": 20})})
    block = block_of(method, (6, 3, 1)[:k])
    own = {name: p.clone() for name, p in MODEL.weights.items()}
    before = [[{n: p.clone() for n, p in part.items()} for part in (w.params, w.down, w.memory)] for w in block]
    run(method, block)
    for one, parts in zip(block, before, strict=True):
        for now, old in zip((one.params, one.down, one.memory), parts, strict=True):
            assert all(torch.equal(p, old[n]) and not p.requires_grad for n, p in now.items())
    assert all(torch.equal(p, MODEL.weights[name]) for name, p in own.items())


def test_trained_parameters_keep_their_order_and_carry_no_gradient() -> None:
    method = create("fedrep+pt", {**SMALL, "prompt_size": 1})
    for k in (1, 2):
        for one, done in zip(block_of(method)[:k], run(method, block_of(method)[:k]), strict=True):
            assert list(done.params) == list(one.params)
            assert not any(p.requires_grad for p in done.params.values())


def test_moons_reference_features_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    method = create("moon", {**SMALL, "mu": 2.0})
    block = block_of(method, (10, 7))
    whole = run(method, block)
    monkeypatch.setattr(client_module, "CHUNK", 3)
    for a, b in zip(whole, run(method, block), strict=True):
        agree(a, b)


# ---- loss that is not finite


@pytest.mark.parametrize("k", [1, 3])
def test_a_loss_that_is_not_finite_is_reported_and_harms_nobody_else(k: int) -> None:
    method = create("fedavg", SMALL)
    block = block_of(method, (6, 5, 3)[:k])
    block[0].params["body.weight"] = torch.full_like(block[0].params["body.weight"], float("inf"))
    found = run(method, block)
    assert not math.isfinite(found[0].loss)
    for one, done in zip(block[1:], found[1:], strict=True):
        agree(run(method, [one])[0], done)


def test_of_a_client_that_diverged_nothing_is_sent_or_remembered(tmp_path: Path) -> None:
    method = create("pfedpt", {**SMALL, "prompt_size": 1})
    host = toy_host(method, tmp_path, (4, 5), block=2)
    broken = {name: p * float("nan") for name, p in MODEL.weights.items()}
    clients = [Recipient(client=client, blob=client) for client in (0, 1)]
    request = Request(task=Train(round=1, score=False), clients=clients)
    answer = host(request, [pack(broken), pack(MODEL.weights)])
    first, second = answer.results
    assert isinstance(first, TrainResult)
    assert isinstance(second, TrainResult)
    assert (bool(first.error), first.n, bool(second.error), second.n) == (True, 4, False, 5)
    assert "non-finite" in first.error
    assert answer.blobs[0] == b""
    assert answer.blobs[1]
    assert host.store.get(0, 2) == {}
    assert set(host.store.get(1, 2)) == {f"private/prompt.{side}" for side in ("top", "bottom", "left", "right")}
    host.store.close()
