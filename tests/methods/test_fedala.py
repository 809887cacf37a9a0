"""FedALA's blend of the received head with the client's own, against NumPy."""

import numpy as np
import torch
from by_hand import COMMON, LR, MODEL, WEIGHTS, B, N, at, initial, local_round

from promptfed import params as P
from promptfed.methods import create
from promptfed.training import train
from tiny import BODY, HEAD, ROUND, SEED, Numbers, arrays, descend, gradients, near, numbers, plan, same, work

ETA = 3.0


def blended(w: Numbers, down: Numbers, own: Numbers) -> Numbers:
    return {**{n: down[n] for n in BODY}, **{n: w[n] * down[n] + (1 - w[n]) * own[n] for n in HEAD}}


def test_a_client_blends_heads_and_then_trains() -> None:
    method = create("fedala", {**COMMON, "blend_lr": ETA})
    received, own = near(MODEL.weights, 1), near(MODEL.weights, 2, 0.6)
    start = method.start(initial(method), received, {}, {})
    one = work(start, N, down=received, memory={n: own[n] for n in HEAD})
    x, y = arrays(one.samples)
    down, old = numbers(received), numbers(own)
    w = {n: np.ones_like(down[n]) for n in HEAD}
    for index in plan(N, B, 1, number=0):
        g = gradients(blended(w, down, old), x[index], y[index])
        w = {n: np.clip(w[n] - ETA * g[n] * (down[n] - old[n]), 0, 1) for n in HEAD}
    # Some weights stay at their bounds, and some do not.
    flat = np.concatenate([p.ravel() for p in w.values()])
    assert ((flat > 0) & (flat < 1)).any()
    assert (flat == 1).any()
    first = blended(w, down, old)
    done = local_round(method, one).params
    same(P.under(done, "blend"), w)
    same({n: done[n] for n in WEIGHTS}, descend(first, one.samples, plan(N, B, 2, number=1), at(LR, *WEIGHTS)))
    # Before an evaluation the heads are blended too.
    adapted = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0].params
    same({n: adapted[n] for n in WEIGHTS}, first)


def test_a_client_that_takes_part_for_the_first_time_takes_over_what_it_received() -> None:
    method = create("fedala", COMMON)
    start = method.start(initial(method), MODEL.weights, {}, {})
    one = work(start, N, down=MODEL.weights, memory=method.remembered(start))
    adapted = train(method, MODEL, [one], method.adapt(), SEED, ROUND)[0].params
    assert all(torch.equal(adapted[name], p) for name, p in start.items())
    assert [phase.name for phase in method.phases(1)] == ["train"]
    assert [phase.name for phase in method.phases(2)] == ["blend", "train"]


def test_the_blend_stays_with_the_client() -> None:
    method = create("fedala")
    init = initial(method)
    assert method.shared(init).keys() == set(WEIGHTS)
    assert method.kept(init).keys() == {f"blend.{name}" for name in HEAD}
    assert method.remembered(init).keys() == set(HEAD)
    assert method.personal
