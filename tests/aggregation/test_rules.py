"""Rules of aggregation, against naive computations in NumPy."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from promptfed.aggregation import Aggregation, apply, check, check_count
from promptfed.errors import UserError
from promptfed.method import FedAvg
from promptfed.methods import create
from promptfed.params import Params, nested, under
from promptfed.phases import Update

SAMPLES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
POINTS = np.random.default_rng(0).normal([4, 0, 0, 0, 1], 1, (11, 5))
POINTS[[2, 7]] += [50, -80, 0, 9, 0]
START = np.arange(5.0)


def params(row: np.ndarray) -> Params:
    values = torch.from_numpy(row.astype(np.float32))
    return {"body.w": values[:4].reshape(2, 2), "head.b": values[4:]}


def row(made: Params) -> np.ndarray:
    return np.concatenate([made["body.w"].flatten().numpy(), made["head.b"].numpy()])


def aggregate(name: str, points: np.ndarray = POINTS, **settings: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Of clients 10, 11, ..., who have received START."""
    rule = Aggregation(name=name, **settings).rule()
    assert rule
    start = params(START)
    updates = [Update(10 + i, start, params(p), n) for i, (p, n) in enumerate(zip(points, SAMPLES, strict=False))]
    made, _, line = apply(rule, FedAvg(), start, start, updates, (0, 1))
    assert [r["norm"] for r in line["clients"]] == pytest.approx([math.dist(p, START) for p in points], rel=1e-6)
    return row(made), line


def krum_score(i: int, among: list[int], malicious: int) -> float:
    """By the definition: the smallest sum over sets of K - f - 2 others."""
    others = [j for j in among if j != i]
    sets = combinations(others, max(1, len(among) - malicious - 2))
    return min(sum(math.dist(POINTS[i], POINTS[j]) ** 2 for j in chosen) for chosen in sets)


def test_median_of_each_coordinate() -> None:
    assert aggregate("median")[0] == pytest.approx(np.median(POINTS, 0), rel=1e-5)
    assert aggregate("median", POINTS[:4])[0] == pytest.approx(np.median(POINTS[:4], 0), rel=1e-5)


def test_trimmed_mean_leaves_out_both_ends_of_each_coordinate() -> None:
    expected = [np.mean(sorted(column)[2:-2]) for column in POINTS.T]
    assert aggregate("trimmed-mean", malicious=0.2)[0] == pytest.approx(expected, rel=1e-5)


def test_krum_takes_the_update_with_the_nearest_neighbours() -> None:
    best = min(range(11), key=lambda i: krum_score(i, list(range(11)), 2))
    made, line = aggregate("krum", malicious=0.2)
    assert made == pytest.approx(POINTS[best], rel=1e-6)
    assert [r["client"] for r in line["clients"] if r["chosen"]] == [10 + best]


def test_multi_krum_averages_all_but_the_worst_by_samples() -> None:
    kept = sorted(range(11), key=lambda i: krum_score(i, list(range(11)), 2))[:9]
    assert not {2, 7} & set(kept)
    expected = np.average(POINTS[kept], 0, weights=np.array(SAMPLES)[kept])
    assert aggregate("multi-krum", malicious=0.2)[0] == pytest.approx(expected, rel=1e-5)


def test_bulyan_averages_what_is_near_the_median_of_those_that_krum_chose() -> None:
    left, chosen = list(range(11)), []
    while len(chosen) < 7:
        chosen.append(min(left, key=lambda i: krum_score(i, left, 2)))
        left.remove(chosen[-1])
    expected = [np.mean(sorted(c, key=lambda v: abs(v - np.median(c)))[:3]) for c in POINTS[chosen].T]
    assert aggregate("bulyan", malicious=0.2)[0] == pytest.approx(expected, rel=1e-5)


