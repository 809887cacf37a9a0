"""FFA-LoRA, FedSA-LoRA and FlexLoRA: what is trained, what travels, and the server's step by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import promptfed
from promptfed.errors import UserError
from promptfed.intake import Intake
from promptfed.method import Method
from promptfed.methods import create
from promptfed.models.vit import vit
from promptfed.params import Params
from promptfed.phases import Update
from promptfed.training import Work, train
from tiny import near, samples

WIDTH = 16
MODEL = vit((1, 8, 8), 3, 0, width=WIDTH, depth=1, heads=2)
AT = "body.blocks.0.v"
A, B = f"lora.a.{AT}", f"lora.b.{AT}"
LORA = {"projections": ("v",), "standardise": False}


def made(name: str, **settings: Any) -> tuple[Method, Params]:
    method = create(name, {**LORA, "batch_size": 4, "epochs": 1, **settings})
    return method, method.tuning.init(MODEL, 3)


def answered(method: Method, state: Params, client: int, n: int) -> Update:
    """What a client might send: other values in the shapes of what it received."""
    sent = method.down(state, client)
    return Update(client, sent, near(method.shared(sent), client, 0.5), n)


def product(values: Params) -> np.ndarray:
    b, a = values[B].double().numpy(), values[A].double().numpy()
    return np.array([[sum(b[i, r] * a[r, j] for r in range(len(a))) for j in range(WIDTH)] for i in range(WIDTH)])


def trained(method: Method, init: Params) -> Params:
    data = samples(10, 1, MODEL.image, MODEL.classes)
    work = Work(1, data, dict(init), method.begin(MODEL, init, 3), {})
    return train(method, MODEL, [work], method.schedule(1), 3, 1)[0].params


def test_ffa_lora_trains_and_sends_b_alone() -> None:
    method, init = made("ffa-lora", rank=2)
    done = trained(method, init)
    assert set(method.shared(init)) == {B, "head.weight", "head.bias"}
    assert not method.kept(init)
    assert torch.equal(done[A], init[A])
    assert not torch.equal(done[B], init[B])


def test_ffa_loras_mean_is_the_mean_of_the_products() -> None:
    method, init = made("ffa-lora", rank=2)
    state = method.begin(MODEL, init, 3)
    updates = [answered(method, state, client, n) for client, n in ((0, 1), (1, 3))]
    mean = {**init, **method.aggregate(state, updates)}
    expected = sum(u.n / 4 * product({**init, **u.up}) for u in updates)
    np.testing.assert_allclose(product(mean), expected, rtol=1e-5, atol=1e-6)


def test_fedit_averages_both_matrices_and_not_their_product() -> None:
    method, init = made("fedit", rank=2)
    state = method.begin(MODEL, init, 3)
    updates = [answered(method, state, client, n) for client, n in ((0, 1), (1, 3))]
    mean = method.aggregate(state, updates)
    for name in (A, B):
        np.testing.assert_allclose(mean[name], (updates[0].up[name] + 3 * updates[1].up[name]) / 4, atol=1e-6)
    expected = sum(u.n / 4 * product(u.up) for u in updates)
    assert np.abs(product(mean) - expected).max() > 0.1


def test_fedsa_lora_trains_both_and_sends_a_alone() -> None:
    method, init = made("fedsa-lora", rank=2)
    done = trained(method, init)
    assert set(method.shared(init)) == {A, "head.weight", "head.bias"}
    assert set(method.kept(init)) == {B}
    assert not torch.equal(done[A], init[A])
    assert not torch.equal(done[B], init[B])
    assert method.personal


# ---- FlexLoRA


def test_flexlora_gives_each_rank_the_best_approximation_of_the_mean_product() -> None:
    method, init = made("flexlora", rank=4, ranks=(1, 4, 2))
    state = method.begin(MODEL, init, 3)
    updates = [answered(method, state, client, n) for client, n in ((0, 1), (1, 4), (2, 3), (3, 2))]
    assert [len(u.up[A]) for u in updates] == [1, 4, 2, 1]
    assert [u.up[B].shape[1] for u in updates] == [1, 4, 2, 1]
    mean = sum(u.n / 10 * product(u.up) for u in updates)
    left, values, right = np.linalg.svd(mean)
    assert values[4] > 0.01  # the mean has a higher rank than any client

    new = method.aggregate(state, updates)
    for client, rank in ((0, 1), (1, 4), (2, 2), (4, 4)):
        nearest = (left[:, :rank] * values[:rank]) @ right[:rank]
        np.testing.assert_allclose(product(method.down(new, client)), nearest, atol=1e-5)
    np.testing.assert_allclose(product(method.common(new)), (left[:, :4] * values[:4]) @ right[:4], atol=1e-5)
    np.testing.assert_allclose(new[A] @ new[A].T, np.eye(4), atol=1e-5)
    head = sum(u.n / 10 * u.up["head.bias"] for u in updates)
    torch.testing.assert_close(new["head.bias"], head)


def test_flexlora_keeps_directions_that_a_round_of_low_rank_does_not_have() -> None:
    """Otherwise A and B would be zero there, and never be trained again."""
    method, init = made("flexlora", rank=4, ranks=(1, 4))
    state = method.begin(MODEL, init, 3)
    update = answered(method, state, 0, 5)
    new = method.aggregate(state, [update])
    np.testing.assert_allclose(product(new), product(update.up), atol=1e-5)
    assert new[B][:, 1:].abs().max() < 1e-5
    np.testing.assert_allclose(new[A] @ new[A].T, np.eye(4), atol=1e-5)


def test_an_update_of_another_clients_rank_is_left_out() -> None:
    method, init = made("flexlora", rank=4, ranks=(1, 4))
    state = method.begin(MODEL, init, 3)
    first, second = (answered(method, state, client, 5) for client in (0, 1))
    wrong = Update(0, second.sent, second.up, 5)
    intake = Intake(method, state, method.shared(init), {0: 5, 1: 5})
    assert [intake.take(update).error for update in (first, second)] == ["", ""]
    assert intake.take(wrong).error == "names or shapes differ from the shared parameters"


@pytest.mark.parametrize("ranks", [(0, 2), (2, 5)])
def test_ranks_out_of_range_are_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"^method\.ranks = \[{ranks[0]}, {ranks[1]}\] must be 1 to 4, which is"):
        create("flexlora", {"rank": 4, "ranks": ranks})


def test_a_rank_above_the_width_is_refused() -> None:
    method, _ = made("fedit", rank=WIDTH + 1)
    with pytest.raises(UserError, match=rf'^method\.rank = {WIDTH + 1} must be 1 to {WIDTH}, the width of "vit-tiny"$'):
        method.tuning.check(MODEL)


def test_models_of_unequal_ranks_are_exported(tmp_path: Path) -> None:
    result = promptfed.run(
        method={"name": "flexlora", "epochs": 1, "rank": 3, "ranks": (1, 3)},
        dataset={"name": "shapes", "limit": 48},
        partition={"name": "iid", "clients": 2},
        backbone="vit-mini",
        rounds=1,
        engine={"workers": 1, "block": 2},
        out=tmp_path / "run",
    )
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
    ranks = []
    for client in (0, 1):
        file = promptfed.export(result.folder, tmp_path / f"{client}.safetensors", client=client)
        loaded = promptfed.load(file)
        ranks.append({len(p) for name, p in loaded.params.items() if name.startswith("lora.a.")})
        expected = promptfed.load(result.folder, client=client).predict(images).probabilities
        np.testing.assert_array_equal(loaded.predict(images).probabilities, expected)
    assert ranks == [{1}, {3}]
