"""Linear heads: the scale of the features they see, how they start, and what clients send for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.errors import UserError
from promptfed.methods import create, fields
from promptfed.models import build
from promptfed.models.vit import vit
from promptfed.params import Params
from promptfed.runs import config as C
from promptfed.server import Plan, run
from promptfed.testing import Case, Memory, begun, first_work, tiny_federation
from promptfed.training import chunks, context
from promptfed.tunings.heads import ABSENT, HeadOnly, moments, nearest_mean, scaled, scaling

SGPT = {"groups": 2, "shared_layers": (0,), "group_layers": (1,)}
NAMES = {
    "head-tune": {},
    "fedvpt": {"tokens": 2},
    "fedvpt-d": {"tokens": 1},
    "sgpt": SGPT,
    "fedprox+head": {},
    "local+head": {},
    "fedmtl+head": {"iterations": 8},
    "fedrod+vpt": {"tokens": 2},
    "fedmix+vpt": {"tokens": 2},
    "fedper+vpt": {"tokens": 2},
    "pfedpg": {"tokens": 2, "standardise": True},
    "fedavg+head+pt": {"prompt_size": 2},
}


def case(name: str, folder: Path, **settings: Any) -> Case:
    method = create(name, {"epochs": 1, **NAMES.get(name, {}), **settings})
    return Case(method, vit((3, 16, 16), 4, 3, width=16, depth=2, heads=2), tiny_federation(folder))


def seen(made: Case, params: Params, client: int) -> torch.Tensor:
    """What the head sees of a client's training samples."""
    with made.clients() as (_, host):
        work = first_work(made, host, begun(made), client)
        ctx = context(work, made.model)
        with torch.no_grad():
            batches = [made.method.tuning.features(made.model, params, batch, ctx) for batch in chunks(work.samples)]
    return torch.cat(batches)