def test_geometric_median_has_the_smallest_sum_of_distances() -> None:
    made, line = aggregate("geometric-median")

    def total(at: np.ndarray) -> float:
        return sum(n * math.dist(p, at) for n, p in zip(SAMPLES, POINTS, strict=True))

    nearby = np.random.default_rng(1).normal(0, 1, (200, 5))
    assert all(total(made) <= total(made + 0.01 * step / np.linalg.norm(step)) for step in nearby)
    assert sum(r["weight"] for r in line["clients"]) == pytest.approx(1)


def test_fltrust_weighs_by_the_cosine_to_the_trusted_client() -> None:
    made, line = aggregate("fltrust", trusted=10)
    moves = POINTS - START
    root = moves[0]
    trust = [max(0.0, m @ root / np.linalg.norm(m) / np.linalg.norm(root)) for m in moves]
    same_length = [m * np.linalg.norm(root) / np.linalg.norm(m) for m in moves]
    assert made == pytest.approx(START + np.average(same_length, 0, weights=trust), rel=1e-4)
    assert [r["trust"] for r in line["clients"]] == pytest.approx(trust, rel=1e-5)
    assert aggregate("fltrust", trusted=99)[0] == pytest.approx(START), "without the trusted client the model stays"


def test_norm_bound_shortens_long_updates_to_a_multiple_of_the_median() -> None:
    made, line = aggregate("norm-bound", bound=2.0)
    norms = np.linalg.norm(POINTS - START, axis=1)
    factors = np.minimum(1, 2 * np.median(norms) / norms)
    assert {i for i, factor in enumerate(factors) if factor < 1} == {2, 7}
    expected = START + np.average((POINTS - START) * factors[:, None], 0, weights=SAMPLES)
    assert made == pytest.approx(expected, rel=1e-5)
    assert [r["factor"] for r in line["clients"]] == pytest.approx(factors, rel=1e-5)


def test_norm_bound_that_does_not_act_is_the_mean_bit_for_bit() -> None:
    start = params(START)
    updates = [Update(i, start, params(p), n) for i, (p, n) in enumerate(zip(POINTS, SAMPLES, strict=True))]
    rule = Aggregation(name="norm-bound", bound=1e3).rule()
    assert rule
    made, _, line = apply(rule, FedAvg(), start, start, updates, (0, 1))
    assert all(torch.equal(p, FedAvg().aggregate(start, updates)[name]) for name, p in made.items())
    assert not any("factor" in r for r in line["clients"])


def test_norm_bound_looks_back_on_earlier_rounds() -> None:
    start = params(np.zeros(5))
    rule = Aggregation(name="norm-bound", bound=2.0).rule()
    assert rule
    rule.recall([{"round": 1}, {"aggregation": {"clients": [{"norm": 1.0}, {"norm": 2.0}, {"norm": 3.0}]}}])
    lone = Update(0, start, params(np.array([0, 0, 0, 0, 100.0])), 1)  # this round's median is its own norm
    made, _, _ = apply(rule, FedAvg(), start, start, [lone], (0, 2))
    assert row(made) == pytest.approx([0, 0, 0, 0, 2 * 2.5])


@pytest.mark.parametrize("name", ["norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"])
def test_one_huge_finite_update_does_not_decide(name: str) -> None:
    points = POINTS.copy()
    points[3] = 3e38
    made, _ = aggregate(name, points, malicious=0.2)
    assert np.abs(made).max() < 40


@pytest.mark.parametrize(
    ("name", "rule", "why"),
    [
        ("fedmtl", "krum", "does not average updates (allowed: mean, norm-bound)"),
        ("flexlora", "median", "does not average updates"),
        ("sgpt", "median", "weights of its own (allowed: mean, norm-bound, krum, multi-krum)"),
        ("dp2fl", "geometric-median", "weights of its own"),
        ("fedavg", "fltrust", "aggregation.trusted must be set"),
    ],
)
def test_methods_refuse_rules_that_they_cannot_take(name: str, rule: Any, why: str) -> None:
    with pytest.raises(UserError) as error:
        check(Aggregation(name=rule), create(name), name, 1.0)
    assert why in str(error.value)


