"""Methods whose clients have prompts or features of their own: each rule against numbers computed apart."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from clip_by_hand import (
    MODEL,
    SCALE,
    X,
    Y,
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

from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.dpfpl import DpFpl, factors
from promptfed.methods.fedmgp import FedMgp
from promptfed.methods.fedpha import FedPha, project
from promptfed.methods.pfedmoap import PFedMoap
from promptfed.methods.pfedprompt import PFedPrompt
from promptfed.params import Params
from promptfed.phases import Context, Update
from promptfed.training import Samples, Work, train

STILL = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)


def work(params: Params, client: int = 0) -> Work:
    """The four images, as their features."""
    data = Samples(torch.empty(4, 0), torch.tensor(Y), *STILL, {"features": torch.from_numpy(image())})
    return Work(client, data, params, {}, {})


# ---- pFedPrompt


def store(**settings: Any) -> tuple[PFedPrompt, Params]:
    method = create("pfedprompt", {"context": 2, "shots": 2, **settings})
    assert isinstance(method, PFedPrompt)
    init = method.tuning.init(MODEL, 0)
    return method, {**init, **method.tuning.stored(MODEL, init, iter([batch_of()]))}


def test_pfedprompt_stores_the_first_features_of_each_class() -> None:
    _, params = store()
    expected = np.zeros((3, 2, 128))
    expected[0, 0], expected[1, 0], expected[2, 0], expected[0, 1] = image()
    np.testing.assert_allclose(params["store.keys"], expected, atol=1e-6)
    assert params["store.filled"].tolist() == [[1, 1], [1, 0], [1, 0]]
    _, first = store(shots=1)
    np.testing.assert_allclose(first["store.keys"][:, 0], image()[:3], atol=1e-6)


def test_pfedprompt_adds_the_nearness_of_stored_features_to_the_text() -> None:
    method, params = store(own_weight=0.7, sharpness=3.0)
    new = near({"f": torch.from_numpy(image())}, 1)["f"]
    said = method.tuning.head(MODEL, params, new).numpy()
    for i, f in enumerate(new.numpy()):
        for c in range(3):
            stored = [math.exp(-3 * (1 - f @ image()[j])) for j in range(4) if Y[j] == c]
            expected = SCALE * f @ text(params["context"])[c] + 0.7 * sum(stored)
            assert said[i, c] == pytest.approx(expected, abs=1e-3)


def test_pfedprompt_trains_by_the_text_alone_and_serves_strangers_with_it() -> None:
    method, params = store()
    plain = SCALE * image() @ text(params["context"]).T
    assert loss_of("pfedprompt", params, context=2, shots=2) == pytest.approx(cross_entropy(plain), rel=1e-4)
    common = {**params, **method.common(method.begin(MODEL, params, 0))}
    np.testing.assert_allclose(method.tuning.logits(MODEL, common, batch_of(), context()), plain, atol=1e-3)


def test_what_a_client_stores_is_neither_trained_nor_sent() -> None:
    method, params = store(epochs=1)
    assert set(method.shared(params)) == {"context"}
    assert set(method.kept(params)) == {"store.keys", "store.filled"}
    assert method.roles() == ("body",)
    assert method.enrolls
    assert method.personal


# ---- pFedMoAP


def moap(**settings: Any) -> tuple[PFedMoap, Params]:
    method = create("pfedmoap", {"context": 2, "experts": 2, "gate_width": 3, **settings})
    assert isinstance(method, PFedMoap)
    return method, near(method.tuning.init(MODEL, 0), 1, 0.3)


def test_pfedmoap_weighs_experts_by_attention_of_the_image() -> None:
    method, params = moap(own_weight=0.3)
    logits = method.tuning.logits(MODEL, params, batch_of(), context()).numpy()
    experts = [text(p) for p in (params["context"], *params["experts"])]
    for i, f in enumerate(image()):
        query = params["gate.query"].numpy() @ f
        for c in range(3):
            scores = np.exp([query @ (params["gate.key"].numpy() @ h[c]) / math.sqrt(3) for h in experts])
            mixture = sum(s * h[c] for s, h in zip(scores / scores.sum(), experts, strict=True))
            expected = SCALE * f @ (0.3 * experts[0][c] + mixture)
            assert logits[i, c] == pytest.approx(expected, abs=2e-3)


def test_the_features_of_pfedmoaps_experts_are_computed_once_for_a_phase() -> None:
    method, params = moap()
    found = method.client_constants(MODEL, params, context())["experts"]
    np.testing.assert_allclose(found, [text(p) for p in params["experts"]], atol=1e-5)
    ctx = Context({}, {}, None, torch.tensor(4), torch.tensor([2, 1, 1]), {"experts": torch.zeros_like(found)})
    given = method.tuning.logits(MODEL, params, batch_of(), ctx)
    assert not torch.allclose(given, method.tuning.logits(MODEL, params, batch_of(), context()))


def test_pfedmoaps_server_hands_on_the_nearest_prompts() -> None:
    method, init = moap(experts=2)
    state = method.begin(MODEL, init, 0)
    assert torch.equal(method.down(state, 0)["experts"], torch.stack([init["context"]] * 2))
    ups = {client: {"context": torch.full((2, 128), value)} for client, value in enumerate((0.0, 5.0, 1.0, 2.0))}
    state = method.aggregate(state, [Update(client, {}, up, 1) for client, up in ups.items()])
    assert [float(p.mean()) for p in method.down(state, 0)["experts"]] == [1.0, 2.0]
    assert [float(p.mean()) for p in method.down(state, 1)["experts"]] == [2.0, 1.0]
    few = method.aggregate(method.begin(MODEL, init, 0), [Update(3, {}, ups[3], 1)])
    assert [float(p.mean()) for p in method.down(few, 0)["experts"]] == [2.0, 2.0]  # repeated


def test_a_client_of_pfedmoap_trains_from_the_mean_and_predicts_with_its_own_prompt() -> None:
    method, init = moap()
    ups = {client: {"context": torch.full((2, 128), value)} for client, value in ((4, 1.0), (6, 5.0))}
    state = method.begin(MODEL, init, 0)
    assert torch.equal(method.down(state, 6)["context"], init["context"])
    state = method.aggregate(state, [Update(client, {}, up, client - 3) for client, up in ups.items()])
    down = method.down(state, 6)
    assert torch.equal(down["context"], torch.full((2, 128), (1 * 1.0 + 3 * 5.0) / 4))
    for memory in ({}, ups[6]):
        started, served = (hook(init, down, {}, memory) for hook in (method.start, method.serve))
        assert torch.equal(started["context"], down["context"])
        assert torch.equal(served["context"], memory.get("context", down["context"]))
        assert torch.equal(started["experts"], served["experts"])
        assert torch.equal(served["experts"], torch.ones(2, 2, 128))
    assert set(method.shared(init)) == {"context"}
    assert set(method.kept(init)) == {"gate.query", "gate.key"}


# ---- DP-FPL


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_step_of_dp_fpl_moves_the_factors_by_clipped_and_noised_gradients(noise: float) -> None:
    method = create("dp-fpl", {"context": 3, "rank": 2, "clip": 0.01, "noise": noise, "lr": 0.1, "momentum": 0.0})
    assert isinstance(method, DpFpl)
    params = near(method.tuning.init(MODEL, 0), 1)
    p = {name: v.clone().requires_grad_() for name, v in params.items()}
    grads = torch.autograd.grad(method.loss(MODEL, p, batch_of(), context())[0], [p["context"], p["own"]])
    left, values, right = np.linalg.svd(params["own"].double().numpy(), full_matrices=False)
    u, v = left[:, :2] * np.sqrt(values[:2]), np.sqrt(values[:2])[:, None] * right[:2]
    r = params["own"].numpy() - u @ v
    g = grads[1].double().numpy()
    drawn = [np.random.default_rng(7).standard_normal(shape) for shape in ((3, 2), (2, 128))]
    sign = np.sign(u[0] * factors(params["own"], 2)[0][0].numpy())  # of singular vectors, which is arbitrary
    normal = iter([drawn[0] * sign, drawn[1] * sign[:, None]])
    moved = []
    for factor, gradient in ((u, g @ v.T), (v, u.T @ g)):
        clipped = gradient * min(1, 0.01 / np.linalg.norm(gradient))
        moved.append(factor - 0.1 * (clipped + noise * 0.01 * next(normal)))
    assert np.linalg.norm(g @ v.T) > 0.01  # it is clipped

    given = iter(drawn)
    direction = method.step(
        lambda _: dict(zip(params, grads, strict=True)),
        params,
        method.phases(1)[0],
        lambda *shape: torch.from_numpy(next(given)).float(),
    )
    np.testing.assert_allclose(params["own"] - 0.1 * direction["own"], moved[0] @ moved[1] + r, atol=1e-5)
    assert torch.equal(direction["context"], grads[0])


def test_the_noise_of_a_step_is_the_clients_own_and_repeatable() -> None:
    method = create("dp-fpl", {"context": 3, "rank": 2, "noise": 1.0, "epochs": 1, "batch_size": 2})
    init = method.tuning.init(MODEL, 0)

    def trained(*clients: int, round: int = 1) -> list[torch.Tensor]:
        block = [work(init, client) for client in clients]
        return [done.params["own"] for done in train(method, MODEL, block, method.phases(1), seed=0, round=round)]

    first, second = trained(0, 1)
    torch.testing.assert_close(first, trained(0)[0], atol=1e-5, rtol=0)
    assert (first - second).abs().max() > 1e-3
    assert (first - trained(0, round=2)[0]).abs().max() > 1e-3


def test_dp_fpl_adds_both_contexts() -> None:
    method = create("dp-fpl", {"context": 2})
    params = near(method.tuning.init(MODEL, 0), 1)
    expected = SCALE * image() @ text(params["context"] + params["own"]).T
    np.testing.assert_allclose(method.tuning.logits(MODEL, params, batch_of(), context()), expected, atol=1e-3)
    common = method.common({"context": params["context"]})
    assert common is not None
    expected = SCALE * image() @ text(params["context"]).T
    np.testing.assert_allclose(method.tuning.logits(MODEL, common, batch_of(), context()), expected, atol=1e-3)


# ---- FedPHA


def pha(**settings: Any) -> FedPha:
    method = create("fedpha", {"context": 3, "lengths": (2, 4), **settings})
    assert isinstance(method, FedPha)
    return method


def test_fedpha_gives_clients_contexts_of_their_own_lengths() -> None:
    method = pha()
    init = method.tuning.init(MODEL, 0)
    state = method.begin(MODEL, init, 0)
    starts = [method.start(init, method.down(state, client), {}, {}) for client in range(3)]
    assert [tuple(p["own"].shape) for p in starts] == [(2, 128), (4, 128), (2, 128)]
    kept = near(method.kept(starts[1]), 1)
    assert torch.equal(method.start(init, method.down(state, 1), kept, {})["own"], kept["own"])
    common = method.common(state)
    assert common is not None
    assert torch.equal(method.start(init, common, kept, {})["own"], init["context"])


@pytest.mark.parametrize("lengths", [(), (4, 0)])
def test_every_context_of_fedpha_has_a_vector(lengths: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^method\.lengths = \[.*\] must be one or more numbers from 1 on$"):
        pha(lengths=lengths)


def test_clients_whose_parameters_differ_in_shape_may_share_a_block() -> None:
    method = pha(epochs=1)
    init = method.tuning.init(MODEL, 0)
    starts = [method.start(init, method.down(method.begin(MODEL, init, 0), client), {}, {}) for client in range(2)]
    block = [work(params, client) for client, params in enumerate(starts)]
    together = train(method, MODEL, block, method.phases(1), seed=0, round=1)
    for one, done in zip(block, together, strict=True):
        alone = train(method, MODEL, [one], method.phases(1), seed=0, round=1)[0]
        assert torch.equal(done.params["own"], alone.params["own"])
        assert not torch.equal(done.params["own"], one.params["own"])


@pytest.mark.parametrize(("removed", "kept"), [(0.0, [0, 1, 2, 3]), (0.2, [0, 1, 2, 3]), (0.3, [1, 2, 3]), (1.0, [])])
def test_the_projection_removes_the_shared_contexts_main_directions(removed: float, kept: list[int]) -> None:
    g = np.random.default_rng(0)
    own, shared = g.normal(size=(3, 10)), g.normal(size=(4, 10))
    found = project(torch.from_numpy(own), torch.from_numpy(shared), removed).numpy()
    values, vectors = np.linalg.eigh(shared.T @ shared)
    ordered = vectors[:, np.argsort(values)[::-1]].T
    expected = sum((np.outer(own @ ordered[i], ordered[i]) for i in kept), np.zeros((3, 10)))
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_fedpha_predicts_with_the_own_context_and_holds_it_between_its_projection_and_the_shared_one() -> None:
    settings = {"context": 3, "lengths": (2, 4), "pull": 0.4, "push": 0.7, "margin": 0.9, "removed": 0.4}
    method = pha(**settings)
    params = near(method.tuning.init(MODEL, 0), 1, 0.3)
    shared, own = text(params["context"]), text(params["own"])
    projected = text(project(params["own"], params["context"], 0.4))
    apart = [float(np.linalg.norm(own[c] - shared[c])) for c in range(3)]
    assert 0 < min(apart) < 0.9
    task = sum(cross_entropy(SCALE * image() @ h.T) for h in (own, shared))
    expected = task + 0.4 * ((own - projected) ** 2).mean() + 0.7 * sum(max(0, 0.9 - far) for far in apart) / 3
    assert loss_of("fedpha", params, **settings) == pytest.approx(expected, rel=1e-4)
    logits = method.tuning.logits(MODEL, params, batch_of(), context())
    np.testing.assert_allclose(logits, SCALE * image() @ own.T, atol=1e-3)


# ---- clients that have not trained


@pytest.mark.parametrize("name", ["promptfolio", "fedotp", "fedpha", "dp-fpl", "fedmgp"])
def test_a_client_without_an_own_part_predicts_with_the_common_model(name: str) -> None:
    method = create(name)
    init = method.tuning.init(MODEL, 0)
    state = near(method.begin(MODEL, init, 0), 1)
    common, down = method.common(state), method.down(state, 2)
    assert common is not None
    own = next(iter(method.kept(init)))
    for hook in (method.serve, method.start):
        assert torch.equal(hook(init, common, {}, {})[own], common[own])
    assert torch.equal(method.serve(init, down, {}, {})[own], common[own])
    started = method.start(init, down, {}, {})
    assert started[own].shape != common[own].shape or not torch.equal(started[own], common[own])
    trained = near(method.kept(started), 2)
    assert torch.equal(method.serve(init, down, trained, {})[own], method.start(init, down, trained, {})[own])


# ---- FedMGP


def mgp(**settings: Any) -> tuple[FedMgp, Params]:
    method = create("fedmgp", {"context": 2, "tokens": 2, "groups": 3, "selected": 2, **settings})
    assert isinstance(method, FedMgp)
    return method, near(method.tuning.init(MODEL, 0), 1)


def with_tokens(tokens: torch.Tensor) -> np.ndarray:
    """(4, d): image features with tokens after cls at the first layer."""
    return unit((MODEL.image_tower.features(MODEL.weights, X, tokens) @ MODEL.weights["body.image.proj"].T).numpy())


def test_fedmgp_predicts_with_the_mean_of_groups_and_trains_each_and_drives_them_apart() -> None:
    method, params = mgp(diversity=0.6)
    images, texts = [with_tokens(p) for p in params["own.image"]], [text(p) for p in params["own.text"]]
    each = [SCALE * f @ h.T for f, h in zip(images, texts, strict=True)]
    np.testing.assert_allclose(method.tuning.logits(MODEL, params, batch_of(), context()), sum(each) / 3, atol=2e-3)
    pairs = [(0, 1), (0, 2), (1, 2)]
    alike = sum((z[a] * z[b]).sum(-1).mean() for z in (images, texts) for a, b in pairs) / 3
    found = float(method.loss(MODEL, params, batch_of(), context())[0])
    assert found == pytest.approx(sum(map(cross_entropy, each)) / 3 + 0.6 / 2 * alike, rel=1e-4)


def drawn(method: FedMgp, params: Params, down: Params, round: int) -> list[int]:
    ctx = Context(down, {}, None, torch.tensor(4), torch.tensor([2, 1, 1]), draws=(0, round, 5))
    at: list[int] = method.keep(MODEL, params, ctx)["chosen"].tolist()
    sent = method.upload(params, ctx)
    for name in ("text", "image"):  # what is sent is what is remembered
        assert torch.equal(sent[f"shared.{name}"], params[f"own.{name}"][at])
    return at


def test_fedmgp_sends_groups_drawn_by_their_likeness_to_the_shared_ones() -> None:
    method, params = mgp(selected=1, temperature=0.25)
    down = {name: p for name, p in near(params, 2, 0.02).items() if name.startswith("shared.")}
    for name in ("text", "image"):  # the second group is the shared one, the third is opposed to it
        params[f"own.{name}"][1], params[f"own.{name}"][2] = down[f"shared.{name}"][0], -down[f"shared.{name}"][0]
    flat = {at: torch.cat([params["own.image"][at].flatten(), params["own.text"][at].flatten()]) for at in range(3)}
    weights = np.exp([float(flat[at] @ flat[1] / flat[at].norm() / flat[1].norm()) / 0.25 for at in range(3)])
    counts = np.bincount([drawn(method, params, down, round)[0] for round in range(300)], minlength=3)
    np.testing.assert_allclose(counts / 300, weights / weights.sum(), atol=0.08)
    assert drawn(method, params, down, 3) == drawn(method, params, down, 3)


def test_fedmgp_draws_groups_by_the_nearest_of_the_shared_ones() -> None:
    method, params = mgp(selected=2, temperature=0.01)
    down = {name: p.clone() for name, p in params.items() if name.startswith("shared.")}
    for name in ("text", "image"):  # one shared group is the first own one, the other is opposed to it
        own, shared = params[f"own.{name}"], down[f"shared.{name}"]
        shared[0], shared[1] = own[0], -own[0]
        own[2] = -own[0]
        own[1] = own[0].flip(0)  # near neither
    assert all(drawn(method, params, down, round) == [0, 2] for round in range(20))
    assert method.unmoved(params, Context(down, {}, None, torch.tensor(4), torch.ones(3))).keys() == down.keys()


def test_in_fedmgp_what_the_server_has_replaces_what_the_client_sent() -> None:
    method, params = mgp()
    init, down = method.tuning.init(MODEL, 0), {name: p + 1 for name, p in method.shared(params).items()}
    first = method.start(init, down, {}, {})
    assert torch.equal(first["own.text"][:2], down["shared.text"])
    assert torch.equal(first["own.text"][2], init["own.text"][2])
    later = method.start(init, down, {**method.kept(params), "chosen": torch.tensor([0, 2])}, {})
    assert torch.equal(later["own.image"][[0, 2]], down["shared.image"])
    assert torch.equal(later["own.image"][1], params["own.image"][1])
    common = method.common(down)
    assert common is not None
    assert torch.equal(method.start(init, common, method.kept(params), {})["own.text"], down["shared.text"][[0, 1, 0]])


def test_fedmgp_keeps_a_group_to_itself() -> None:
    with pytest.raises(UserError, match=r"^method\.selected = 3 must be less than method\.groups = 3$"):
        create("fedmgp", {"groups": 3, "selected": 3})


# ---- PromptSRC


def test_promptsrc_stays_near_clip_in_features_and_predictions() -> None:
    settings = {"context": 2, "depth": 1, "image_weight": 3.0, "text_weight": 2.0, "logits_weight": 0.5}
    method = create("promptsrc", settings)
    params = near(method.tuning.init(MODEL, 0), 1)
    batch = batch_of()._replace(extra=method.sample_constants(MODEL, params, batch_of(), context()))
    found = float(method.loss(MODEL, params, batch, context())[0])
    kept = MODEL.sentences("of a {}.", 2)  # two of the sentence's four words are replaced
    h = unit(MODEL.text_tower.features(MODEL.weights, kept, params["context"]).numpy())
    f, f0, h0 = with_tokens(params["tokens.0"]), image(), zero_shot()
    logits, said = SCALE * f @ h.T, SCALE * f0 @ h0.T
    p, q = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (said, logits))
    expected = cross_entropy(logits) + 3 * np.abs(f - f0).mean() + 2 * np.abs(h - h0).mean()
    assert found == pytest.approx(expected + 0.5 * (p * np.log(p / q)).mean(), rel=1e-4)
