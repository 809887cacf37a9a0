"""FedMix: the means, and Eq. 3 with its second derivatives, against NumPy and finite differences."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import vmap

from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.fedmix import FedMix
from promptfed.models.vit import vit
from promptfed.params import Params
from promptfed.phases import Batch, Context, Holdings
from promptfed.testing import check_method
from promptfed.training import Samples, chunks, train
from tiny import (
    CLASSES,
    IMAGE,
    ROUND,
    SEED,
    Numbers,
    arrays,
    features,
    gradients,
    linear,
    near,
    numbers,
    same,
    samples,
    softmax,
    work,
)

NAME = "promptfed.methods.fedmix:FedMix"
MODEL = linear()
LAM = 0.2


def mixed(**settings: Any) -> FedMix:
    method = create(NAME, {"mix": LAM, **settings})
    assert isinstance(method, FedMix)
    return method


def means(count: int = 4, image: tuple[int, int, int] = IMAGE, classes: int = CLASSES) -> Params:
    g = np.random.default_rng(5)
    labels = g.dirichlet(np.ones(classes), count)
    x = g.normal(0, 0.5, (count, *image))
    return {"mean.x": torch.from_numpy(x).float(), "mean.y": torch.from_numpy(labels).float()}


def whole(n: int = 6, noise: tuple[float, float] = (0.5, 0.8)) -> Batch:
    """The noise picks mean 1 of 4: .5 + .8 - 1 = .3."""
    data = samples(n, 1)
    return Batch(data.images(slice(None)), data.y, None, torch.tensor(noise), {})


def context(once: Params) -> Context:
    return Context({}, {}, None, torch.tensor(6), torch.ones(CLASSES), once=once)


def entropy(p: Numbers, x: np.ndarray, target: np.ndarray) -> float:
    """Mean cross-entropy with soft labels."""
    log = np.log(softmax(features(p, x) @ p["head.weight"].T + p["head.bias"]))
    return float(-(target * log).sum(1).mean())


def eq3(p: Numbers, x: np.ndarray, y: np.ndarray, other: np.ndarray, label: np.ndarray, lam: float = LAM) -> float:
    z, hot = (1 - lam) * x, np.eye(CLASSES)[y]
    soft = np.broadcast_to(label, hot.shape)
    slope = gradients(p, z, y)["x"]  # of the mean over the batch: 1/B of each sample's own
    return (1 - lam) * entropy(p, z, hot) + lam * entropy(p, z, soft) + lam * float((slope * other).sum())


def test_the_loss_is_eq_3() -> None:
    p, once = near(MODEL.weights, 1), means()
    other, label = once["mean.x"][1].double().numpy(), once["mean.y"][1].double().numpy()
    expected = eq3(numbers(p), *arrays(samples(6, 1)), other, label)
    loss, _ = mixed().loss(MODEL, p, whole(), context(once))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    without = eq3(numbers(p), *arrays(samples(6, 1)), 0 * other, label)
    assert abs(without - expected) > 1e-3 * expected


def test_its_gradient_has_the_second_derivatives() -> None:
    """Against finite differences of Eq. 3 in float64."""
    start, once = near(MODEL.weights, 1), means()
    params = {name: p.clone().requires_grad_() for name, p in start.items()}
    mixed().loss(MODEL, params, whole(), context(once))[0].backward()
    other, label = once["mean.x"][1].double().numpy(), once["mean.y"][1].double().numpy()
    x, y = arrays(samples(6, 1))
    for name, place in (("head.bias", (1,)), ("head.weight", (2, 3)), ("body.bias", (0,)), ("body.weight", (1, 7))):
        sides = []
        for step in (1e-5, -1e-5):
            moved = {n: v.copy() for n, v in numbers(start).items()}
            moved[name][place] += step
            sides.append(eq3(moved, x, y, other, label))
        assert params[name].grad[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("lam", [0.04, 0.02])
def test_eq_3_is_mixup_up_to_the_second_order(lam: float) -> None:
    p, once = near(MODEL.weights, 1), means()
    other, label = once["mean.x"][1].double().numpy(), once["mean.y"][1].double().numpy()
    x, y = arrays(samples(6, 1))
    mixup = entropy(numbers(p), (1 - lam) * x + lam * other, (1 - lam) * np.eye(CLASSES)[y] + lam * label)
    loss, _ = mixed(mix=lam).loss(MODEL, p, whole(), context(once))
    plain = entropy(numbers(p), x, np.eye(CLASSES)[y])
    assert abs(loss.item() - mixup) < 2 * lam**2
    assert abs(loss.item() - mixup) < abs(plain - mixup) / 3


def test_through_attention_alone_and_stacked() -> None:
    """The gradient on a small transformer: finite differences of the loss in float64, and the same under vmap."""
    image, classes = (3, 8, 8), 3
    model = vit(image, classes, 0, width=16, depth=2, heads=2)
    model.weights = {name: p.double() for name, p in model.weights.items()}
    method, once = mixed(), {name: p.double() for name, p in means(4, image, classes).items()}
    data = samples(4, 1, image, classes)
    batch = Batch(data.images(slice(None)).double(), data.y, None, torch.tensor([0.5, 0.8]), {})

    def value(params: Params, x: torch.Tensor = batch.x) -> torch.Tensor:
        return method.loss(model, params, batch._replace(x=x), context(once))[0]

    params = {name: p.clone().requires_grad_() for name, p in model.weights.items()}
    value(params).backward()
    for name, place in (
        ("body.blocks.0.qkv.weight", (3, 5)),
        ("body.blocks.1.mlp.in.bias", (2,)),
        ("body.cls", (0, 0, 1)),
    ):
        step = torch.zeros_like(params[name])
        step[place] = 1e-5
        with torch.no_grad():
            sides = [float(value({**model.weights, name: model.weights[name] + s})) for s in (step, -step)]
        assert params[name].grad[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4, abs=1e-8)
    stacked = vmap(value, in_dims=(None, 0))(model.weights, torch.stack([batch.x, 2 * batch.x]))
    expected = [value(model.weights), value(model.weights, 2 * batch.x)]
    torch.testing.assert_close(stacked, torch.stack(expected))


def test_the_mean_is_drawn_with_the_batchs_noise() -> None:
    p, once, x_y = near(MODEL.weights, 1), means(), arrays(samples(6, 1))
    for noise, chosen in (((0.0, 0.0), 0), ((0.6, 0.3), 3), ((0.9, 0.99), 3), ((0.3, 0.3), 2)):
        other, label = (once[name][chosen].double().numpy() for name in ("mean.x", "mean.y"))
        loss, _ = mixed().loss(MODEL, p, whole(noise=noise), context(once))
        assert loss.item() == pytest.approx(eq3(numbers(p), *x_y, other, label), rel=1e-5)


def test_padding_counts_for_nothing() -> None:
    p, once, batch = near(MODEL.weights, 1), means(), whole()
    padded = batch._replace(weight=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    short = batch._replace(x=batch.x[:4], y=batch.y[:4])
    a, b = (mixed().loss(MODEL, p, one, context(once))[0] for one in (padded, short))
    assert a.item() == pytest.approx(b.item(), rel=1e-6)


def test_with_no_means_at_all_it_is_fedavg() -> None:
    method = mixed(epochs=1, batch_size=4, lr=0.1)
    one = work(MODEL.weights, 10)
    one.once = {
        name.removeprefix("once."): p for name, p in method.begin(MODEL, MODEL.weights, 0).items() if "once" in name
    }
    plain = create("fedavg", {"epochs": 1, "batch_size": 4, "lr": 0.1})
    done, expected = (train(m, MODEL, [one], m.schedule(ROUND), SEED, ROUND)[0] for m in (method, plain))
    same(done.params, numbers(expected.params), 0)


def holdings(data: Samples) -> Holdings:
    counts = torch.bincount(data.y, minlength=CLASSES)
    return Holdings(lambda: chunks(data), lambda: iter(()), counts, {})


@pytest.mark.parametrize(("size", "groups"), [(0, 1), (3, 3), (5, 2), (9, 1), (50, 1), (10, 1)])
def test_a_client_sends_means_of_at_least_so_many_images(size: int, groups: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("promptfed.training.CHUNK", 4)  # means go over the ends of chunks
    data = samples(10, 2)
    hello = mixed(mean_size=size).enroll(MODEL, MODEL.weights, holdings(data))
    x, y = arrays(data)
    at = [np.arange(10) % groups == g for g in range(groups)]
    same(
        hello,
        {
            "mean.x": np.stack([x[i].mean(0) for i in at]),
            "mean.y": np.stack([np.eye(CLASSES)[y[i]].mean(0) for i in at]),
        },
    )
    assert min(i.sum() for i in at) >= min(size, 10)


def test_a_lone_image_is_not_sent() -> None:
    assert mixed().enroll(MODEL, MODEL.weights, holdings(samples(1))) == {}
    state = mixed().begin(MODEL, MODEL.weights, 0)
    assert mixed().admit(state, 3, {}, 0).keys() == state.keys()


def test_the_server_hands_everybodys_means_to_everybody_and_adds_a_newcomers() -> None:
    method = mixed()
    state = method.begin(MODEL, MODEL.weights, 0)
    for client, count in ((0, 2), (1, 1)):
        state = method.admit(state, client, means(count), 0)
    down = method.down(state, 7)
    assert down.keys() == {*MODEL.weights, "once.mean.x", "once.mean.y"}
    torch.testing.assert_close(down["once.mean.x"], torch.cat([means(2)["mean.x"], means(1)["mean.x"]]))
    later = method.admit(state, 9, means(3), 4)
    assert [len(later[f"once.mean.{name}"]) for name in "xy"] == [6, 6]
    torch.testing.assert_close(later["once.mean.y"][:3], state["once.mean.y"])


def test_what_it_refuses() -> None:
    method = create(f"{NAME}+head")
    with pytest.raises(
        UserError, match="FedMix mixes images, and this tuning uses only cached outputs of frozen layers"
    ):
        method.check(MODEL, method.tuning.init(MODEL, 0))
    with pytest.raises(UserError, match=r"method\.mean_size = 1 would send the images themselves"):
        mixed(mean_size=1).check(MODEL, MODEL.weights)
    mixed(mean_size=2).check(MODEL, MODEL.weights)


def test_conformance_with_tokens() -> None:
    check_method(f"{NAME}+vpt", backbone="vit-mini", size=32, tokens=2, epochs=1, batch_size=8)