def test_what_methods_and_rounds_can_take_passes() -> None:
    for name, rule in (("sgpt", "multi-krum"), ("dp2fl", "krum"), ("fedmtl", "norm-bound"), ("fedadam", "bulyan")):
        check(Aggregation(name=rule), create(name), name, 1.0)  # type: ignore[arg-type]
    check_count(Aggregation(name="bulyan", malicious=0.2), 11)
    with pytest.raises(UserError, match="bulyan needs 11 updates to withstand 2 of them, and 10 clients take part"):
        check_count(Aggregation(name="bulyan", malicious=0.2), 10)
    with pytest.raises(UserError, match="needs its trusted client in every round"):
        check(Aggregation(name="fltrust", trusted=0), create("fedavg"), "fedavg", 0.5)


START_STATE = params(START)


def by_rule(name: str, rule: Any, settings: dict[str, Any] | None = None) -> tuple[Params, Params]:
    """The server's state before and after a round of eleven clients, of which two are far away."""
    method = create(name, settings or {})
    state = {**START_STATE, **own_state(name)}
    updates = [Update(i, START_STATE, params(p), n) for i, (p, n) in enumerate(zip(POINTS, SAMPLES, strict=True))]
    check(Aggregation(name=rule), method, name, 1.0)
    used = Aggregation(name=rule).rule()
    assert used
    made, kept, _ = apply(used, method, state, START_STATE, updates, (0, 1))
    assert kept == updates
    return state, made


def own_state(name: str) -> Params:
    zero = {key: torch.zeros_like(p) for key, p in START_STATE.items()}
    own = {"scaffold": "control", "feddyn": "h"}.get(name)
    counts = {"clients": torch.tensor(11.0), "turn": torch.tensor(0.0), "counted": torch.full((11,), -1.0)}
    return {**nested(own, zero), **counts} if own else {}


def test_pfedme_goes_part_of_the_way_to_the_median() -> None:
    _, made = by_rule("pfedme", "median", {"beta": 0.5})
    assert row(made) == pytest.approx((START + np.median(POINTS, 0)) / 2, rel=1e-5)


def test_feddyn_learns_its_state_from_the_median() -> None:
    _, made = by_rule("feddyn", "median", {"alpha": 0.1})
    h = -0.1 * (np.median(POINTS, 0) - START)  # all clients take part
    assert row(under(made, "h")) == pytest.approx(h, rel=1e-4)
    assert row(made) == pytest.approx(np.median(POINTS, 0) - h / 0.1, rel=1e-4)


def test_fednova_combines_changes_of_equal_length() -> None:
    _, made = by_rule("fednova", "median", {"epochs": 2, "batch_size": 2})
    steps = np.array([2 * -(-n // 2) for n in SAMPLES])
    middle = np.median((POINTS - START) / steps[:, None], 0)
    assert row(made) == pytest.approx(START + np.average(steps, weights=SAMPLES) * middle, rel=1e-4)


def test_scaffold_has_model_and_control_variate_of_the_median() -> None:
    _, made = by_rule("scaffold", "median", {"epochs": 2, "batch_size": 2, "lr": 0.5})
    middle, steps = np.median(POINTS, 0), np.array([2 * -(-n // 2) for n in SAMPLES])
    assert row(made) == pytest.approx(middle, rel=1e-5)
    assert row(under(made, "control")) == pytest.approx((START - middle) * np.mean(1 / (0.5 * steps)), rel=1e-4)


@pytest.mark.parametrize("rule", ["trimmed-mean", "bulyan", "geometric-median"])
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fednova", "pfedme"])
def test_methods_with_a_state_of_their_own_take_every_combination(name: str, rule: str) -> None:
    state, made = by_rule(name, rule)
    assert made.keys() == state.keys()
    assert np.abs(row(made)).max() < 40, "the two far away do not decide"
