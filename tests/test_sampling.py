"""Who takes part in a round."""

from collections import Counter

import pytest

from promptfed.server import sample


@pytest.mark.parametrize(
    ("clients", "fraction", "count"),
    [
        (10, 0.2, 2),
        (50, 0.2, 10),
        (10, 0.24, 2),
        (10, 0.25, 3),
        (10, 0.26, 3),
        (10, 0.01, 1),
        (10, 1.0, 10),
        (1, 0.1, 1),
        (3, 0.5, 2),
    ],
)
def test_a_share_of_the_clients_is_sampled_at_least_one(clients: int, fraction: float, count: int) -> None:
    found = sample(dict.fromkeys(range(clients), 5), fraction, 0, 1)
    assert len(found) == len(set(found)) == count
    assert found == sorted(found)
    assert all(type(client) is int for client in found)


def test_clients_without_data_are_never_chosen() -> None:
    sizes = {client: client % 2 for client in range(10)}
    assert sample(sizes, 1.0, 0, 1) == [1, 3, 5, 7, 9]
    assert len(sample(sizes, 0.4, 0, 1)) == 2  # of the five that have some
    for round in range(20):
        assert all(client % 2 for client in sample(sizes, 0.3, 0, round))
    assert sample({0: 0, 1: 0}, 1.0, 0, 1) == []


def test_sampling_depends_on_seed_and_round_alone() -> None:
    sizes = dict.fromkeys(range(30), 5)
    assert sample(sizes, 0.2, 3, 7) == sample(dict(sizes), 0.2, 3, 7)
    assert len({tuple(sample(sizes, 0.2, 3, round)) for round in range(10)}) == 10
    assert len({tuple(sample(sizes, 0.2, seed, 7)) for seed in range(10)}) == 10


def test_every_client_is_as_likely_as_any_other() -> None:
    rounds = 600
    seen = Counter(c for round in range(rounds) for c in sample(dict.fromkeys(range(10), 5), 0.3, 0, round))
    # 180 expected each, with a standard deviation of 11.
    assert all(130 < seen[client] < 230 for client in range(10))
