"""FedPer, FedRep and FedBABU, which share a body and keep heads, against NumPy."""

from collections.abc import Sequence

import pytest
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, initial, local_round

from promptfed.methods import create
from promptfed.phases import Update
from promptfed.training import train
from tiny import BODY, HEAD, ROUND, SEED, descend, distance, near, numbers, plan, same, work


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
