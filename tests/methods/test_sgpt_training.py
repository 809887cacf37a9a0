"""SGPT's objective and Algorithm 1: what each block trains; keys move by the key loss alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sgpt_toy import (
    GROUP,
    HEAD,
    LENGTH,
    MIDDLE,
    MODEL,
    SHARED,
    WIDTH,
    G,
    W,
    block,
    context,
    cosines,
    data,
    key_gradient,
    local_round,
    pooled,
    small,
    some,
    unit,
    whole,
    work,
)
from torch import Tensor
from torch.nn import functional as F

from promptfed.methods.sgpt import Sgpt
from promptfed.phases import Batch
from tiny import plan, softmax

# ---- the objective


def test_features_are_the_mean_of_cls_and_the_tokens_of_the_group() -> None:
    method, batch = small(), whole()
    params = some(method)
    chosen = cosines(batch.frozen["query"], params["keys"]).argmax(1).tolist()
    assert len(set(chosen)) > 1
    found = method.tuning.features(MODEL, params, batch, context())
    torch.testing.assert_close(found, pooled(params, batch.x, chosen), rtol=1e-4, atol=1e-5)
    logits = method.tuning.logits(MODEL, params, batch, context())
    torch.testing.assert_close(logits, found @ params["head.weight"].T + params["head.bias"])
    # A fine-tuning phase, which trains every role, sees what an evaluation sees.
    assert torch.equal(found, method.tuning.features(MODEL, params, batch, context(method.fine_tune())))


def test_features_may_be_cls_alone() -> None:
    """Group prompts are still there, and still make a difference."""
    method, batch = small(pool="cls"), whole()
    params = some(method)
    chosen = cosines(batch.frozen["query"], params["keys"]).argmax(1).tolist()
    found = method.tuning.features(MODEL, params, batch, context())
    torch.testing.assert_close(found, pooled(params, batch.x, chosen, first=1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, pooled(params, batch.x, chosen), atol=1e-2)
    assert not torch.allclose(found, pooled(params, batch.x, None), atol=1e-2)


def test_block_one_is_a_vit_with_prompts_that_stay() -> None:
    """Eq. 10: no group prompts, plain cross-entropy."""
    method, batch = small(), whole()
    params, ctx = some(method), context(block(small(), "shared"))
    expected = MODEL.features(W, batch.x, {0: params["shared.0"], 1: params["shared.1"]}, "stay")
    torch.testing.assert_close(method.tuning.prompted(MODEL, params, batch, chosen=None), expected)
    torch.testing.assert_close(expected, pooled(params, batch.x, None), rtol=1e-4, atol=1e-5)
    loss, stats = method.loss(MODEL, params, batch, ctx)
    logits = expected @ params["head.weight"].T + params["head.bias"]
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.y))
    assert stats == {}


def test_block_two_adds_the_key_loss() -> None:
    """Eq. 11, with a selection that is not the plain one; gradients of the keys by hand."""
    method, batch = small(), whole()
    params = {name: p.requires_grad_() for name, p in some(method).items()}
    keys = params["keys"].detach().double().numpy()
    near_by = cosines(batch.frozen["query"], params["keys"])
    counts = np.array([8, 1, 1, 2])
    chosen = ((near_by - 1) * (counts / 12 + 5e-4)).argmax(1)
    assert set(chosen) < set(range(G)), "a key that nobody selects is needed here"
    assert (chosen != near_by.argmax(1)).any()
    loss, stats = method.loss(MODEL, params, batch, context(block(method, "group"), counts))
    features = pooled(params, batch.x, chosen.tolist()).detach().double().numpy()
    head = {name: params[name].detach().double().numpy() for name in HEAD}
    probability = softmax(features @ head["head.weight"].T + head["head.bias"])
    cross_entropy = -np.log(probability[np.arange(6), batch.y.numpy()]).mean()
    assert loss.item() == pytest.approx(cross_entropy - near_by[np.arange(6), chosen].mean(), rel=1e-4)
    np.testing.assert_array_equal(stats["selected"], np.bincount(chosen, minlength=G))
    loss.backward()
    expected = key_gradient(keys, batch.frozen["query"].double().numpy(), chosen)
    np.testing.assert_allclose(params["keys"].grad, expected, rtol=1e-4, atol=1e-6)
    for g in range(G):
        assert bool(params["keys"].grad[g].any()) == (g in chosen)
        for name in GROUP:
            assert bool(params[name].grad[g].any()) == (g in chosen)
    with torch.no_grad():
        moved = cosines(batch.frozen["query"], params["keys"] - 0.01 * params["keys"].grad)
    closer = moved[np.arange(6), chosen] - near_by[np.arange(6), chosen]
    assert closer.mean() > 0, "selected keys move towards their samples"


@pytest.mark.parametrize("majority", [False, True])
def test_padding_leaves_no_trace(majority: bool) -> None:
    method, batch = small(majority=majority), whole(4)
    params = {name: p.requires_grad_() for name, p in some(method).items()}
    ctx = context(block(method, "group"), counts=(1, 2, 3, 4))

    def padded(v: Tensor) -> Tensor:
        return torch.cat([v, v[:1], v[:1], v[:1]])

    longer = Batch(
        padded(batch.x),
        padded(batch.y),
        torch.tensor([1.0] * 4 + [0.0] * 3),
        MIDDLE,
        {},
        {"query": padded(batch.frozen["query"])},
    )
    names = list(params)
    found = []
    for b in (batch, longer):
        loss, stats = method.loss(MODEL, params, b, ctx)
        found.append(
            (loss, stats["selected"], torch.autograd.grad(loss, [params[n] for n in names], allow_unused=True))
        )
    (loss, selected, gradients), (loss_2, selected_2, gradients_2) = found
    torch.testing.assert_close(loss, loss_2)
    assert torch.equal(selected, selected_2)
    assert selected.sum() == 4
    for a, b in zip(gradients, gradients_2, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- Algorithm 1

BOTH = ("shared", {"body", "head"}), ("group", {"group", "keys", "head"})


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ("bcd", BOTH),
        ("bcd-inverted", BOTH[::-1]),
        ("joint", (("joint", {"body", "group", "keys", "head"}),)),
        ("shared", BOTH[:1]),
        ("group", BOTH[1:]),
    ],
)
def test_rows_of_table_3(training: str, expected: tuple[tuple[str, set[str]], ...]) -> None:
    method = small(training=training, epochs=3, lr=0.2)
    assert tuple((phase.name, set(phase.train)) for phase in method.phases(1)) == expected
    for phase in method.phases(1):
        assert (phase.epochs, phase.batch_size, phase.plain) == (3, 40, False)
        assert {o.lr for o in phase.train.values()} == {0.2}
    names = set(method.tuning.init(MODEL, 0))
    assert set(method.roles()) == {method.tuning.role(name) for name in names}
    assert names == {*HEAD, *(SHARED if training != "group" else ()), *((*GROUP, "keys") * (training != "shared"))}


def test_without_group_prompts_an_evaluation_sees_none() -> None:
    method, batch = small(training="shared"), whole(frozen=False)
    params = some(method)
    assert method.tuning.frozen_name(MODEL) == ""
    assert method.assign(MODEL, params, batch, context()) is None
    expected = pooled(params, batch.x, None)
    torch.testing.assert_close(method.tuning.features(MODEL, params, batch, context()), expected, rtol=1e-4, atol=1e-5)
    assert set(method.begin(MODEL, params, 0)) == {*params, "counts"}


def test_without_shared_prompts_an_evaluation_sees_none() -> None:
    method, batch = small(training="group"), whole()
    params = some(method)
    chosen = cosines(batch.frozen["query"], params["keys"]).argmax(1).tolist()
    expected = pooled(params, batch.x, chosen)
    torch.testing.assert_close(method.tuning.features(MODEL, params, batch, context()), expected, rtol=1e-4, atol=1e-5)


def test_each_block_moves_what_is_its_own() -> None:
    method = small(epochs=1, batch_size=4, weight_decay=0.0)
    params = some(method)
    for phase, expected in zip(method.phases(1), ({*SHARED, *HEAD}, {*GROUP, "keys", *HEAD}), strict=True):
        done = local_round(method, [work(params, 6)], (phase,))[0]
        assert {name for name, p in done.params.items() if not torch.equal(p, params[name])} == expected
        assert set(done.stats) == ({"selected"} if phase.name == "group" else set())


def test_in_block_two_what_is_in_front_is_computed_once() -> None:
    method, batch = small(), whole()
    params, ctx = {n: p.requires_grad_() for n, p in some(method).items()}, context(block(small(), "group"))
    extra = method.sample_constants(MODEL, params, batch, ctx)
    patches = (8 // 4) * (12 // 4)
    assert {name: v.shape for name, v in extra.items()} == {"hidden": (6, 1 + 2 * LENGTH + patches, WIDTH)}
    moving = [params[name] for name in (*GROUP, "keys", *HEAD)]
    found = []
    for b in (batch, batch._replace(extra=extra, x=torch.full_like(batch.x, torch.nan))):
        loss, stats = method.loss(MODEL, params, b, ctx)
        found.append((loss, stats["selected"], torch.autograd.grad(loss, moving)))
    for a, b in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_round_ends_alike_with_and_without_what_is_kept() -> None:
    ends = [
        local_round(small(epochs=2, batch_size=4, cache=cache), [work(some(small()), 7)])[0] for cache in (True, False)
    ]
    for name, p in ends[0].params.items():
        torch.testing.assert_close(p, ends[1].params[name], rtol=1e-4, atol=1e-5)
    assert torch.equal(ends[0].stats["selected"], ends[1].stats["selected"])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [False, True]),
        ({"training": "bcd-inverted"}, [True, False]),
        ({"training": "joint"}, [False]),
        ({"training": "shared"}, [False]),
        ({"training": "group"}, [True]),
        ({"training": "group", "group_layers": (0, 3)}, [False]),  # nothing but the patches in front
        ({"cache": False}, [False, False]),
    ],
)
def test_what_moves_is_never_kept(settings: dict[str, Any], kept: list[bool]) -> None:
    method = small(**settings)
    params = some(method)
    assert [bool(method.sample_constants(MODEL, params, whole(2), context(p))) for p in method.phases(1)] == kept


def keys_by_hand(method: Sgpt, keys: np.ndarray, counts: Any, n: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Block II of a round as the keys see it: SGD with momentum and decay on -cos, selections as they come."""
    query = data(n, client).frozen["query"].double().numpy()
    velocity, own = np.zeros_like(keys), np.zeros(G)
    for index in plan(n, method.batch_size, method.epochs, number=1, client=client):
        cos = unit(query[index]) @ unit(keys).T
        seen = np.array(counts) + own
        q = seen / seen.sum() + method.floor if seen.sum() else np.ones(G)
        chosen = ((cos - 1) * q).argmax(1)
        if method.majority:
            chosen[:] = np.bincount(chosen, minlength=G).argmax()
        gradient = key_gradient(keys, query[index], chosen) + method.weight_decay * keys
        velocity = method.momentum * velocity + gradient
        keys = keys - method.lr * velocity
        own += np.bincount(chosen, minlength=G)
    return keys, own


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (40, 3, 0, 9)])
@pytest.mark.parametrize("majority", [False, True])
@pytest.mark.parametrize("sizes", [(11,), (11, 5, 1)], ids=["alone", "stacked"])
def test_keys_of_a_round(sizes: tuple[int, ...], majority: bool, counts: Any) -> None:
    method = small(epochs=3, batch_size=4, lr=0.2, weight_decay=0.01, majority=majority)
    params = some(method)
    done = local_round(method, [work(params, n, 5 + i, counts) for i, n in enumerate(sizes)])
    for i, n in enumerate(sizes):
        keys, own = keys_by_hand(method, params["keys"].double().numpy(), counts, n, 5 + i)
        np.testing.assert_allclose(done[i].params["keys"], keys, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(done[i].stats["selected"], own)
        assert own.sum() == 3 * n
        assert np.abs(keys - params["keys"].numpy()).max() > 0.1


def test_calibration_keeps_groups_alive() -> None:
    """All samples are nearest to one key: without q_g they stay there, with it they spread."""
    used = []
    for calibrate in (False, True):
        method = small(epochs=3, batch_size=4, calibrate=calibrate)
        one = work(some(method), 12)
        query = one.samples.frozen["query"] + 5  # all much alike
        one = replace(one, samples=replace(one.samples, frozen={"query": query}))
        one.params["keys"][0] = query.mean(0)
        used.append(int((local_round(method, [one])[0].stats["selected"] > 0).sum()))
    assert used[0] == 1
    assert used[1] > 1
