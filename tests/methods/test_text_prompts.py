"""Methods on text prompts of a CLIP: each rule against numbers computed apart, from the two towers alone."""

import math

import numpy as np
import pytest
import torch
from clip_by_hand import (
    MODEL,
    SCALE,
    X,
    batch_of,
    context,
    cross_entropy,
    image,
    loss_of,
    near,
    text,
    unit,
    zero_shot,
)
from scipy.optimize import minimize
from torch.nn import functional as F

from promptfed import models
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.phases import Update
from promptfed.training import Samples, Work, train
from promptfed.tunings.pixels import PixelPrompt
from promptfed.tunings.transport import transport

# ---- KgCoOp


@pytest.mark.parametrize("knowledge", [8.0, 0.5])
def test_kgcoop_adds_the_squared_distance_to_the_zero_shot_features(knowledge: float) -> None:
    params = near(create("kgcoop", {"context": 2}).tuning.init(MODEL, 0), 1)
    own, given = text(params["context"]), zero_shot()
    distance = np.mean([sum((own[c] - given[c]) ** 2) for c in range(3)])
    expected = cross_entropy(SCALE * image() @ own.T) + knowledge * distance
    assert loss_of("kgcoop", params, context=2, knowledge=knowledge) == pytest.approx(expected, rel=1e-4)


# ---- ProGrad


