"""Local training and evaluation: batches, blocks of unequal clients, optimisers, scores."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor, nn

from promptfed import client as client_module
from promptfed.client import Samples, Score, Trained, Work, batches, evaluate, train
from promptfed.method import Batch, Context, Method, Phase
from promptfed.methods import create
from promptfed.models import Model
from promptfed.models.cnn import cnn
from promptfed.models.vit import vit
from promptfed.params import Params
from promptfed.seeding import rng
from promptfed.wire import pack
from tiny import (
    BODY,
    CLASSES,
    CLIENT,
    HEAD,
    IMAGE,
    PLAIN,
    ROUND,
    SEED,
    arrays,
    cross_entropy,
    descend,
    gradients,
    linear,
    near,
    numbers,
    plan,
    same,
    samples,
    toy_host,
    work,
)

MODEL = linear()
WEIGHTS = (*BODY, *HEAD)
SIZES = (10, 3, 1, 7)


def run(method: Method, block: Sequence[Work], model: Model = MODEL, round: int = ROUND) -> list[Trained]:
    return train(method, model, block, method.schedule(round), SEED, round)


def block_of(method: Method, sizes: Sequence[int] = SIZES, model: Model = MODEL) -> list[Work]:
    """Clients that start from different weights, received different things and remember different things."""
    state = method.begin(model, method.tuning.init(model, SEED), 0)
    found = []
    for client, n in enumerate(sizes, start=1):
        init = near(method.tuning.init(model, SEED), client)
        down = near(method.down(state, client), 10 + client)
        data = samples(n, client, model.image, model.classes)
        found.append(
            Work(client, data, method.start(init, down, {}, {}), down, near(method.remembered(init), 20 + client))
        )
    return found


def agree(a: Trained, b: Trained, tolerance: float = 1e-5) -> None:
    assert a.params.keys() == b.params.keys()
    for name, p in a.params.items():
        torch.testing.assert_close(
            p, b.params[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-5)
    assert a.passes == b.passes


# ---- batches


def drawn(n: int, **phase: int) -> list[np.ndarray]:
    return list(batches(n, Phase({}, 4, **phase), rng(0)))


def test_an_epoch_visits_every_sample_once_and_ends_with_a_short_batch() -> None:
    found = drawn(10, epochs=3)
    assert [len(index) for index in found] == [4, 4, 2] * 3
    epochs = [np.concatenate(found[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(10))


@pytest.mark.parametrize(("n", "sizes"), [(8, [4, 4]), (3, [3]), (1, [1]), (5, [4, 1])])
def test_batches_of_one_epoch(n: int, sizes: list[int]) -> None:
    assert [len(index) for index in drawn(n, epochs=1)] == sizes


def test_steps_go_on_over_epochs_and_stop_exactly() -> None:
    found = drawn(10, steps=5)
    assert [len(index) for index in found] == [4, 4, 2, 4, 4]
    assert sorted(np.concatenate(found[:3]).tolist()) == list(range(10))
    assert len(set(np.concatenate(found[3:]).tolist())) == 8
    assert [len(index) for index in drawn(10, steps=1)] == [4]
    assert [len(index) for index in drawn(1, steps=6)] == [1] * 6


def test_nothing_is_drawn_without_samples_epochs_or_steps() -> None:
    assert drawn(0, epochs=3) == drawn(0, steps=3) == drawn(10, epochs=0) == []


@pytest.mark.parametrize("other", [(SEED + 1, ROUND, CLIENT), (SEED, ROUND + 1, CLIENT), (SEED, ROUND, CLIENT + 1)])
def test_batches_depend_on_seed_round_and_client(other: tuple[int, int, int]) -> None:
    method = create("fedavg", {"epochs": 1, "batch_size": 4, "lr": 0.2})

    def once(seed: int, round: int, client: int) -> Tensor:
        one = Work(client, samples(12), dict(MODEL.weights), {}, {})
        return train(method, MODEL, [one], method.phases(round), seed, round)[0].params["head.weight"]

    assert torch.equal(once(SEED, ROUND, CLIENT), once(SEED, ROUND, CLIENT))
    assert not torch.allclose(once(SEED, ROUND, CLIENT), once(*other), atol=1e-5)


def test_training_does_not_depend_on_the_global_random_state() -> None:
    method = create("pfedpt", {"prompt": "random-patch", "prompt_size": 2, "batch_size": 4})
    one = block_of(method)[0]
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = run(method, [one])[0]
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    again = run(method, [one])[0]
    assert all(torch.equal(p, again.params[name]) for name, p in first.params.items())


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


# ---- blocks

SMALL = {"batch_size": 4, "epochs": 2, "lr": 0.1}
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


# ---- what is reported


def test_the_loss_is_the_mean_over_the_samples_of_the_last_phase() -> None:
    """Each batch counts by its length, at the parameters it was met with."""
    method = create("fedrep", {"batch_size": 4, "epochs": 2, "head_epochs": 1, "lr": 0.1, "head_lr": 0.3})
    one = work(MODEL.weights, 10)
    x, y = arrays(one.samples)
    p = descend(numbers(MODEL.weights), one.samples, plan(10, 4, 1, number=0), dict.fromkeys(HEAD, 0.3))
    total = 0.0
    for index in plan(10, 4, 2, number=1):
        total += len(index) * cross_entropy(p, x[index], y[index])
        p = descend(p, one.samples, [index], dict.fromkeys(BODY, 0.1))
    done = run(method, [one])[0]
    assert done.loss == pytest.approx(total / 20, rel=1e-5)
    assert done.passes == 10 + 20


class Counting(Method):
    """Sends the number of samples and of labels it has met."""

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        weight = torch.ones(len(batch.y)) if batch.weight is None else batch.weight
        labels = (nn.functional.one_hot(batch.y, CLASSES) * weight[:, None]).sum(0)
        counts = {"samples": weight.sum(), "labels": labels, "steps": torch.ones(()), "n": ctx.n + 0.0 * weight.sum()}
        return super().loss(model, params, batch, ctx)[0], counts

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(("head",)), self.phase(("body",)))


@pytest.mark.parametrize("sizes", [(10,), (10, 3, 0, 5)])
def test_stats_are_summed_over_steps_and_phases_of_each_client_alone(sizes: tuple[int, ...]) -> None:
    method = Counting(epochs=2, batch_size=4)
    block = block_of(method, sizes)
    for one, done in zip(block, run(method, block), strict=True):
        n = len(one.samples)
        steps = 2 * 2 * -(-n // 4)
        if n:
            assert done.stats["samples"].item() == done.passes == 4 * n
            assert done.stats["labels"].tolist() == (4 * np.bincount(one.samples.y, minlength=CLASSES)).tolist()
            assert done.stats["steps"].item() == steps
            assert done.stats["n"].item() == n * steps
        else:
            assert all(not v.any() for v in done.stats.values())


class Noisy(Method):
    """Sends the noise of its batches, each phase under a name of its own."""

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        noise = {f"{ctx.phase.name} sum": batch.noise, f"{ctx.phase.name} squares": batch.noise.square()}
        return super().loss(model, params, batch, ctx)[0], noise

    def phases(self, round: int) -> tuple[Phase, ...]:
        return (self.phase(("head",), name="head"), self.phase(("body",), name="body"))


def test_every_batch_has_noise_of_its_own() -> None:
    """Drawn anew by client, round, phase and step: a random patch moves every batch."""
    method = Noisy(epochs=8, batch_size=4)
    block = block_of(method, (8, 8))
    found = run(method, block) + run(method, block, round=ROUND + 1)
    sums = [done.stats[f"{phase} sum"] for done in found for phase in ("head", "body")]
    squares = [done.stats[f"{phase} squares"] for done in found for phase in ("head", "body")]
    for total, square in zip(sums, squares, strict=True):
        variance = square / 16 - (total / 16) ** 2  # of a uniform number: 1/12
        assert ((total > 0) & (total < 16)).all()
        assert (variance > 0.02).all()
    values = torch.cat(sums)
    assert len(values.unique()) == len(values) == 16


class Curious(Method):
    """Looks at what it is told about the client."""

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        return super().loss(model, params, batch, ctx)[0] * ctx.n * ctx.label_counts[0] * ctx.down["scale"], {}


@pytest.mark.parametrize("k", [1, 2])
def test_a_loss_sees_the_numbers_of_its_own_client(k: int) -> None:
    block = []
    for client, n in enumerate((6, 9)[:k], start=1):
        block.append(Work(client, samples(n, client), dict(MODEL.weights), {"scale": torch.tensor(0.1 * client)}, {}))
    method = Curious(epochs=1, batch_size=100, lr=0.01)
    for one, done in zip(block, run(method, block), strict=True):
        x, y = arrays(one.samples)
        assert (y == 0).sum() > 0
        factor = 0.01 * len(y) * (y == 0).sum() * 0.1 * one.client
        g = gradients(numbers(MODEL.weights), x, y)
        same(done.params, {name: p - factor * g[name] for name, p in numbers(MODEL.weights).items()})


class Halved(Method):
    """Descends half the gradient."""

    def step(self, grad: Any, params: Params, phase: Phase) -> Params:
        return {name: g / 2 for name, g in grad(params).items()}


def test_a_method_may_take_steps_of_its_own() -> None:
    method = Halved(epochs=2, batch_size=4, lr=0.2)
    block = block_of(method, (10, 3))
    for one, done in zip(block, run(method, block), strict=True):
        steps = plan(len(one.samples), 4, 2, client=one.client)
        same(done.params, descend(numbers(one.params), one.samples, steps, dict.fromkeys(WEIGHTS, 0.1)))


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
    request = {"ask": "train", "clients": [0, 1], "blob": [0, 1], "round": 1, "score": False}
    note, blobs = host(request, [pack(broken), pack(MODEL.weights)])
    assert [("error" in one, one["n"]) for one in note["clients"]] == [(True, 4), (False, 5)]
    assert "non-finite" in note["clients"][0]["error"]
    assert blobs[0] == b""
    assert blobs[1]
    assert host.store.get(0, 2) == {}
    assert set(host.store.get(1, 2)) == {f"private/prompt.{side}" for side in ("top", "bottom", "left", "right")}
    host.store.close()


# ---- scores


def scored(n: int, seed: int = 0, classes: int = CLASSES) -> tuple[Score, np.ndarray, np.ndarray, float]:
    """A score, and the labels, predictions and summed loss that NumPy makes of the same model."""
    model = linear(seed, classes=classes)
    data = samples(n, seed, classes=classes)
    p, (x, y) = numbers(model.weights), arrays(data)
    logits = (x.reshape(n, -1) @ p["body.weight"].T + p["body.bias"]) @ p["head.weight"].T + p["head.bias"]
    loss = float((np.log(np.exp(logits).sum(1)) - logits[np.arange(n), y]).sum())
    one = Work(0, data, dict(model.weights), {}, {})
    return evaluate(create("fedavg"), model, one, dict(model.weights), data), y, logits.argmax(1), loss


@pytest.mark.parametrize(("n", "seed", "classes"), [(20, 0, 3), (12, 1, 8), (1, 2, 3), (5, 3, 8)])
def test_scores_agree_with_scikit_learn(n: int, seed: int, classes: int) -> None:
    """Also where classes occur among labels or predictions only, or in neither."""
    score, labels, predictions, loss = scored(n, seed, classes)
    assert score.n == n
    assert score.accuracy == pytest.approx(accuracy_score(labels, predictions))
    assert score.macro_f1 == pytest.approx(f1_score(labels, predictions, average="macro", zero_division=0))
    assert score.loss == pytest.approx(loss, rel=1e-5)


def test_scores_by_hand() -> None:
    """Labels 0 0 1 1 2, predictions 0 1 1 1 3: F1 of 2/3, 4/5, 0 and 0; class 4 occurs nowhere."""
    tp, fp, fn = np.array([1, 2, 0, 0, 0]), np.array([0, 1, 0, 1, 0]), np.array([1, 0, 1, 0, 0])
    score = Score(5, 2.5, tp, fp, fn)
    assert score.accuracy == pytest.approx(3 / 5)
    assert score.macro_f1 == pytest.approx((2 / 3 + 4 / 5 + 0 + 0) / 4)


def test_the_score_of_nothing_is_unknown() -> None:
    zero = np.zeros(3, np.int64)
    empty = Score(0, 0.0, zero, zero, zero)
    assert empty.accuracy is None
    assert empty.macro_f1 is None
    method = create("fedavg")
    none = samples(0)
    found = evaluate(method, MODEL, Work(0, none, dict(MODEL.weights), {}, {}), dict(MODEL.weights), none)
    assert (found.n, found.loss, found.accuracy) == (0, 0.0, None)


def test_scores_add_up_to_the_score_of_all_samples() -> None:
    (a, ya, pa, la), (b, yb, pb, lb) = scored(9, 0), scored(14, 1)
    labels, predictions = np.concatenate([ya, yb]), np.concatenate([pa, pb])
    both = a + b
    assert (both.n, both.loss) == (23, pytest.approx(la + lb, rel=1e-5))
    assert both.accuracy == pytest.approx(accuracy_score(labels, predictions))
    assert both.macro_f1 == pytest.approx(f1_score(labels, predictions, average="macro"))


def test_evaluation_in_chunks_counts_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, *_ = scored(20)
    monkeypatch.setattr(client_module, "CHUNK", 7)
    parts, *_ = scored(20)
    assert (parts.n, parts.tp.tolist(), parts.fp.tolist(), parts.fn.tolist()) == (
        whole.n,
        whole.tp.tolist(),
        whole.fp.tolist(),
        whole.fn.tolist(),
    )
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)


def test_moons_reference_features_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    method = create("moon", {**SMALL, "mu": 2.0})
    block = block_of(method, (10, 7))
    whole = run(method, block)
    monkeypatch.setattr(client_module, "CHUNK", 3)
    for a, b in zip(whole, run(method, block), strict=True):
        agree(a, b)


def test_images_are_normalised_channel_by_channel() -> None:
    x = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    data = Samples(
        x, torch.tensor([0]), torch.tensor([51.0, 102.0]).reshape(2, 1, 1), torch.tensor([51.0, 153.0]).reshape(2, 1, 1)
    )
    assert data.images(slice(None)).flatten().tolist() == [-1, 1]


# ---- batches as a loss sees them


def test_the_mean_of_a_batch_leaves_padding_out() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, 100.0])
    batch = Batch(values, values, torch.tensor([1.0, 1.0, 1.0, 0.0]), values, {})
    assert batch.mean(values).item() == 3
    assert batch._replace(weight=None).mean(values).item() == 27.25
    assert batch._replace(weight=torch.zeros(4)).mean(values).item() == 0


def test_halves_are_the_even_and_the_odd_samples() -> None:
    batch = Batch(
        torch.arange(5) * 10,
        torch.arange(5),
        torch.tensor([1.0, 1, 1, 1, 0]),
        torch.zeros(2),
        {"z": torch.arange(5) + 50},
    )
    for which, places in ((0, [0, 2, 4]), (1, [1, 3])):
        half = batch.half(which)  # type: ignore[arg-type]
        assert half.y.tolist() == places
        assert half.x.tolist() == [10 * i for i in places]
        assert half.extra["z"].tolist() == [50 + i for i in places]
        assert half.weight.tolist() == [0.0 if i == 4 else 1.0 for i in places]
    assert batch._replace(weight=None).half(1).weight is None


def test_a_lone_sample_is_both_halves_of_a_padded_batch() -> None:
    batch = Batch(
        torch.arange(5), torch.arange(5), torch.tensor([1.0, 0, 0, 0, 0]), torch.zeros(2), {"z": torch.arange(5)}
    )
    for which in (0, 1):
        half = batch.half(which)  # type: ignore[arg-type]
        for values in (half.x, half.y, half.extra["z"]):
            assert half.mean(values + 10.0).item() == 10
        assert half.weight.sum().item() == 1
