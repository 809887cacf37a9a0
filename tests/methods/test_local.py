"""Local: a client trains alone, and nothing travels."""

from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, initial, local_round

from promptfed.methods import create
from promptfed.phases import Update
from tiny import descend, numbers, plan, same, work


def test_local_trains_alone_and_nothing_travels() -> None:
    method = create("local", COMMON)
    one = work(MODEL.weights, N)
    done = local_round(method, one)
    same(done.params, descend(numbers(MODEL.weights), one.samples, plan(N, B, 2), at(LR, *WEIGHTS)))
    assert method.shared(done.params) == {}
    state = method.begin(MODEL, initial(method), 0)
    assert state == {}
    assert method.aggregate(state, [Update(0, {}, {}, 3)]) == {}
    same(method.start(initial(method), method.down(state, 0), done.params, {}), numbers(done.params), 0)
