"""SGPT equation by equation: who selects what, what each block trains, and what the server makes of it.

What keys do needs no network: they move by the key loss alone, which is written out in NumPy here.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import promptfed
from promptfed.client import Samples, Trained, Work, train
from promptfed.errors import UserError
from promptfed.method import Batch, Context, Method, Phase, Update
from promptfed.methods import create
from promptfed.methods.sgpt import Sgpt, SharedGroup, orthogonal
from promptfed.models import ViT
from promptfed.models.vit import vit
from promptfed.params import Params, numel
from promptfed.testing import check_method
from tiny import CLIENT, ROUND, SEED, linear, near, plan, samples, softmax

NAME = "promptfed.methods.sgpt:Sgpt"
IMAGE, CLASSES, WIDTH, DEPTH = (3, 8, 12), 3, 16, 5
MODEL = vit(IMAGE, CLASSES, 0, width=WIDTH, depth=DEPTH, heads=2)
W = MODEL.weights
G, LENGTH = 4, 2
SMALL = {"groups": G, "prompt_length": LENGTH, "shared_layers": (0, 1), "group_layers": (2, 4)}
SHARED, GROUP = ("shared.0", "shared.1"), ("group.2", "group.4")
HEAD = ("head.weight", "head.bias")
EVALUATION = Phase({}, 1, name="evaluate")
MIDDLE = torch.tensor([0.5, 0.5])


def small(**settings: Any) -> Sgpt:
    method = create(NAME, {**SMALL, **settings})
    assert isinstance(method, Sgpt)
    return method


def some(method: Method, seed: int = 1) -> Params:
    """Parameters that no symmetry can hide a mistake in."""
    return near(method.tuning.init(MODEL, SEED), seed, 0.3)


def data(n: int, client: int = CLIENT) -> Samples:
    """Images, and in place of their queries, which are much alike in a fresh model, numbers that point everywhere."""
    found = samples(n, client, IMAGE)
    query = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(client))
    return Samples(found.x, found.y, found.mean, found.std, {"query": query})


def whole(n: int = 6, frozen: bool = True) -> Batch:
    held = data(n)
    return Batch(held.images(slice(None)), held.y, None, MIDDLE, {}, held.frozen if frozen else {})


def context(phase: Phase = EVALUATION, counts: Any = (0,) * G, own: Any = None) -> Context:
    down = {"counts": torch.tensor(counts, dtype=torch.float32)}
    stats = {} if own is None else {"selected": torch.tensor(own, dtype=torch.float32)}
    return Context(down, {}, phase, torch.tensor(6), torch.ones(CLASSES), {}, stats)


def block(method: Sgpt, name: str) -> Phase:
    return next(phase for phase in method.phases(1) if phase.name == name)


def work(params: Params, n: int, client: int = CLIENT, counts: Any = (0,) * G) -> Work:
    return Work(client, data(n, client), params, context(counts=counts).down, {})


def local_round(method: Sgpt, works: list[Work], phases: tuple[Phase, ...] | None = None) -> list[Trained]:
    return train(method, MODEL, works, phases or method.phases(ROUND), SEED, ROUND)


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def cosines(query: Tensor, keys: Tensor) -> np.ndarray:
    return unit(query.double().numpy()) @ unit(keys.detach().double().numpy()).T


# ---- what there is


def test_parameters_have_the_papers_shapes_and_roles() -> None:
    method = small()
    shapes = {name: tuple(p.shape) for name, p in method.tuning.init(MODEL, 0).items()}
    assert shapes == {
        **dict.fromkeys(SHARED, (LENGTH, WIDTH)),
        **dict.fromkeys(GROUP, (G, LENGTH, WIDTH)),
        "keys": (G, WIDTH),
        "head.weight": (CLASSES, WIDTH),
        "head.bias": (CLASSES,),
    }
    roles = {method.tuning.role(name) for name in shapes}
    assert roles == set(method.tuning.role_names()) == {"body", "group", "keys", "head"}
    assert not method.personal
    assert method.serves


def test_as_many_parameters_as_the_paper_says() -> None:
    """Table 5 has 0.1 M: 3 shared prompts, 3 x 20 group prompts and 20 keys of 768 numbers each, a head of 100 classes.
    Only what init() looks at of a ViT-B/16."""
    weights = {
        "body.cls": torch.zeros(1, 1, 768),
        "head.weight": torch.zeros(100, 768),
        "head.bias": torch.zeros(100),
    }
    model = ViT("vit-b-16", (3, 224, 224), 100, weights, 768, patch=16, depth=12, heads=12)
    method = create(NAME)
    method.tuning.check(model)
    params = method.tuning.init(model, 0)
    assert numel(params) == 3 * 768 + 3 * 20 * 768 + 20 * 768 + 100 * 769 == 140_644
    assert set(params) == {*(f"shared.{i}" for i in (0, 1, 2)), *(f"group.{i}" for i in (3, 4, 5)), "keys", *HEAD}


def test_the_papers_settings_are_the_defaults() -> None:
    method = create(NAME)
    assert isinstance(method, Sgpt)
    assert (method.lr, method.momentum, method.weight_decay) == (0.01, 0.9, 1e-5)
    assert (method.batch_size, method.epochs) == (40, 5)
    assert (method.key_momentum, method.prompt_momentum, method.rare, method.floor) == (0.5, 0.5, 50, 5e-4)
    assert Sgpt() == method


def test_initial_values() -> None:
    bound = np.sqrt(6 / (3 * 4**2 + WIDTH))
    uniform, code = (SharedGroup(**SMALL, initial=kind).init(MODEL, 3) for kind in ("uniform", "code"))
    for name in (*SHARED, *GROUP):
        assert 0.5 * bound < float(uniform[name].abs().max()) <= bound
    for name in SHARED:
        assert not code[name].any()
    for name in (*GROUP, "keys"):
        assert torch.equal(uniform[name], code[name])
    torch.manual_seed(0)
    again, other = SharedGroup(**SMALL).init(MODEL, 3), SharedGroup(**SMALL).init(MODEL, 4)
    for name in (*SHARED, *GROUP, "keys"):
        assert torch.equal(uniform[name], again[name])
        assert not torch.equal(uniform[name], other[name])


@pytest.mark.parametrize(("rows", "width"), [(4, 16), (5, 5), (1, 3), (7, 3)])
def test_keys_start_orthonormal(rows: int, width: int) -> None:
    """More rows than dimensions: every `width` of them."""
    keys = orthogonal(rows, width, torch.Generator().manual_seed(0)).double().numpy()
    assert keys.shape == (rows, width)
    for i in range(0, rows, width):
        part = keys[i : i + width]
        np.testing.assert_allclose(part @ part.T, np.eye(len(part)), atol=1e-6)
    assert len(np.unique(keys.round(4), axis=0)) == rows


# ---- the query


def test_the_query_is_cls_of_the_model_without_prompts() -> None:
    x = whole().x
    h = MODEL.embed(W, x)
    behind = []
    for i in range(DEPTH):
        h = MODEL.block(W, f"body.blocks.{i}", h)
        behind.append(h[:, 0])
    queries = {
        (): MODEL.features(W, x),
        (("query", 3),): behind[2],
        (("query", 3), ("query_norm", True)): MODEL.norm(W, behind[2]),
        (("query", 3), ("query_norm", True), ("query_relu", True)): MODEL.norm(W, behind[2]).clamp(min=0),
        (("query_relu", True),): MODEL.features(W, x).clamp(min=0),
        (("query", DEPTH),): behind[-1],
    }
    names = set()
    for settings, expected in queries.items():
        tuning = SharedGroup(**SMALL, **dict(settings))
        torch.testing.assert_close(tuning.frozen(MODEL, x)["query"], expected, rtol=1e-5, atol=1e-6)
        names.add(tuning.frozen_name(MODEL))
    assert len(names) == len(queries)
    assert SharedGroup.images


def test_every_sample_selects_the_nearest_key() -> None:
    """Eq. 5."""
    method, batch = small(), whole(20)
    params = {**some(method), "keys": torch.randn(G, WIDTH, generator=torch.Generator().manual_seed(2)) * 5}
    expected = cosines(batch.frozen["query"], params["keys"]).argmax(1)
    found = method.prompts.select(MODEL, params, batch, context())
    np.testing.assert_array_equal(found, expected)
    assert len(set(expected)) > 1
    seen = whole(20, frozen=False)  # its query is computed then
    expected = cosines(MODEL.features(W, seen.x), params["keys"]).argmax(1)
    np.testing.assert_array_equal(method.prompts.select(MODEL, params, seen, context()), expected)
    skewed = context(counts=(1000, 0, 0, 0), own=(1, 0, 0, 0))
    assert torch.equal(found, method.assign(MODEL, params, batch, skewed)), "what was selected before changed Eq. 5"


# ---- selection in training

# Cosines of two samples to the keys; rows 2 and 3 are far from everything.
NEAR = torch.tensor([[0.9, 0.8, 0.2, 0.0], [0.1, 0.6, 0.5, -1.0]])


@pytest.mark.parametrize(
    ("settings", "counts", "own", "expected"),
    [
        # Before the first selection: Eq. 5.
        ({}, (0, 0, 0, 0), None, [0, 1]),
        ({}, (0, 0, 0, 0), (0, 0, 0, 0), [0, 1]),
        # q = .9005, .1005, .0005, .0005: -.1 q = -.090, -.2 q = -.0201, -.8 q = -.0004, -1 q = -.0005
        #                                 -.9 q = -.810, -.4 q = -.0402, -.5 q = -.00025, -2 q = -.001
        ({}, (90, 10, 0, 0), None, [2, 2]),
        # q = .95, .15, .05, .05: -.095, -.03, -.04, -.05; -.855, -.06, -.025, -.1
        ({"floor": 0.05}, (90, 10, 0, 0), None, [1, 2]),
        # No floor: what was never selected wins with a score of zero, the first such group.
        ({"floor": 0.0}, (90, 10, 0, 0), None, [2, 2]),
        # The client's own selections alone: q = .0005, .5005, .5005, .0005: -.00005, ..., -.0005; -.0005, ..., -.001
        ({}, (0, 0, 0, 0), (0, 3, 3, 0), [0, 0]),
        # and added to the server's: (20, 20, 20, 20) / 80 is the same for all, which is Eq. 5 again.
        ({}, (20, 0, 20, 10), (0, 20, 0, 10), [0, 1]),
        # (10, 50, 30, 10) / 100: -.01, -.1, -.24, -.1; -.09, -.2, -.15, -.2
        ({"floor": 0.0}, (10, 20, 20, 0), (0, 30, 10, 10), [0, 0]),
        ({"calibrate": False}, (90, 10, 0, 0), (5, 5, 0, 0), [0, 1]),
    ],
)
def test_selection_in_training_is_weighed_by_earlier_ones(
    settings: dict[str, Any], counts: Any, own: Any, expected: list[int]
) -> None:
    """Below Eq. 6: argmax (cos - 1) q_g."""
    batch = whole(2)
    assert small(**settings).choose(NEAR, batch, context(counts=counts, own=own)).tolist() == expected


def test_frequencies_count_the_server_and_the_client_itself() -> None:
    method = small(floor=0.01)
    found = method.frequency(context(counts=(6, 0, 2, 0), own=(0, 1, 1, 0)))
    np.testing.assert_allclose(found, np.array([6, 1, 3, 0]) / 10 + 0.01, rtol=1e-6)
    np.testing.assert_array_equal(method.frequency(context()), np.ones(G))


def test_a_batch_may_take_the_group_of_most_of_its_samples() -> None:
    """Padding has no vote, and ties go to the first group."""
    scores = torch.eye(G)[torch.tensor([3, 1, 1, 3, 3])]
    batch, method = whole(5), small(majority=True)
    assert method.choose(scores, batch, context()).tolist() == [3] * 5
    padded = batch._replace(weight=torch.tensor([1.0, 1, 1, 0, 0]))
    assert method.choose(scores, padded, context()).tolist() == [1] * 5
    tied = batch._replace(weight=torch.tensor([1.0, 1, 1, 1, 0]))
    assert method.choose(scores, tied, context()).tolist() == [1] * 5
    assert method.count(torch.tensor([1] * 5), padded).tolist() == [0, 3, 0, 0]
    # Only in training.
    params = some(method)
    expected = cosines(whole(20).frozen["query"], params["keys"]).argmax(1)
    assert len(set(expected)) > 1
    np.testing.assert_array_equal(method.prompts.select(MODEL, params, whole(20), context()), expected)


# ---- the objective


def pooled(params: Params, x: Tensor, chosen: list[int] | None, shared: bool = True) -> Tensor:
    """Layer by layer, sample by sample: the mean of cls and the group's tokens behind the final norm."""
    found = []
    for i, h in enumerate(MODEL.embed(W, x)):
        cls, groups, standing, patches = h[:1], h[:0], h[:0], h[1:]
        for layer in range(DEPTH):
            if shared and f"shared.{layer}" in params:
                standing = torch.cat([params[f"shared.{layer}"], standing])
            if chosen is not None and f"group.{layer}" in params:
                groups = torch.cat([params[f"group.{layer}"][chosen[i]], groups])
            sizes = [1, len(groups), len(standing), len(patches)]
            tokens = torch.cat([cls, groups, standing, patches])[None]
            cls, groups, standing, patches = MODEL.block(W, f"body.blocks.{layer}", tokens)[0].split(sizes)
        assert len(groups) == (0 if chosen is None else LENGTH * 2)
        found.append(MODEL.norm(W, torch.cat([cls, groups])).mean(0))
    return torch.stack(found)


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