def two_gradients(vectors: torch.Tensor, y: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of cross-entropy, and of KL(zero-shot || prompted), one after the other."""
    given = torch.from_numpy(SCALE * image() @ zero_shot().T).softmax(1)
    found = []
    for which in range(2):
        p = vectors.clone().requires_grad_()
        features = F.normalize(MODEL.text_tower.features(MODEL.weights, MODEL.sentences(context=len(p)), p), dim=-1)
        said = (SCALE * torch.from_numpy(image()) @ features.T).log_softmax(1)
        task = -said[range(len(y)), y].mean()
        general = (given * (given.log() - said)).sum(1).mean()
        found.append(torch.autograd.grad((task, general)[which], p)[0].double().numpy())
    return found[0], found[1]


@pytest.mark.parametrize("conflict", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_step_of_prograd_leaves_out_what_opposes_zero_shot(conflict: bool, share: float) -> None:
    method = create("prograd", {"context": 2, "alignment": share, "lr": 0.1, "momentum": 0.0, "batch_size": 4})
    params = near(method.tuning.init(MODEL, 0), 1)
    for seed in range(20):  # until labels are found that oppose zero-shot, or do not
        y = np.random.default_rng(seed).integers(MODEL.classes, size=4).tolist()
        task, general = two_gradients(params["context"], y)
        product = (task * general).sum()
        if (product < 0) == conflict:
            break
    assert bool(product < 0) is conflict
    direction = task - share * product / (general**2).sum() * general if conflict else task

    still = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    data = Samples(torch.empty(4, 0), torch.tensor(y), *still, {"features": torch.from_numpy(image())})
    phases = (method.phase(epochs=1),)
    done = train(method, MODEL, [Work(0, data, params, {}, {})], phases, seed=0, round=1)[0]
    np.testing.assert_allclose(done.params["context"], params["context"].numpy() - 0.1 * direction, atol=2e-5)
    assert done.loss == pytest.approx(cross_entropy(SCALE * image() @ text(params["context"]).T, y), rel=1e-4)


# ---- PromptFolio


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_promptfolio_mixes_the_predictions_of_both_contexts(share: float) -> None:
    method = create("promptfolio", {"context": 2, "own_share": share})
    params = near(method.tuning.init(MODEL, 0), 1)
    logits = method.tuning.logits(MODEL, params, batch_of(), context()).numpy()
    for i, x in enumerate(image()):
        for c in range(3):
            said = ((1 - share) * text(params["context"])[c] + share * text(params["own"])[c]) @ x
            assert logits[i, c] == pytest.approx(SCALE * said, abs=1e-3)


@pytest.mark.parametrize("name", ["promptfolio", "fedpgp", "fedotp"])
def test_only_the_shared_context_is_sent_and_averaged(name: str) -> None:
    method = create(name, {"context": 2})
    init = method.tuning.init(MODEL, 0)
    assert set(method.shared(init)) == {"context"}
    assert set(method.kept(init)) == set(init) - {"context"}
    ups = [method.upload(near(init, seed), context()) for seed in (1, 2)]
    state = method.aggregate(method.begin(MODEL, init, 0), [Update(0, {}, ups[0], 1), Update(1, {}, ups[1], 3)])
    np.testing.assert_allclose(state["context"], 0.25 * ups[0]["context"] + 0.75 * ups[1]["context"], atol=1e-6)


@pytest.mark.parametrize("name", ["promptfolio", "fedpgp"])
def test_a_client_that_never_trains_is_served_by_the_shared_context(name: str) -> None:
    method = create(name, {"context": 2})
    init = near(method.tuning.init(MODEL, 0), 1)
    common = method.common(method.begin(MODEL, init, 0))
    assert common is not None
    assert common.keys() == init.keys()
    logits = method.tuning.logits(MODEL, common, batch_of(), context())
    np.testing.assert_allclose(logits, SCALE * image() @ text(init["context"]).T, atol=1e-3)


# ---- FedPGP


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (0.3, 0.1)])
def test_fedpgp_contrasts_the_shared_context_with_the_clients_own(mu: float, temperature: float) -> None:
    settings = {"context": 3, "rank": 2, "mu": mu, "temperature": temperature}
    params = near(create("fedpgp", settings).tuning.init(MODEL, 0), 1, 0.3)
    assert {name: tuple(p.shape) for name, p in params.items()} == {
        "context": (3, 128), "own.u": (3, 2), "own.v": (2, 128),
    }  # fmt: skip
    shared, own = text(params["context"]), text(params["context"] + params["own.u"] @ params["own.v"])
    given, term = zero_shot(), 0.0
    for c in range(3):
        positive, negative = math.exp(shared[c] @ given[c] / temperature), math.exp(shared[c] @ own[c] / temperature)
        term -= math.log(positive / (positive + negative)) / 3
    expected = cross_entropy(SCALE * image() @ own.T) + mu * term
    assert loss_of("fedpgp", params, **settings) == pytest.approx(expected, rel=1e-4)


def test_fedpgp_starts_from_the_shared_context() -> None:
    method = create("fedpgp", {"context": 2})
    init = method.tuning.init(MODEL, 0)
    logits = method.tuning.logits(MODEL, init, batch_of(), context())
    np.testing.assert_allclose(logits, SCALE * image() @ text(init["context"]).T, atol=1e-3)


# ---- FedCLIP


def test_fedclip_weighs_the_coordinates_of_image_features() -> None:
    method = create("fedclip")
    params = near(method.tuning.init(MODEL, 0), 1)
    w = {name.removeprefix("adapter."): p.double().numpy() for name, p in params.items()}
    logits = method.tuning.logits(MODEL, params, batch_of(), context()).numpy()
    for i, x in enumerate(image()):
        scores = w["out.weight"] @ np.tanh(w["in.weight"] @ x + w["in.bias"]) + w["out.bias"]
        attention = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(logits[i], SCALE * zero_shot() @ unit(attention * x), atol=1e-3)


# ---- CoCoOp


def test_cocoop_shifts_the_context_by_what_the_meta_net_makes_of_the_image() -> None:
    method = create("cocoop", {"context": 2})
    params = near(method.tuning.init(MODEL, 0), 1)
    assert params["meta.in.weight"].shape == (128 // 16, 128)
    logits = method.tuning.logits(MODEL, params, batch_of(), context()).numpy()
    for i, x in enumerate(torch.from_numpy(image())):
        hidden = torch.clamp(params["meta.in.weight"] @ x + params["meta.in.bias"], min=0)
        shift = params["meta.out.weight"] @ hidden + params["meta.out.bias"]
        np.testing.assert_allclose(logits[i], SCALE * text(params["context"] + shift) @ x.numpy(), atol=1e-3)
    assert len({tuple(np.round(row, 3)) for row in logits}) == 4


def test_cocoop_starts_from_the_words_of_the_sentence() -> None:
    init = create("cocoop").tuning.init(MODEL, 0)
    assert torch.equal(init["context"], MODEL.words("a photo of a"))


# ---- PLOT and FedOTP


def best_plan(cost: np.ndarray, regularisation: float, mass: float, partial: bool) -> np.ndarray:
    """The same problem, given to a general solver."""
    rows, columns = cost.shape

    def objective(flat: np.ndarray) -> float:
        return float((flat * (cost.ravel() + regularisation * (np.log(flat) - 1))).sum())

    kept = rows if partial else rows - 1  # of equal totals, one equation follows from the others
    limits = [
        {"type": "ineq" if partial else "eq", "fun": lambda flat: 1 / rows - flat.reshape(cost.shape).sum(1)[:kept]},
        {"type": "eq", "fun": lambda flat: flat.reshape(cost.shape).sum(0) - mass / columns},
    ]
    start = np.full(cost.size, mass / cost.size)
    bounds = [(1e-12, 1)] * cost.size
    found = minimize(objective, start, method="SLSQP", bounds=bounds, constraints=limits, options={"ftol": 1e-14})
    assert found.success
    return np.asarray(found.x).reshape(cost.shape)


@pytest.mark.parametrize(("mass", "partial"), [(1.0, False), (0.6, True), (0.9, True)])
def test_the_plan_is_the_one_of_least_cost(mass: float, partial: bool) -> None:
    cost = torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(4))
    plans = transport(cost, 0.1, 500, mass, partial).numpy()
    for plan, c in zip(plans, cost.double().numpy(), strict=True):
        np.testing.assert_allclose(plan, best_plan(c, 0.1, mass, partial), atol=2e-4)
        np.testing.assert_allclose(plan.sum(0), [mass / 2] * 2, atol=1e-6)
        assert (plan.sum(1) <= 1 / 5 + 1e-5).all()
    assert (plans.sum(2) < 1 / 5 - 0.01).any() is np.bool_(partial)  # patches are left out


@pytest.mark.parametrize("partial", [False, True])
def test_a_plan_with_as_little_entropy_as_allowed_is_finite(partial: bool) -> None:
    cost = 0.7 + 0.6 * torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(4))
    plan = transport(cost, 0.01, 500, 0.8 if partial else 1.0, partial)
    assert plan.isfinite().all()
    torch.testing.assert_close(plan.sum(-2), torch.full((3, 2), 0.4 if partial else 0.5))


def patches() -> np.ndarray:
    """(4, V, d)"""
    tower = MODEL.image_tower
    h = tower.norm(MODEL.weights, tower.encode(MODEL.weights, tower.embed(MODEL.weights, X)))
    joint = unit((h @ MODEL.weights["body.image.proj"].T).numpy())
    np.testing.assert_allclose(joint[:, 0], image(), atol=1e-5)
    return joint[:, 1:]


@pytest.mark.parametrize(
    ("name", "settings", "mass"),
    [("plot", {"prompts": 3}, 1.0), ("fedotp", {"transported": 0.7}, 0.7), ("fedotp", {"transported": 1.0}, 1.0)],
)
def test_logits_are_similarities_summed_over_the_plan(name: str, settings: dict[str, float], mass: float) -> None:
    method = create(name, {"context": 2, "iterations": 30, **settings})
    params = near(method.tuning.init(MODEL, 0), 1)
    contexts = list(params["context"]) if name == "plot" else [params["context"], params["own"]]
    logits = method.tuning.logits(MODEL, params, batch_of(), context()).numpy()
    texts, seen = [text(p) for p in contexts], patches()
    for i in range(4):
        for c in range(3):
            similarity = np.array([[t[c] @ patch for t in texts] for patch in seen[i]])  # (V, N)
            plan = transport(torch.from_numpy(1 - similarity), 0.1, 30, mass, name == "fedotp").numpy()
            assert logits[i, c] == pytest.approx(SCALE * (plan * similarity).sum(), abs=2e-3)


def test_the_plan_is_a_constant_in_the_gradient() -> None:
    method = create("plot", {"context": 2, "prompts": 2, "iterations": 5})
    params = {name: p.requires_grad_() for name, p in near(method.tuning.init(MODEL, 0), 1).items()}
    logits = method.tuning.logits(MODEL, params, batch_of(), context())
    found = torch.autograd.grad(logits[0, 1], params["context"])[0]
    texts = torch.stack([method.tuning.text(MODEL, {"context": p})[1] for p in params["context"]])  # type: ignore[attr-defined]
    similarity = torch.from_numpy(patches())[0] @ texts.T
    plan = transport(1 - similarity.detach(), 0.1, 5)
    torch.testing.assert_close(found, torch.autograd.grad(SCALE * (plan * similarity).sum(), params["context"])[0])


def test_contrasts_of_frozen_patches_are_refused() -> None:
    method = create("moon+plot")
    with pytest.raises(UserError, match="those of this tuning are frozen"):
        method.check(MODEL, method.tuning.init(MODEL, 0))


# ---- FedTPG


def test_fedtpg_generates_the_context_from_the_class_names() -> None:
    method = create("fedtpg", {"context": 3, "heads": 2})
    params = near(method.tuning.init(MODEL, 0), 1)
    w = {name.removeprefix("generator."): p.double().numpy() for name, p in params.items()}
    names = zero_shot()
    keys, values = (names @ w[f"{part}.weight"].T + w[f"{part}.bias"] for part in ("key", "value"))
    mixed = np.zeros((3, 128))
    for m, query in enumerate(w["queries"]):
        for half in (slice(0, 64), slice(64, 128)):
            scores = np.exp([query[half] @ key[half] / 8 for key in keys])
            mixed[m, half] = sum(s * v[half] for s, v in zip(scores / scores.sum(), values, strict=True))
    hidden = np.maximum(mixed @ w["in.weight"].T + w["in.bias"], 0)
    vectors = torch.from_numpy(hidden @ w["out.weight"].T + w["out.bias"]).float()
    logits = method.tuning.logits(MODEL, params, batch_of(), context())
    np.testing.assert_allclose(logits, SCALE * image() @ text(vectors).T, atol=2e-3)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(UserError, match=r"^method.heads = 3 must divide 128, the width of the text tower$"):
        create("fedtpg", {"heads": 3}).tuning.check(MODEL)


# ---- all of them


NAMES = [
    "kgcoop",
    "prograd",
    "promptfolio",
    "fedpgp",
    "cocoop",
    "fedclip",
    "plot",
    "fedotp",
    "fedtpg",
    "fedprox+cocoop",
]


@pytest.mark.parametrize("name", NAMES)
def test_they_need_a_clip(name: str) -> None:
    with pytest.raises(UserError, match="has no text tower: a CLIP is needed"):
        create(name).tuning.check(models.build("vit-tiny", (3, 32, 32), 3, 0))


@pytest.mark.parametrize("name", ["promptfl+pt", "cocoop+pt", "plot+pt", "fedavg+fedclip+pt", "fedavg+maple+pt"])
def test_inside_a_pixel_prompt_they_predict_as_for_the_prompted_image(name: str) -> None:
    tuning = create(name, {"prompt_size": 2, **({"depth": 2} if "maple" in name else {})}).tuning
    assert isinstance(tuning, PixelPrompt)
    params = near(tuning.init(MODEL, 0), 1)
    prompted = batch_of()._replace(x=X + tuning.canvas(MODEL, params, torch.zeros(2)))
    expected = tuning.inner.logits(MODEL, params, prompted, context())
    torch.testing.assert_close(tuning.logits(MODEL, params, batch_of(), context()), expected)
