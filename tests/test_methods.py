"""Every method's local round and server rule against NumPy versions written from the papers' equations.

tiny.py holds the network's gradients; what a method adds to them stands here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from promptfed import methods
from promptfed.client import Trained, Work, train
from promptfed.errors import UserError
from promptfed.host import read_message
from promptfed.method import Batch, Context, FedAvg, Method, Phase, Update
from promptfed.methods import ALIASES, METHODS, create, settings
from promptfed.params import Params
from promptfed.tuning import Full, Optimizer, Tuning
from promptfed.wire import pack, unpack
from tiny import (
    BODY,
    CLASSES,
    HEAD,
    IMAGE,
    PLAIN,
    ROUND,
    SEED,
    Numbers,
    arrays,
    cross_entropy,
    descend,
    distance,
    features,
    gradients,
    linear,
    near,
    numbers,
    plan,
    same,
    samples,
    softmax,
    toy_host,
    work,
)

MODEL = linear()
N, B = 10, 4  # two whole batches and a short one
LR = 0.1
WEIGHTS = (*BODY, *HEAD)
SIDES = tuple(f"prompt.{side}" for side in ("top", "bottom", "left", "right"))
COMMON = {"lr": LR, "batch_size": B, "epochs": 2}


def at(lr: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, lr)


def initial(method: Method) -> Params:
    return method.tuning.init(MODEL, SEED)


def local_round(method: Method, one: Work) -> Trained:
    return train(method, MODEL, [one], method.schedule(ROUND), SEED, ROUND)[0]


def whole(n: int = 6, client: int = 1) -> Batch:
    data = samples(n, client)
    return Batch(data.images(slice(None)), data.y, None, torch.tensor([0.5, 0.5]), {})


def context(method: Method, down: Params | None = None, memory: Params | None = None) -> Context:
    return Context(down or {}, memory or {}, method.phases(1)[-1], torch.tensor(6), torch.ones(CLASSES))


# ---- FedAvg


def test_fedavg_descends_the_mean_cross_entropy_on_all_weights() -> None:
    method = create("fedavg", COMMON)
    one = work(MODEL.weights, N)
    expected = descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS))
    same(local_round(method, one).params, expected)
    assert distance(expected, numbers(MODEL.weights)) > 0.05


def test_fedavg_passes_momentum_and_weight_decay_on() -> None:
    method = create("fedavg", {**COMMON, "momentum": 0.6, "weight_decay": 0.3})

    def decayed(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        return {name: g + 0.3 * p[name] for name, g in gradients(p, x, y).items() if name != "x"}

    one = work(MODEL.weights, N)
    expected = descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS), decayed, momentum=0.6)
    same(local_round(method, one).params, expected)


def test_fedavg_weights_clients_by_their_samples() -> None:
    ups = [near(MODEL.weights, seed) for seed in range(3)]
    updates = [Update(i, {}, up, n) for i, (up, n) in enumerate(zip(ups, (1, 6, 13), strict=True))]
    state = create("fedavg").aggregate(dict(MODEL.weights), updates)
    expected = {
        name: np.average([up[name].numpy() for up in ups], axis=0, weights=[1, 6, 13]) for name in MODEL.weights
    }
    same(state, expected)
    assert distance(expected, {name: np.mean([up[name].numpy() for up in ups], axis=0) for name in ups[0]}) > 0.01


def test_aggregation_keeps_what_nobody_sent() -> None:
    state = create("fedavg").aggregate(
        {"body.x": torch.zeros(1), "kept": torch.ones(1)}, [Update(0, {}, {"body.x": torch.ones(1)}, 3)]
    )
    assert {name: p.item() for name, p in state.items()} == {"body.x": 1, "kept": 1}


def test_every_client_receives_the_global_model() -> None:
    method = create("fedavg")
    state = method.begin(MODEL, initial(method), 0)
    assert state.keys() == MODEL.weights.keys()
    assert all(
        torch.equal(method.down(state, client)[name], p) for client in (0, 9) for name, p in MODEL.weights.items()
    )


def test_delta_is_what_a_client_changed() -> None:
    update = Update(0, {"w": torch.tensor([1.0, 2.0]), "unchanged": torch.ones(1)}, {"w": torch.tensor([1.5, 0.0])}, 1)
    assert {name: p.tolist() for name, p in update.delta.items()} == {"w": [0.5, -2]}


# ---- FedProx, Eq. 2


def proximal(mu: float, center: Numbers) -> Any:
    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {**g, **{name: g[name] + mu * (p[name] - center[name]) for name in center}}

    return gradient


def test_fedprox_is_held_near_what_it_received() -> None:
    method = create("fedprox", {**COMMON, "mu": 3.0})
    one = work(MODEL.weights, N, down=MODEL.weights)
    start = numbers(MODEL.weights)
    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), proximal(3.0, start))
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS))) > 0.02


def test_fedprox_adds_half_mu_times_the_squared_distance() -> None:
    method = create("fedprox", {"mu": 0.5})
    p, down = dict(MODEL.weights), near(MODEL.weights, 1)
    data = samples(6, 1)
    squared = sum(float(((p[name] - down[name]).double() ** 2).sum()) for name in p)
    expected = cross_entropy(numbers(p), *arrays(data)) + 0.5 / 2 * squared
    loss, _ = method.loss(MODEL, p, whole(), context(method, down))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert squared > 0.5


# ---- MOON, Eq. 3


def contrastive(mu: float, temperature: float, received: Numbers, previous: Numbers) -> Any:
    """l = -log(exp(cos(z, z_r)/t) / (exp(cos(z, z_r)/t) + exp(cos(z, z_p)/t))), differentiated by hand in z."""

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        z = features(p, x)
        length = np.linalg.norm(z, axis=1, keepdims=True)
        cosines, slopes = [], []
        for model in (received, previous):
            u = features(model, x)
            u = u / np.linalg.norm(u, axis=1, keepdims=True)
            cosine = (z * u).sum(1, keepdims=True) / length
            cosines.append(cosine)
            slopes.append(u / length - cosine * z / length**2)
        share = softmax(np.concatenate(cosines, 1) / temperature)
        in_z = ((share[:, :1] - 1) * slopes[0] + share[:, 1:] * slopes[1]) / temperature
        return gradients(p, x, y, more=mu * in_z / len(y))

    return gradient


def test_moon_draws_features_to_the_received_model_and_away_from_the_previous_one() -> None:
    method = create("moon", {**COMMON, "mu": 2.0, "temperature": 0.4})
    memory = {name: p for name, p in near(MODEL.weights, 4, scale=0.5).items() if name in BODY}
    one = work(MODEL.weights, N, down=MODEL.weights, memory=memory)
    start, previous = numbers(MODEL.weights), {**numbers(MODEL.weights), **numbers(memory)}
    lr = at(LR, *WEIGHTS)
    expected = descend(start, one.samples, plan(N, B, 2), lr, contrastive(2.0, 0.4, start, previous))
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), lr)) > 0.02
    # Received and previous model are not interchangeable.
    swapped = descend(start, one.samples, plan(N, B, 2), lr, contrastive(2.0, 0.4, previous, start))
    assert distance(expected, swapped) > 0.02


@pytest.mark.parametrize("memory", [{}, {name: MODEL.weights[name] for name in BODY}])
def test_moon_in_the_first_round_has_no_previous_model_and_trains_as_fedavg(memory: Params) -> None:
    """The received model stands on both sides: the term is log 2 and has no slope."""
    method = create("moon", {**COMMON, "mu": 3.0, "epochs": 1})
    one = work(MODEL.weights, N, down=MODEL.weights, memory=memory)
    done = local_round(method, one)
    start = numbers(MODEL.weights)
    same(done.params, descend(start, one.samples, plan(N, B, 1), at(LR, *WEIGHTS)))
    x, y = arrays(one.samples)
    plain, p = 0.0, start
    for index in plan(N, B, 1):
        plain += cross_entropy(p, x[index], y[index]) * len(index)
        p = descend(p, one.samples, [index], at(LR, *WEIGHTS))
    assert done.loss == pytest.approx(plain / N + 3 * np.log(2), rel=1e-5)


def test_moons_loss_by_hand() -> None:
    """Features at right angles to the previous model's and along the received one's."""
    method = create("moon", {"mu": 2.0, "temperature": 0.5})
    batch = whole(2)
    p = dict(MODEL.weights)
    z = torch.from_numpy(features(numbers(p), arrays(samples(2, 1))[0])).float()
    other = torch.stack([z[:, 1], -z[:, 0], z[:, 3], -z[:, 2]], 1)
    batch = batch._replace(extra={"received": 5 * z, "previous": other})
    loss, _ = method.loss(MODEL, p, batch, context(method))
    term = -np.log(np.exp(1 / 0.5) / (np.exp(1 / 0.5) + np.exp(0)))
    assert loss.item() == pytest.approx(cross_entropy(numbers(p), *arrays(samples(2, 1))) + 2 * term, rel=1e-5)


def test_moons_reference_features_are_those_of_the_received_and_the_remembered_body() -> None:
    method = create("moon")
    now, down, memory = (near(MODEL.weights, seed) for seed in (1, 2, 3))
    memory = {name: memory[name] for name in BODY}
    found = method.prepare(MODEL, now, whole(), context(method, down, memory))
    x, _ = arrays(samples(6, 1))
    same(found, {"received": features(numbers(down), x), "previous": features(numbers(memory), x)})


def test_moon_remembers_the_body_it_trained_last(tmp_path: Path) -> None:
    method = create("moon", {**COMMON, "epochs": 1})
    host = toy_host(method, tmp_path)
    first = host.work(0, dict(MODEL.weights), 1)
    same(first.memory, {name: p for name, p in numbers(MODEL.weights).items() if name in BODY})
    _, blobs = host.train([first], 1, score=False)
    sent, _ = read_message(blobs[0])
    assert sent.keys() == set(WEIGHTS)
    down = near(MODEL.weights, 8)
    second = host.work(0, down, 2)
    same(second.memory, {name: p for name, p in numbers(sent).items() if name in BODY}, 0)
    same(second.params, numbers(down), 0)
    # Trained again, round 1 starts from what was known before it; the other client knows nothing of this one.
    for again in (host.work(0, down, 1), host.work(1, down, 2)):
        same(again.memory, {name: p for name, p in numbers(down).items() if name in BODY}, 0)
    host.store.close()


# ---- Per-FedAvg, Eq. 3-5


def test_first_order_perfedavg_takes_the_gradient_behind_an_inner_step() -> None:
    method = create("perfedavg", {**COMMON, "alpha": 0.5})

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x[0::2], y[0::2])
        return gradients({name: v - 0.5 * g[name] for name, v in p.items()}, x[1::2], y[1::2])

    one = work(MODEL.weights, N)
    start = numbers(MODEL.weights)
    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), meta)
    same(local_round(method, one).params, expected)
    assert distance(expected, descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS))) > 0.02


def torch_loss(p: dict[str, torch.Tensor], x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    f = torch.from_numpy(x.reshape(len(x), -1)) @ p["body.weight"].T + p["body.bias"]
    return torch.nn.functional.cross_entropy(f @ p["head.weight"].T + p["head.bias"], torch.from_numpy(y))


def test_second_order_perfedavg_differentiates_through_the_inner_step() -> None:
    alpha = 0.5

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        w = {name: torch.from_numpy(v).requires_grad_() for name, v in p.items()}
        inner = torch.autograd.grad(torch_loss(w, x[0::2], y[0::2]), list(w.values()), create_graph=True)
        stepped = {name: v - alpha * g for (name, v), g in zip(w.items(), inner, strict=True)}
        outer = torch.autograd.grad(torch_loss(stepped, x[1::2], y[1::2]), list(w.values()))
        return {name: g.numpy() for name, g in zip(w, outer, strict=True)}

    one = work(MODEL.weights, N)
    start = numbers(MODEL.weights)
    expected = descend(start, one.samples, plan(N, B, 2), at(LR, *WEIGHTS), meta)
    second = local_round(create("perfedavg", {**COMMON, "alpha": alpha, "order": "second"}), one)
    same(second.params, expected)
    first = local_round(create("perfedavg", {**COMMON, "alpha": alpha}), one)
    assert distance(expected, numbers(first.params)) > 0.01


def test_perfedavgs_second_order_gradient_agrees_with_finite_differences() -> None:
    """Of F(w) = f(w - a grad f(w)) in float64: no automatic differentiation on the other side."""
    method = create("perfedavg", {"alpha": 0.5, "order": "second"})
    x, y = arrays(samples(6, 1))

    def value(p: Numbers) -> float:
        g = gradients(p, x[0::2], y[0::2])
        return cross_entropy({name: v - 0.5 * g[name] for name, v in p.items()}, x[1::2], y[1::2])

    start = numbers(MODEL.weights)
    params = {name: p.clone().requires_grad_() for name, p in MODEL.weights.items()}
    loss, _ = method.loss(MODEL, params, whole(), context(method))
    assert loss.item() == pytest.approx(value(start), rel=1e-5)
    loss.backward()
    for name, place in (("head.bias", (1,)), ("head.weight", (2, 3)), ("body.bias", (0,)), ("body.weight", (1, 7))):
        sides = []
        for step in (1e-5, -1e-5):
            moved = start[name].copy()
            moved[place] += step
            sides.append(value({**start, name: moved}))
        assert params[name].grad[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-3, abs=1e-5)


def test_perfedavg_uses_a_lone_sample_for_both_steps() -> None:
    method = create("perfedavg", {**COMMON, "epochs": 1, "alpha": 0.5})

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return gradients({name: v - 0.5 * g[name] for name, v in p.items()}, x, y)

    one = work(MODEL.weights, 1)
    expected = descend(numbers(MODEL.weights), one.samples, [np.array([0])], at(LR, *WEIGHTS), meta)
    same(local_round(method, one).params, expected)


@pytest.mark.parametrize("order", ["first", "second"])
def test_perfedavg_adapts_by_plain_steps_at_alpha(order: str) -> None:
    method = create("perfedavg", {**COMMON, "alpha": 0.3, "adapt_steps": 2, "order": order})
    one = work(MODEL.weights, N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 1)[:2], at(0.3, *WEIGHTS)))
    assert done.passes == 2 * B


# ---- FedPer, FedRep, FedBABU: a body that is shared


def test_fedper_trains_body_and_head_together_and_sends_the_body() -> None:
    method = create("fedper", COMMON)
    one = work(MODEL.weights, N)
    done = local_round(method, one)
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS)))
    assert method.shared(done.params).keys() == set(BODY)


def test_fedrep_trains_the_head_then_the_body() -> None:
    """Algorithm 1; the second phase sees the new head, and each phase draws batches of its own."""
    method = create("fedrep", {**COMMON, "epochs": 1, "head_epochs": 2, "head_lr": 0.3})
    one = work(MODEL.weights, N)
    start = numbers(MODEL.weights)
    after_head = descend(start, one.samples, plan(N, B, 2, number=0), at(0.3, *HEAD))
    expected = descend(after_head, one.samples, plan(N, B, 1, number=1), at(LR, *BODY))
    same(local_round(method, one).params, expected)
    other_way = descend(start, one.samples, plan(N, B, 1, number=1), at(LR, *BODY))
    assert distance({n: expected[n] for n in BODY}, {n: other_way[n] for n in BODY}) > 0.01


@pytest.mark.parametrize(("epochs", "head_epochs", "still"), [(0, 2, BODY), (2, 0, HEAD)])
def test_each_of_fedreps_phases_moves_its_own_part_only(epochs: int, head_epochs: int, still: Sequence[str]) -> None:
    method = create("fedrep", {**COMMON, "epochs": epochs, "head_epochs": head_epochs})
    done = local_round(method, work(MODEL.weights, N))
    assert {name for name, p in done.params.items() if torch.equal(p, MODEL.weights[name])} == set(still)


def test_fedbabus_head_never_moves_in_training() -> None:
    method = create("fedbabu", COMMON)
    one = work(MODEL.weights, N)
    done = local_round(method, one)
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *BODY)))
    assert all(torch.equal(done.params[name], MODEL.weights[name]) for name in HEAD)


def test_fedbabu_adapts_body_and_head_for_some_steps() -> None:
    method = create("fedbabu", {**COMMON, "finetune_steps": 4})
    one = work(MODEL.weights, N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 2)[:4], at(LR, *WEIGHTS)))


def test_fedbabu_adapts_for_epochs_where_they_are_given() -> None:
    method = create("fedbabu+ft", {**COMMON, "finetune_epochs": 2})
    one = work(MODEL.weights, N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS)))
    assert create("fedbabu", {"finetune_steps": 0}).adapt() == ()


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_a_shared_body_is_averaged_by_samples_without_the_heads(name: str) -> None:
    method = create(name)
    state = method.begin(MODEL, initial(method), 0)
    assert state.keys() == set(BODY)
    ups = [{n: p for n, p in near(MODEL.weights, seed).items() if n in BODY} for seed in (1, 2)]
    state = method.aggregate(state, [Update(0, {}, ups[0], 1), Update(1, {}, ups[1], 3)])
    same(state, {n: (ups[0][n].double().numpy() + 3 * ups[1][n].double().numpy()) / 4 for n in BODY})


def test_a_client_starts_from_what_it_received_and_kept() -> None:
    method = create("fedper")
    init, down, kept = dict(MODEL.weights), near(MODEL.weights, 1), near(MODEL.weights, 2)
    body, head = {n: down[n] for n in BODY}, {n: kept[n] for n in HEAD}
    same(method.start(init, body, head, {}), {**numbers(body), **numbers(head)}, 0)
    # A newcomer has kept nothing yet, and all newcomers start with the same head.
    first = method.start(init, body, {}, {})
    same(first, {**numbers(body), **{n: numbers(init)[n] for n in HEAD}}, 0)
    assert list(first) == list(init)


# ---- FedMTL, Eq. 1


def mtl_down(own: Params, mean: Params) -> Params:
    return {**own, **{f"mean.{name}": p for name, p in mean.items()}}


def test_fedmtl_descends_cross_entropy_with_relation_and_ridge() -> None:
    method = create("fedmtl", {**COMMON, "iterations": 21, "relation": 1.5, "ridge": 0.4})
    mean = near(MODEL.weights, 6)
    center = numbers(mean)

    def gradient(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradients(p, x, y)
        return {name: g[name] + 2 * 1.5 * (v - center[name]) + 2 * 0.4 * v for name, v in p.items()}

    one = work(MODEL.weights, N, down=mtl_down(MODEL.weights, mean))
    steps = plan(N, B, 2)
    assert len(steps) == 6  # 21 sample visits are ceil(21 / 4) = 6 steps
    expected = descend(numbers(MODEL.weights), one.samples, steps, at(LR, *WEIGHTS), gradient)
    same(local_round(method, one).params, expected)


def test_fedmtls_loss_by_hand() -> None:
    method = create("fedmtl", {"relation": 0.5, "ridge": 0.25})
    p, mean = dict(MODEL.weights), near(MODEL.weights, 6)
    loss, _ = method.loss(MODEL, p, whole(), context(method, mtl_down(p, mean)))
    far = sum(float(((p[n] - mean[n]).double() ** 2).sum()) for n in p)
    norm = sum(float((p[n].double() ** 2).sum()) for n in p)
    expected = cross_entropy(numbers(p), *arrays(samples(6, 1))) + 0.5 * far + 0.25 * norm
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def one_number(value: float) -> Params:
    return {"body.w": torch.tensor([value])}


def test_fedmtls_server_keeps_all_models_and_their_plain_mean() -> None:
    method = create("fedmtl")
    state = method.begin(MODEL, one_number(9.0), 0)
    # An unseen client receives the mean as its model.
    assert {n: p.item() for n, p in method.down(state, 3).items()} == {"body.w": 9, "mean.body.w": 9}
    # Numbers of samples do not weight the mean of the models.
    state = method.aggregate(state, [Update(3, {}, one_number(1.0), 100), Update(12, {}, one_number(5.0), 1)])
    assert {n: p.item() for n, p in method.down(state, 3).items()} == {"body.w": 1, "mean.body.w": 3}
    assert {n: p.item() for n, p in method.down(state, 12).items()} == {"body.w": 5, "mean.body.w": 3}
    # Client 1 is not a prefix of client 12.
    assert {n: p.item() for n, p in method.down(state, 1).items()} == {"body.w": 3, "mean.body.w": 3}
    # Whoever does not take part keeps its model, and counts in the mean.
    state = method.aggregate(state, [Update(1, {}, one_number(6.0), 7), Update(3, {}, one_number(4.0), 7)])
    own = [method.down(state, client)["body.w"].item() for client in (1, 3, 12)]
    assert own == [6, 4, 5]
    assert method.down(state, 99)["mean.body.w"].item() == 5


def test_what_fedmtl_sends_to_an_unseen_client_can_be_packed() -> None:
    method = create("fedmtl")
    state = method.begin(MODEL, initial(method), 0)
    found, _ = unpack(pack(method.down(state, 0)))
    assert found.keys() == {*WEIGHTS, *(f"mean.{name}" for name in WEIGHTS)}


# ---- Local


def test_local_trains_alone_and_nothing_travels() -> None:
    method = create("local", COMMON)
    one = work(MODEL.weights, N)
    done = local_round(method, one)
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS)))
    assert method.shared(done.params) == {}
    state = method.begin(MODEL, initial(method), 0)
    assert state == {}
    assert method.aggregate(state, [Update(0, {}, {}, 3)]) == {}
    same(method.start(initial(method), method.down(state, 0), done.params, {}), numbers(done.params), 0)


# ---- pFedPT, Eq. 5 and 6

SIZE = 1
PROMPT = {"prompt_size": SIZE, "prompt_lr": 0.8, "prompt_epochs": 2}


def frame(p: Numbers) -> np.ndarray:
    canvas = np.zeros(IMAGE)
    canvas[:, :SIZE], canvas[:, -SIZE:] = p["prompt.top"], p["prompt.bottom"]
    canvas[:, SIZE:-SIZE, :SIZE], canvas[:, SIZE:-SIZE, -SIZE:] = p["prompt.left"], p["prompt.right"]
    return canvas


def in_prompt(g: np.ndarray) -> Numbers:
    """The gradient in the sides of the frame, from the gradient (B, C, H, W) in the input."""
    g = g.sum(0)
    middle = g[:, SIZE:-SIZE]
    return dict(zip(SIDES, (g[:, :SIZE], g[:, -SIZE:], middle[:, :, :SIZE], middle[:, :, -SIZE:]), strict=True))


def prompted(gradient: Any = gradients) -> Any:
    """The gradient of a loss on x + d_i."""

    def wrapped(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = gradient(p, x + frame(p), y)
        return {**g, **in_prompt(g["x"])}

    return wrapped


def test_pfedpt_trains_the_prompt_and_then_the_weights_on_the_new_prompt() -> None:
    """Eq. 5, then Eq. 6."""
    method = create("pfedpt", {**COMMON, **PROMPT, "epochs": 1})
    init = initial(method)
    one = work(init, N)
    start = numbers(init)
    eq5 = descend(start, one.samples, plan(N, B, 2, number=0), at(0.8, *SIDES), prompted())
    eq6 = descend(eq5, one.samples, plan(N, B, 1, number=1), at(LR, *WEIGHTS), prompted())
    done = local_round(method, one)
    same(done.params, eq6)
    assert done.passes == N * (2 + 1)
    old_prompt = descend(start, one.samples, plan(N, B, 1, number=1), at(LR, *WEIGHTS), prompted())
    assert distance({n: eq6[n] for n in WEIGHTS}, {n: old_prompt[n] for n in WEIGHTS}) > 0.01


def test_eq_5_moves_the_prompt_only_and_eq_6_the_weights_only() -> None:
    only_prompt = create("pfedpt", {**COMMON, **PROMPT, "epochs": 0})
    init = initial(only_prompt)
    one = work(init, N)
    moved = local_round(only_prompt, one).params
    assert {n for n in init if not torch.equal(init[n], moved[n])} == set(SIDES)
    same(moved, descend(numbers(init), one.samples, plan(N, B, 2), at(0.8, *SIDES), prompted()))
    only_weights = create("pfedpt", {**COMMON, **PROMPT, "prompt_epochs": 0})
    moved = local_round(only_weights, one).params
    assert {n for n in init if not torch.equal(init[n], moved[n])} == set(WEIGHTS)


def test_the_prompts_momentum_is_its_own() -> None:
    method = create(
        "pfedpt", {**COMMON, **PROMPT, "epochs": 0, "prompt_momentum": 0.5, "momentum": 0.9, "weight_decay": 1.0}
    )
    one = work(initial(method), N)
    expected = descend(numbers(one.params), one.samples, plan(N, B, 2), at(0.8, *SIDES), prompted(), momentum=0.5)
    same(local_round(method, one).params, expected)


def test_joint_pfedpt_trains_both_at_once_each_at_its_own_rate() -> None:
    """Table 8."""
    method = create("pfedpt", {**COMMON, **PROMPT, "joint": True})
    one = work(initial(method), N)
    lr = {**at(0.8, *SIDES), **at(LR, *WEIGHTS)}
    done = local_round(method, one)
    same(done.params, descend(numbers(one.params), one.samples, plan(N, B, 2), lr, prompted()))
    assert done.passes == N * 2


def test_pfedpts_prompt_stays_and_its_weights_are_averaged() -> None:
    method = create("pfedpt", PROMPT)
    params = initial(method)
    assert method.shared(params).keys() == set(WEIGHTS)
    assert method.kept(params).keys() == set(SIDES)
    assert method.begin(MODEL, params, 0).keys() == set(WEIGHTS)


def test_fedprox_with_a_prompt_holds_the_weights_not_the_prompt() -> None:
    method = create("fedprox+pt", {**COMMON, **PROMPT, "mu": 3.0})
    init = initial(method)
    one = work(init, N, down=MODEL.weights)
    after_prompt = descend(numbers(init), one.samples, plan(N, B, 2, number=0), at(0.8, *SIDES), prompted())
    held = prompted(proximal(3.0, numbers(MODEL.weights)))
    same(
        local_round(method, one).params,
        descend(after_prompt, one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS), held),
    )


def test_moon_with_a_prompt_contrasts_features_of_prompted_images() -> None:
    """Eq. 5 is plain cross-entropy; then all three models of Eq. 3 see x + d_i with the new d_i."""
    method = create("moon+pt", {**COMMON, **PROMPT, "mu": 2.0, "temperature": 0.4})
    init = initial(method)
    memory = {name: p for name, p in near(MODEL.weights, 4, scale=0.5).items() if name in BODY}
    one = work(init, N, down=MODEL.weights, memory=memory)
    after_prompt = descend(numbers(init), one.samples, plan(N, B, 2, number=0), at(0.8, *SIDES), prompted())
    received = numbers(MODEL.weights)
    contrast = prompted(contrastive(2.0, 0.4, received, {**received, **numbers(memory)}))
    expected = descend(after_prompt, one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS), contrast)
    same(local_round(method, one).params, expected)


def test_fedper_with_a_prompt_keeps_prompt_and_head() -> None:
    method = create("fedper+pt", {**COMMON, **PROMPT})
    one = work(initial(method), N)
    after_prompt = descend(numbers(one.params), one.samples, plan(N, B, 2, number=0), at(0.8, *SIDES), prompted())
    done = local_round(method, one)
    same(done.params, descend(after_prompt, one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS), prompted()))
    assert method.shared(done.params).keys() == set(BODY)


def test_fedrep_with_a_prompt_trains_prompt_head_and_body_in_this_order() -> None:
    method = create("fedrep+pt", {**COMMON, **PROMPT, "head_epochs": 1, "head_lr": 0.3})
    one = work(initial(method), N)
    p = descend(numbers(one.params), one.samples, plan(N, B, 2, number=0), at(0.8, *SIDES), prompted())
    p = descend(p, one.samples, plan(N, B, 1, number=1), at(0.3, *HEAD), prompted())
    p = descend(p, one.samples, plan(N, B, 2, number=2), at(LR, *BODY), prompted())
    same(local_round(method, one).params, p)


def test_perfedavg_with_a_prompt_takes_meta_steps_on_the_weights_only() -> None:
    method = create("perfedavg+pt", {**COMMON, **PROMPT, "alpha": 0.5})

    def meta(p: Numbers, x: np.ndarray, y: np.ndarray) -> Numbers:
        g = prompted()(p, x[0::2], y[0::2])
        stepped = {name: v - 0.5 * g[name] if name in WEIGHTS else v for name, v in p.items()}
        return prompted()(stepped, x[1::2], y[1::2])

    one = work(initial(method), N)
    p = descend(numbers(one.params), one.samples, plan(N, B, 2, number=0), at(0.8, *SIDES), prompted())
    same(local_round(method, one).params, descend(p, one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS), meta))


# ---- +ft


def test_fine_tuning_trains_all_weights_before_an_evaluation() -> None:
    method = create("fedavg+ft", {**COMMON, "finetune_epochs": 3})
    one = work(MODEL.weights, N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 3), at(LR, *WEIGHTS)))


def test_fine_tuning_changes_nothing_in_training() -> None:
    plain, tuned = create("fedavg", COMMON), create("fedavg+ft", COMMON)
    assert plain.phases(1) == tuned.phases(1)
    assert plain.adapt() == ()
    assert [phase.epochs for phase in tuned.adapt()] == [5]


def test_fine_tuning_with_a_prompt_leaves_the_prompt_as_it_is() -> None:
    method = create("pfedpt+ft", {**COMMON, **PROMPT, "finetune_epochs": 1})
    one = work(initial(method), N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(one.params), one.samples, plan(N, B, 1), at(LR, *WEIGHTS), prompted()))


@pytest.mark.parametrize("name", ["fedprox+ft", "moon+ft", "perfedavg+ft"])
def test_fine_tuning_is_plain_cross_entropy_whatever_the_method(name: str) -> None:
    method = create(name, {**COMMON, "finetune_epochs": 1, **({} if "per" in name else {"mu": 5.0})})
    one = work(initial(method), N)
    done = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0]
    same(done.params, descend(numbers(one.params), one.samples, plan(N, B, 1), at(LR, *WEIGHTS)))


# ---- who keeps what

EVERYTHING = set(WEIGHTS) | set(SIDES)


@pytest.mark.parametrize(
    ("name", "shared", "remembered"),
    [
        ("fedavg", WEIGHTS, ()),
        ("fedprox", WEIGHTS, ()),
        ("moon", WEIGHTS, BODY),
        ("perfedavg", WEIGHTS, ()),
        ("fedper", BODY, ()),
        ("fedrep", BODY, ()),
        ("fedbabu", BODY, ()),
        ("fedmtl", WEIGHTS, ()),
        ("local", (), ()),
    ],
)
@pytest.mark.parametrize("plugin", ["", "+pt"])
def test_what_is_shared_kept_and_remembered(
    name: str, shared: Sequence[str], remembered: Sequence[str], plugin: str
) -> None:
    method = create(name + plugin, {"prompt_size": SIZE} if plugin else {})
    params = initial(method)
    assert set(params) == (EVERYTHING if plugin else set(WEIGHTS))
    assert set(method.shared(params)) == set(shared)
    assert set(method.kept(params)) == set(params) - set(shared)
    assert set(method.remembered(params)) == set(remembered)


@pytest.mark.parametrize("name", PLAIN)
def test_everything_a_client_sends_after_a_round_is_shared(name: str, tmp_path: Path) -> None:
    own = {"iterations": 10} if name == "fedmtl" else {}
    method = create(f"{name}+pt", {"batch_size": B, "epochs": 1, "prompt_epochs": 1, "prompt_size": SIZE, **own})
    host = toy_host(method, tmp_path)
    state = method.begin(MODEL, host.init, 0)
    client = host.work(1, method.down(state, 1), 1)
    notes, blobs = host.train([client], 1, score=False)
    up, stats = read_message(blobs[0])
    assert set(up) == set(method.shared(client.params))
    assert not stats
    assert notes[0]["n"] == 6
    # What is kept is found again at the next round, changed.
    later = host.work(1, method.down(state, 1), 2)
    assert all(not torch.equal(later.params[side], client.params[side]) for side in SIDES)
    host.store.close()


@pytest.mark.parametrize(
    ("name", "personal"),
    [
        ("fedavg", False),
        ("fedprox", False),
        ("moon", False),
        ("fedavg+ft", True),
        ("pfedpt", True),
        ("perfedavg", True),
        ("fedper", True),
        ("fedrep", True),
        ("fedbabu", True),
        ("fedmtl", True),
        ("local", True),
    ],
)
def test_which_methods_end_with_one_global_model(name: str, personal: bool) -> None:
    assert create(name).personal is personal


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_a_method_that_splits_body_and_head_refuses_a_tuning_without_a_head(name: str) -> None:
    class Headless(Tuning):
        roles = {"body.": "body"}  # noqa: RUF012

    with pytest.raises(ValueError, match='needs a tuning with a "head"'):
        METHODS[name](tuning=Headless())


# ---- names and settings

COMPOSITIONS = sorted(
    {
        *METHODS,
        *ALIASES,
        *(
            f"{name}+{plugins}"
            for name in (*PLAIN, "fedmix", "fedem", "tpfl", "pfedpg")
            for plugins in ("pt", "st", "ft", "pt+ft")
        ),
        *(f"{name}+ft" for name in ALIASES),
    }
)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_settings_make_the_same_method_again(name: str) -> None:
    other = {"lr": 0.123, "batch_size": 7}
    if "prompt_lr" in methods.fields(name):
        other |= {"prompt_lr": 0.4}
    for method in (create(name), create(name, other)):
        found = settings(method)
        assert found.keys() == methods.fields(name).keys()
        again = create(name, found)
        assert again == method
        assert type(again) is type(method)
        assert type(again.tuning) is type(method.tuning)
    assert create(name, other).lr == 0.123
    assert create(name, other) != create(name)


def test_defaults_are_the_papers() -> None:
    found = settings(create("pfedpt"))
    paper = {"epochs": 5, "prompt_epochs": 5, "lr": 0.005, "prompt_lr": 1.0, "batch_size": 16, "prompt_size": 4}
    assert {key: found[key] for key in paper} == paper
    assert found["prompt"] == "padding"
    assert settings(create("fedprox"))["mu"] == 1e-4
    assert settings(create("moon"))["mu"] == 1.0
    assert settings(create("fedrep"))["head_lr"] == 0.01
    assert settings(create("fedmtl"))["iterations"] == 4000
    assert settings(create("fedbabu"))["finetune_steps"] == 1
    assert settings(create("fedavg+ft"))["finetune_epochs"] == 5


def test_an_alias_is_its_composition() -> None:
    assert create("pfedpt") == create("fedavg+pt")
    assert create("pfedpt-tokens+ft") == create("fedavg+ft+st")


def test_a_plug_ins_default_gives_way_to_a_setting() -> None:
    assert create("fedavg+ft", {"finetune_epochs": 2}).finetune_epochs == 2
    assert methods.fields("fedavg+ft")["finetune_epochs"].default == 5
    assert methods.fields("fedavg")["finetune_epochs"].default == 0


def test_plain_methods_tune_all_weights() -> None:
    assert all(create(name).tuning == Full() for name in PLAIN if name != "fedrod")
    assert type(create("fedavg")) is FedAvg


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("fedavgg", {}, r'^method\.name = "fedavgg" is unknown; did you mean "fedavg"\? \(allowed: .*moon.*pfedpt'),
        ("zzz", {}, r'^method\.name = "zzz" is unknown \(allowed: '),
        ("", {}, r'^method\.name = "" is unknown \(allowed: '),
        (
            "fedavg+pf",
            {},
            r'^method\.name = "fedavg\+pf": plug-in = "pf" is unknown; did you mean "[fp]t"\?.*ft, head',
        ),
        ("fedavg+", {}, r'^method\.name = "fedavg\+": plug-in = "" is unknown'),
        ("fedavg+pt+st", {}, r'^method\.name = "fedavg\+pt\+st": at most one of \+pt, \+st'),
        ("pfedpt+pt", {}, r'^method\.name = "pfedpt\+pt": at most one of'),
        ("fedprox", {"nu": 1}, r'^method\.nu is not a setting of "fedprox"; did you mean "mu"\? \(allowed: .*lr.*mu'),
        ("fedavg", {"mu": 1}, r'^method\.mu is not a setting of "fedavg"'),
        ("fedavg", {"prompt_lr": 1}, r'^method\.prompt_lr is not a setting of "fedavg"'),
        ("fedavg", {"tuning": 1}, r'^method\.tuning is not a setting of "fedavg"'),
        ("pfedpt", {"inner": 1}, r'^method\.inner is not a setting of "pfedpt"'),
        ("fedprox", {"mu": -1}, r"^method\.mu = -1 should be greater than or equal to 0$"),
        ("fedavg", {"lr": 0}, r"^method\.lr = 0 should be greater than 0$"),
        ("fedavg", {"epochs": 1.5}, r"^method\.epochs = 1\.5 should be a valid integer"),
        ("fedavg", {"batch_size": "many"}, r"^method\.batch_size = 'many' should be a valid integer"),
        ("fedavg", {"optimizer": "lion"}, r"^method\.optimizer = 'lion' should be 'sgd', 'adam' or 'adamw'$"),
        ("fedavg", {"momentum": 1}, r"^method\.momentum = 1 should be less than 1$"),
        ("perfedavg", {"order": "third"}, r"^method\.order = 'third' should be 'first' or 'second'$"),
        ("moon", {"temperature": 0}, r"^method\.temperature = 0 should be greater than 0$"),
        ("pfedpt", {"prompt_size": 0}, r"^method\.prompt_size = 0 should be greater than or equal to 1$"),
        (
            "pfedpt",
            {"prompt": "circle"},
            r"^method\.prompt = 'circle' should be 'padding', 'fixed-patch' or 'random-patch'$",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence_that_names_the_setting(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        create(name, given)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_method_of_ones_own_is_named_by_module_and_class() -> None:
    name = "promptfed.methods.fedprox:FedProx"
    assert create(name, {"mu": 0.3}) == create("fedprox", {"mu": 0.3})
    assert create(f"{name}+pt+ft", {"prompt_size": 2}) == create("fedprox+pt+ft", {"prompt_size": 2})
    assert methods.fields(name).keys() == methods.fields("fedprox").keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Method", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("promptfed.method:Methud", "cannot be imported: .*Methud"),
        ("promptfed.method:Batch", "is not a class derived from promptfed.Method"),
        ("promptfed.method:annotations", "is not a class derived from promptfed.Method"),
        (":Method", "cannot be imported"),
        ("promptfed.method:", "cannot be imported"),
    ],
)
def test_a_method_that_cannot_be_imported_is_a_user_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf'^method\.name = "{name}" {message}'):
        create(name)


def test_what_is_tuned_in_words() -> None:
    assert methods.tunes(create("fedavg")) == "all weights"
    assert methods.tunes(create("fedrep+pt+ft")) == "private pixel prompt + all weights"
    assert methods.tunes(create("pfedpt-tokens")) == "private soft tokens + all weights"


def test_phases_carry_the_methods_optimiser() -> None:
    method = create("fedavg", {"optimizer": "adamw", "lr": 0.2, "weight_decay": 0.1, "momentum": 0.3, "batch_size": 5})
    expected = Optimizer(kind="adamw", lr=0.2, momentum=0.3, weight_decay=0.1)
    assert method.phases(1) == (Phase({"head": expected, "body": expected}, 5, epochs=5),)