def received(made: Case, client: int = 0) -> Params:
    with made.clients() as (_, host):
        return first_work(made, host, begun(made), client).params


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pfedpg"])  # whose first prompts are generated
def test_features_of_all_clients_together_have_mean_0_and_deviation_1(name: str, tmp_path: Path) -> None:
    made = case(name, tmp_path)
    pooled = torch.cat([seen(made, received(made), client) for client in range(5)]).double()
    torch.testing.assert_close(pooled.mean(0), torch.zeros(16).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(pooled.std(0, correction=0), torch.ones(16).double(), atol=1e-4, rtol=0)
    raw = torch.cat([seen(made, made.init, client) for client in range(5)])
    assert float(raw.mean(0).abs().max()) > 0.1, "the features need it"


def test_sgpt_has_a_scale_for_each_block(tmp_path: Path) -> None:
    made = case("sgpt", tmp_path)
    params, tuning = received(made), made.method.tuning
    with made.clients() as (_, host), torch.no_grad():
        parts = [host.work(client, {}, 1).samples for client in range(5)]
        alone = [tuning.prompted(made.model, params, b, None) for part in parts for b in chunks(part)]  # type: ignore[attr-defined]
    pooled = torch.cat(alone)
    torch.testing.assert_close(pooled.mean(0), torch.zeros(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(pooled.std(0, correction=0), torch.ones(16), atol=1e-4, rtol=0)
    assert not torch.allclose(params["scale.mean"], params["scale.alone.mean"], atol=1e-3)


def test_components_of_a_mixture_have_scales_of_their_own(tmp_path: Path) -> None:
    params = received(case("fedem+vpt", tmp_path, tokens=2, components=2))
    assert not torch.equal(params["mix.0.scale.mean"], params["mix.1.scale.mean"])
    assert float(params["mix.1.scale.std"].min()) > 0


@pytest.mark.parametrize("name", ["head-tune", "fedvpt", "sgpt", "pfedpg", "fedmtl+head", "fedmix+vpt"])
def test_the_scale_goes_down_and_never_up(name: str, tmp_path: Path) -> None:
    made = case(name, tmp_path)
    state = begun(made)
    down = made.method.down(state, 0)
    assert {"scale.mean", "scale.std"} <= set(down)
    assert not any(n.startswith("sums.") for n in down), "sums stay with the server"
    with made.clients() as (clients, _):
        updates, _ = clients.train({0: down}, 1, score=False)
    assert not any(n.startswith("scale.") for n in updates[0].up)
    assert torch.equal(made.method.aggregate(state, updates)["scale.mean"], state["scale.mean"])


def test_a_newcomer_does_not_move_the_scale(tmp_path: Path) -> None:
    made = case("head-tune", tmp_path)
    recorder = Memory()
    with made.clients() as (clients, _):
        plan = Plan(2, 1.0, 0, newcomers=(2,), join_round=2)
        run(made.method, made.model, made.init, clients, plan, recorder)
        state = made.method.begin(made.model, made.init, 0)
        for client, hello in clients.enroll([0, 1, 3, 4]).items():
            state = made.method.admit(state, client, hello, 0)
    assert recorder.state is not None
    assert torch.equal(recorder.state["scale.mean"], state["scale.mean"])
    assert float(recorder.state["sums.n"]) == 13 + 7 + 1 + 6


def test_without_it_nothing_is_sent_and_nothing_is_scaled(tmp_path: Path) -> None:
    made = case("head-tune", tmp_path, standardise=False)
    assert not made.method.enrolls
    assert set(made.init) == {"head.weight", "head.bias"}
    features = torch.randn(3, 16)
    assert scaled(made.init, features) is features


def test_features_that_hardly_vary_are_not_blown_up() -> None:
    z = torch.randn(100, 4)
    z[:, 1], z[:, 2] = 5.0, 1e-6 * z[:, 2]
    found = scaling(moments(z))
    torch.testing.assert_close(found["mean"].float(), z.mean(0))
    floor = 0.01 * z.double().var(0, correction=0).mean().sqrt()
    torch.testing.assert_close(found["std"][1:3], floor.expand(2))
    assert torch.equal(scaling(moments(torch.ones(1, 4)))["std"], torch.ones(4).double()), "a single sample"


# ---- how a head starts


def test_a_head_starts_random_or_at_zero() -> None:
    model = build("vit-mini", (3, 32, 32), 4, 0)
    assert torch.equal(HeadOnly().init(model, 0)["head.weight"], model.weights["head.weight"])
    assert all(not p.any() for n, p in HeadOnly(head_init="zero").init(model, 0).items() if n.startswith("head."))


@pytest.mark.parametrize("standardise", [True, False])
def test_a_head_that_starts_from_class_means_predicts_the_nearest(standardise: bool, tmp_path: Path) -> None:
    made = case("head-tune", tmp_path, head_init="class-mean", standardise=standardise)
    params = received(made)
    labels = made.federation.dataset.labels
    z = torch.cat([seen(made, params, client) for client in range(5)])
    y = torch.from_numpy(np.concatenate([labels[site.train] for site in made.federation.sites]))
    means = torch.stack([z[y == c].mean(0) for c in range(4)])
    nearest = torch.cdist(z, means).argmin(1)
    logits = made.method.tuning.head(made.model, params, z)
    assert torch.equal(logits.argmax(1), nearest)
    assert float((logits.max(1).values - logits.min(1).values).max()) < 20, "a softmax can follow"


def test_a_class_without_samples_is_never_predicted() -> None:
    head = nearest_mean(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 0.0, 1.0]))
    assert float(head["head.bias"][1]) == ABSENT
    logits = torch.zeros(1, 2) @ head["head.weight"].T + head["head.bias"]
    assert int(logits.argmax()) != 1


@pytest.mark.parametrize("name", ["fedper+vpt", "local+head", "fedmtl+head", "pfedpg", "fedem+vpt"])
def test_class_means_need_a_head_that_all_clients_start_from(name: str, tmp_path: Path) -> None:
    made = case(name, tmp_path, head_init="class-mean")
    with pytest.raises(UserError, match=r'^method.head_init = "class-mean": .* \(allowed: random, zero\)$'):
        made.method.check(made.model, made.init)


# ---- defaults


def test_one_optimiser_for_heads_and_tokens_on_frozen_models() -> None:
    family = [create(name) for name in ("head-tune", "fedvpt", "fedvpt-d", "fedprox+vpt", "centralised+head", "sgpt")]
    assert len({(m.optimizer, m.lr, m.momentum) for m in family}) == 1
    assert all(m.tuning.collects for m in family)
    assert create("fedavg").lr == 0.005, "all weights"
    assert create("pfedme+vpt").lr == create("pfedme").lr, "a method with a rate of its own keeps it"
    assert not create("pfedpg").tuning.collects, "its published rate is for features as they are"


@pytest.mark.parametrize("preset", ["sgpt", "sgpt-code", "pfedpg"])
def test_presets_of_papers_leave_features_as_they_are(preset: str) -> None:
    assert not C.make(C.read(preset)).method.method.tuning.collects


def test_where_there_is_privacy_nothing_is_summed_unless_asked_for() -> None:
    private = {"privacy": {"clip": 1.0}}
    assert fields("head-tune")["standardise"].default is True
    assert not C.make({"method": "head-tune", **private}).method.method.tuning.collects
    with pytest.raises(UserError, match=r"^privacy.clip: .*sums of its features .*method.standardise = false$"):
        C.make({"method": {"name": "head-tune", "standardise": True}, **private})
