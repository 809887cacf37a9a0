"""+ft: plain training before an evaluation, whatever the method."""

import pytest
from by_hand import COMMON, LR, MODEL, PROMPT, WEIGHTS, B, N, at, initial, prompted

from promptfed.methods import create
from promptfed.training import train
from tiny import ROUND, SEED, descend, numbers, plan, same, work


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