def test_block_one_is_a_vit_with_prompts_that_stay() -> None:
    """Eq. 10: no group prompts, plain cross-entropy."""
    method, batch = small(), whole()
    params, ctx = some(method), context(block(small(), "shared"))
    expected = MODEL.features(W, batch.x, {0: params["shared.0"], 1: params["shared.1"]}, "stay")
    torch.testing.assert_close(method.tuning.features(MODEL, params, batch, ctx), expected)
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


def key_gradient(keys: np.ndarray, query: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of the mean of -cos: d cos / dk = (q^ - cos k^) / |k|."""
    found = np.zeros_like(keys)
    for q, g in zip(unit(query), chosen, strict=True):
        k = unit(keys[g])
        found[g] -= (q - (q @ k) * k) / np.linalg.norm(keys[g]) / len(query)
    return found


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
    extra = method.prepare(MODEL, params, batch, ctx)
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
    assert [bool(method.prepare(MODEL, params, whole(2), context(p))) for p in method.phases(1)] == kept


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


# ---- server


def updates(method: Sgpt, sizes: tuple[int, ...], selected: Any) -> list[Update]:
    return [
        Update(i, {}, some(method, 10 + i), n, {} if s is None else {"selected": torch.tensor(s, dtype=torch.float32)})
        for i, (n, s) in enumerate(zip(sizes, selected, strict=True))
    ]


def numbers(values: list[Tensor]) -> np.ndarray:
    return np.stack([v.double().numpy() for v in values])


def test_server_rule() -> None:
    """Group 0 by selections (60, 20, 0 of 80), 1 by one client alone, 2 is rare with 50, 3 was never selected."""
    method = small(key_momentum=0.25, prompt_momentum=0.75)
    state = {**some(method), "counts": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    sent = updates(method, (2, 5, 3), [(60, 0, 1, 0), (20, 0, 40, 0), (0, 51, 9, 0)])
    new = method.aggregate(state, sent)
    assert set(new) == set(state)
    for name in (*SHARED, *GROUP, *HEAD):
        mean = np.tensordot([0.2, 0.5, 0.3], numbers([u.up[name] for u in sent]), 1)
        rate = 0.75 if name in GROUP else 0
        expected = rate * state[name].double().numpy() + (1 - rate) * mean
        np.testing.assert_allclose(new[name], expected, rtol=1e-5, atol=1e-6)
        assert new[name].dtype == torch.float32
    keys = numbers([u.up["keys"] for u in sent])
    weights = np.array([[0.75, 0, 1 / 3, 1 / 3], [0.25, 0, 1 / 3, 1 / 3], [0, 1, 1 / 3, 1 / 3]])
    mean = np.einsum("cg,cgw->gw", weights, keys)
    np.testing.assert_allclose(new["keys"], 0.25 * state["keys"].numpy() + 0.75 * mean, rtol=1e-5, atol=1e-6)
    assert new["counts"].tolist() == [81, 53, 53, 4]
    assert torch.equal(method.down(new, 0)["counts"], new["counts"])


def test_table_4_without_momentum_and_with_keys_averaged_by_samples() -> None:
    method = small(key_momentum=0, prompt_momentum=0, key_weights="samples")
    state = {**some(method), "counts": torch.zeros(G)}
    sent = updates(method, (1, 3), [(100, 0, 0, 0), (0, 100, 70, 0)])
    new = method.aggregate(state, sent)
    for name in ("keys", *GROUP):
        mean = np.tensordot([0.25, 0.75], numbers([u.up[name] for u in sent]), 1)
        np.testing.assert_allclose(new[name], mean, rtol=1e-5, atol=1e-6)
    assert new["counts"].tolist() == [100, 100, 70, 0]


def test_from_how_many_selections_on_clients_weigh_by_them() -> None:
    state = {**some(small()), "counts": torch.zeros(G)}
    sent = updates(small(), (1, 1), [(2, 0, 0, 0), (0, 0, 0, 0)])
    by_selections = small(rare=1, key_momentum=0).aggregate(state, sent)["keys"]
    uniform = small(rare=2, key_momentum=0).aggregate(state, sent)["keys"]
    keys = [u.up["keys"] for u in sent]
    torch.testing.assert_close(by_selections[0], keys[0][0])
    torch.testing.assert_close(uniform[0], (keys[0][0] + keys[1][0]) / 2)
    for found in (by_selections, uniform, small(rare=0, key_momentum=0).aggregate(state, sent)["keys"]):
        torch.testing.assert_close(found[1:], (keys[0][1:] + keys[1][1:]) / 2)


def test_clients_that_selected_nothing() -> None:
    """Shared prompts alone have no keys; zero epochs select nothing."""
    for method in (small(training="shared"), small(epochs=0)):
        state = {**some(method), "counts": torch.zeros(G)}
        new = method.aggregate(state, updates(method, (1, 2), [None, None]))
        assert set(new) == set(state)
        assert all(p.isfinite().all() for p in new.values())
        assert not new["counts"].any()


def test_the_order_of_updates_does_not_show() -> None:
    method = small()
    state = {**some(method), "counts": torch.tensor([2.0**24, 1.0, 0.0, 7.0])}
    sent = updates(method, (7, 3, 11), [(70, 1, 1, 0), (13, 0, 90, 0), (1, 5, 33, 0)])
    first = method.aggregate(state, sent)
    for order in itertools.permutations(sent):
        again = method.aggregate(state, list(order))
        for name, p in first.items():
            assert torch.equal(p, again[name]), name


def test_the_server_starts_with_no_selections() -> None:
    method = small()
    init = method.tuning.init(MODEL, 0)
    state = method.begin(MODEL, init, 0)
    assert set(state) == {*init, "counts"}
    assert state["counts"].tolist() == [0] * G
    assert set(method.start(init, state, {}, {})) == set(init)


# ---- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shared_layers": (0, 5)}, r"method\.shared_layers = \[0, 5\] must be different layers of .*: 0 to 4$"),
        ({"group_layers": (-1,)}, r"method\.group_layers = \[-1\] must be different layers of .*: 0 to 4$"),
        ({"group_layers": (3, 3)}, r"method\.group_layers = \[3, 3\] must be different layers"),
        ({"group_layers": (1, 3)}, r"method\.group_layers = \[1, 3\] must all come behind .* is layer 1$"),
        ({"shared_layers": (0, 3)}, r"method\.group_layers = \[2, 4\] must all come behind .* is layer 3$"),
        ({"query": 6}, r'method\.query = 6 must be "last" or a number of layers of .*: 1 to 5$'),
        ({"query": 0}, r"method\.query = 0 must be"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        small(**settings).tuning.check(MODEL)
    assert "\n" not in str(caught.value)


def test_settings_that_do_fit() -> None:
    for settings in ({}, {"query": 1}, {"query": DEPTH}, {"training": "group", "group_layers": (0,)}):
        small(**settings).tuning.check(MODEL)


def test_a_backbone_without_tokens() -> None:
    with pytest.raises(UserError, match=r'backbone\.name = "linear" takes no tokens'):
        small().tuning.check(linear())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (NAME, {"group_layers": ()}, r'method\.group_layers = \[\] must .*; method\.training="shared" does without$'),
        (NAME, {"shared_layers": ()}, r'method\.shared_layers = \[\] must .*; method\.training="group" does without$'),
        (NAME, {"training": "shared", "shared_layers": ()}, r"method\.shared_layers = \[\] must"),
        (f"{NAME}+pt", {}, r"method\.name: Sgpt has a tuning of its own, and takes none around it$"),
        (f"{NAME}+vpt", {}, r"has a tuning of its own, and takes no other$"),
        (NAME, {"training": "both"}, r"method\.training = 'both' should be 'bcd', "),
        (NAME, {"groups": 0}, r"method\.groups = 0 should be greater than or equal to 1$"),
        (NAME, {"key_momentum": 1}, r"method\.key_momentum = 1 should be less than 1$"),
    ],
)
def test_settings_that_contradict(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        create(name, settings)
    assert "\n" not in str(caught.value)


# ---- runs


def test_a_run_without_groups_has_no_clustering(tmp_path: Path) -> None:
    for training, groups in (("shared", False), ("bcd", True)):
        done = promptfed.run(
            method={"name": "sgpt", "training": training, "groups": 2, "epochs": 1},
            dataset={"name": "shapes", "limit": 48},
            partition="domain",
            backbone="vit-mini",
            rounds=1,
            engine={"workers": 1},
            out=tmp_path / training,
        )
        assert ("clustering" in done.metrics) is groups


# ---- the suite


@pytest.mark.parametrize(
    "settings", [{"training": "joint", "majority": True, "query": 2}, {"training": "shared"}], ids=str
)
def test_conformance(settings: dict[str, Any]) -> None:
    few = {"groups": 3, "rare": 4, "epochs": 1, "shared_layers": (0,), "group_layers": (4, 5)}
    check_method(NAME, backbone="vit-mini", size=32, **few, **settings)
