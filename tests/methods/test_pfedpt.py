"""pFedPT's prompt and weights (Eq. 5 and 6) against NumPy, alone and around other methods."""

from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import (
    COMMON,
    LR,
    MODEL,
    PROMPT,
    SIDES,
    WEIGHTS,
    B,
    N,
    at,
    contrastive,
    initial,
    local_round,
    prompted,
    proximal,
)

from promptfed.clients.messages import Train
from promptfed.methods import create
from promptfed.params import under
from promptfed.seeding import rng
from promptfed.training import batches
from tiny import BODY, HEAD, SEED, Numbers, arrays, descend, distance, near, numbers, plan, same, toy_host, work


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


@pytest.mark.parametrize("block", [1, 2])
def test_a_kept_momentum_goes_on_in_the_next_round(block: int, tmp_path: Path) -> None:
    settings = {**COMMON, **PROMPT, "epochs": 0, "prompt_momentum": 0.5, "keep_momentum": True}
    method = create("pfedpt", settings)
    host = toy_host(method, tmp_path, sizes=(8, 5), block=block)
    for round in (1, 2):
        works = [host.work(client, dict(MODEL.weights), round) for client in (0, 1)]
        for i in range(0, 2, block):
            host.train([works[i : i + block]], Train(round=round, score=False))
    for client in (0, 1):
        (x, y), n = arrays(host.samples(host.federation.sites[client].train)), len(works[client].samples)
        p, velocity = numbers(host.init), dict.fromkeys(SIDES, 0.0)
        for round in (1, 2):
            phase = method.schedule(round)[0]
            for index in batches(n, phase, rng(SEED, round, client, "batches", 0)):
                slope = prompted()(p, x[index], y[index])
                velocity = {side: 0.5 * v + slope[side] for side, v in velocity.items()}
                p = {name: v - 0.8 * velocity[name] if name in velocity else v for name, v in p.items()}
        found = host.work(client, dict(MODEL.weights), 3)
        same(found.params, p)
        same(under(found.private, "momentum"), velocity)
    host.store.close()
