"""Differences between rows, against intervals computed in other ways."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from promptfed.runs import comparison, tables
from promptfed.runs.statistics import Difference, difference, interval, on_unseen


def result(accuracies: Sequence[float | None], seed: int = 0, own: bool = True, n: Sequence[int] = ()) -> Any:
    """`own`: each client has a model of its own, which is scored on all clients' test data too."""
    sizes = n or [10] * len(accuracies)
    rows = [
        {"client": i, "n_test": size, "accuracy": a, **({"global_accuracy": 0.5} if own else {})}
        for i, (a, size) in enumerate(zip(accuracies, sizes, strict=True))
    ]
    return {"seed": seed, "clients": {"aggregated": rows}, "metrics": {"aggregated": {"last": {"global": 0.5}}}}


# ---- the interval


@pytest.mark.parametrize("n", [5, 12, 60])
def test_one_seed_of_normal_data_has_the_interval_of_the_paired_t_test(n: int) -> None:
    values = np.random.default_rng(n).normal(0.4, 1.0, n)
    found = interval(values[None], np.ones(n))
    assert found
    exact = stats.ttest_rel(values, np.zeros(n)).confidence_interval(0.95)
    assert found.mean == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=0.06 * (exact.high - exact.low))


def test_one_client_leaves_the_seeds() -> None:
    values = np.random.default_rng(3).normal(0.4, 1.0, 8)
    assert interval(values[:, None], np.ones(1)) == Difference(
        *(getattr(interval(values[None], np.ones(8)), name) for name in ("mean", "low", "high")), seeds=8, clients=1
    )
    assert interval(values[:1, None], np.ones(1)) is None


@pytest.mark.parametrize("spread", [(0.0, 1.0, 1.0), (1.0, 0.3, 0.3)])
def test_the_interval_holds_the_true_difference_about_95_times_in_100(spread: tuple[float, float, float]) -> None:
    """Effects of seeds, of clients, and of both together; the true difference is 0. Of 200 intervals of level 0.95, 181
    or fewer hold it with a probability of 0.4 %."""
    rng, held = np.random.default_rng(0), 0
    of_seeds, of_clients, of_both = spread
    for _ in range(200):
        values = (
            of_seeds * rng.normal(size=(3, 1)) + of_clients * rng.normal(size=10) + of_both * rng.normal(size=(3, 10))
        )
        found = interval(values, np.ones(10))
        assert found
        held += found.low <= 0 <= found.high
    assert held > 181


def test_seeds_that_disagree_widen_it() -> None:
    clients = np.random.default_rng(0).normal(0.1, 0.02, 10)
    calm = interval(np.stack([clients] * 3), np.ones(10))
    split = interval(np.stack([clients - 0.1, clients, clients + 0.1]), np.ones(10))
    assert calm
    assert split
    assert calm.word == "ahead"
    assert split.word == "cannot be told apart"


def test_values_without_spread_have_the_interval_of_their_test_images() -> None:
    assert interval(np.zeros((2, 3)), np.ones(3)) == Difference(0.0, 0.0, 0.0, 2, 3)
    assert interval(np.full((2, 3), 0.25), np.ones(3)) is None
    found = interval(np.full((2, 3), 0.25), np.ones(3), noise=0.1**2)
    assert found
    assert (found.low, found.high) == pytest.approx((0.25 - 1.96 * 0.1, 0.25 + 1.96 * 0.1), abs=0.01)
    few, many = (difference([result([0.8] * 3, n=[n] * 3)], [result([0.6] * 3, n=[n] * 3)]) for n in (5, 500))
    assert few
    assert few.word == "cannot be told apart"
    assert many
    assert many.word == "ahead"


def test_models_scored_on_the_same_images_are_not_told_apart_by_those_images() -> None:
    """Ten own models and one for all with the same expected accuracy, on the same 200 images: at most about one in
    twenty is told apart; resampling clients alone would tell half of them apart."""
    rng, told = np.random.default_rng(0), 0
    for _ in range(100):
        easy = rng.uniform(0.2, 0.8, 200)
        ours, theirs = result([0.5] * 10, n=[20] * 10), result([0.5] * 10, own=False, n=[20] * 10)
        for row in ours["clients"]["aggregated"]:
            row["global_accuracy"] = float((rng.random(200) < easy).mean())
        theirs["metrics"]["aggregated"]["last"]["global"] = float((rng.random(200) < easy).mean())
        found = difference([ours], [theirs], "global")
        assert found
        told += found.word != "cannot be told apart"
    assert told <= 10


# ---- rows


@pytest.mark.parametrize(("gain", "word"), [(0.3, "ahead"), (-0.3, "behind"), (0.0, "cannot be told apart")])
def test_words_follow_from_the_interval(gain: float, word: str) -> None:
    base = [0.3, 0.5, 0.4, 0.6, 0.5]
    noise = [0.02, -0.02, 0.01, -0.01, 0.0]
    ours = result([a + gain + e for a, e in zip(base, noise, strict=True)])
    found = difference([ours], [result(base)])
    assert found
    assert (found.word, found.seeds, found.clients) == (word, 1, 5)
    assert found.mean == pytest.approx(gain)
    assert found.complete()["word"] == word


def test_pairs_are_of_the_same_seed_and_client() -> None:
    ours = [result([0.9, None, 0.7], seed=1), result([0.1, 0.2, 0.3], seed=5)]
    theirs = [result([0.0, 0.0, 0.0], seed=2), result([0.5, 0.5, 0.5], seed=1)]
    found = difference(ours, theirs)
    assert found
    assert (found.seeds, found.clients, found.mean) == (1, 2, pytest.approx(0.3))
    assert difference(ours, theirs[:1]) is None, "no seed is of both"
    assert difference([result([0.5, 0.5], n=[10, 20])], [result([0.5, 0.5], n=[10, 10])]) is None, "other test data"


def test_models_for_all_clients_are_compared_on_all_clients_test_data() -> None:
    n = [10, 30]
    ours, theirs = (result(a, own=False, n=n) for a in ([0.5, 0.9], [0.5, 0.5]))
    found = difference([ours], [theirs])
    assert found
    assert (found.column, found.mean) == ("global", pytest.approx(0.4 * 30 / 40))
    personal = difference([ours], [result([0.5, 0.5], n=n)])
    assert personal
    assert (personal.column, personal.mean) == ("local", pytest.approx(0.2))


def test_a_shared_model_and_own_ones_on_all_clients_data() -> None:
    """The shared model has one accuracy there, .5; own models have one each."""
    shared = [result([0.9, 0.1], seed, own=False, n=(30, 10)) for seed in (0, 1)]
    own = [result([0.8, 0.8], seed, n=(30, 10)) for seed in (0, 1)]
    for runs in own:
        for row, accuracy in zip(runs["clients"]["aggregated"], (0.3, 0.4), strict=True):
            row["global_accuracy"] = accuracy
    found = difference(shared, own, "global")
    assert found
    assert (found.mean, found.column) == (pytest.approx(0.5 - 0.35), "global")
    main = difference(shared, own)
    assert main
    assert (main.mean, main.column) == (pytest.approx(0.5 - 0.8), "local")


def test_all_clients_are_also_compared_after_local_training() -> None:
    """By each client's own accuracy, also of models that are one for all before it."""
    ours, theirs = (result(a, own=False, n=[10, 30]) for a in ([0.5, 0.9], [0.5, 0.5]))
    assert difference([ours], [theirs], "trained") is None, "neither was trained further"
    ours["clients"]["after_local_all"] = result([0.7, 0.9], n=[10, 30])["clients"]["aggregated"]
    assert difference([ours], [theirs], "trained") is None, "only one of them was"
    theirs["clients"]["after_local_all"] = result([0.6, 0.6], n=[10, 30])["clients"]["aggregated"]
    found = difference([ours], [theirs], "trained")
    assert found
    assert (found.column, found.mean) == ("trained", pytest.approx((0.1 + 0.3) / 2))


def test_newcomers_are_compared_with_newcomers() -> None:
    ours, theirs = (result([0.9, 0.9], own=False) for _ in range(2))
    assert difference([ours], [theirs], "newcomers") is None
    for numbers, accuracies in ((ours, [0.6, 0.8]), (theirs, [0.5, 0.4])):
        numbers["clients"]["newcomers_aggregated"] = result(accuracies)["clients"]["aggregated"]
    found = difference([ours], [theirs], "newcomers")
    assert found
    assert (found.column, found.mean) == ("newcomers", pytest.approx((0.1 + 0.4) / 2))


def test_a_table_tells_them_all() -> None:
    """By hand from the kept results: means of 50 clients' accuracies, as received on their own and on all clients'
    data, and after local training."""
    kept = Path(__file__).parents[2] / "experiments" / "evidence" / "cifar10-pfedpt"
    (sheet,) = tables.differences(comparison.read(kept, "FedAvg, equal passes").table)
    assert [line[:3] for line in sheet.lines if line[0] == "pFedPT"] == [
        ("pFedPT", "local", "+12.7"),  # 56.6 - 43.9
        ("pFedPT", "global", "-6.1"),  # 39.1 - 45.2
        ("pFedPT", "trained", "+3.2"),  # 60.8 - 57.6
    ]
    assert len(sheet.lines) == 12 + 10 + 12, "FedAvg has one model, too: no further difference on all clients' data"


@pytest.mark.parametrize("column", ["local", "global", "trained"])
def test_the_other_way_round_the_interval_is_mirrored(column: str) -> None:
    kept = Path(__file__).parents[2] / "experiments" / "evidence" / "cifar10-pfedpt"
    rows = comparison.read(kept)
    one, other = ([run.numbers for run in rows[label]] for label in ("pFedPT", "FedAvg, equal passes"))
    there, back = difference(one, other, column), difference(other, one, column)
    assert there
    assert back
    assert (back.mean, back.low, back.high) == pytest.approx((-there.mean, -there.high, -there.low), abs=1e-12)


# ---- on data that nobody has trained on


def on(**columns: tuple[Sequence[float], int]) -> Any:
    scored = {column: {"accuracies": list(each), "images": images} for column, (each, images) in columns.items()}
    return {"seed": 0, "protocols": {"scored": scored}}


def test_two_models_and_one_seed_have_the_interval_of_their_images() -> None:
    found = on_unseen([on(novel=([0.6], 400))], [on(novel=([0.5], 400))], "novel")
    assert found
    half = 1.96 * np.sqrt((0.6 * 0.4 + 0.5 * 0.5) / 400)
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1 - half, 0.1 + half), abs=0.004)
    assert (found.seeds, found.clients, found.word) == (1, 1, "ahead")


def test_own_models_are_paired_with_one_for_all_but_not_with_fewer_own_ones() -> None:
    own, one, fewer = (on(novel=(each, 100)) for each in ([0.2, 0.4, 0.6], [0.3], [0.3, 0.4]))
    found = on_unseen([own], [one], "novel")
    assert found
    assert (found.mean, found.clients) == (pytest.approx(0.1), 3)
    assert on_unseen([own], [fewer], "novel") is None
    assert on_unseen([own], [on(novel=([0.3], 50))], "novel") is None, "other images"
    assert on_unseen([own], [one], "base") is None, "not scored"
    assert on_unseen([own], [{"seed": 0}], "novel") is None, "recorded before the images were counted"


def test_equal_models_on_the_same_images_are_rarely_told_apart() -> None:
    rng, told = np.random.default_rng(0), 0
    for _ in range(200):
        easy = rng.uniform(0.2, 0.8, 150)
        own, one = ([float((rng.random(150) < easy).mean()) for _ in range(models)] for models in (5, 1))
        found = on_unseen([on(novel=(own, 150))], [on(novel=(one, 150))], "novel")
        assert found
        told += found.word != "cannot be told apart"
    assert told <= 14


def test_the_interval_of_a_harmonic_mean_is_that_of_drawn_images() -> None:
    """Accuracies of one model of each row on images that are drawn again and again."""
    rng, n = np.random.default_rng(0), 300

    def harmonic(base: float, novel: float) -> np.ndarray:
        a, b = (rng.binomial(n, p, 20_000) / n for p in (base, novel))
        return 2 * a * b / (a + b)

    drawn = harmonic(0.8, 0.5) - harmonic(0.7, 0.4)
    ours, theirs = on(base=([0.8], n), novel=([0.5], n)), on(base=([0.7], n), novel=([0.4], n))
    found = on_unseen([ours], [theirs], "H")
    assert found
    assert found.mean == pytest.approx(2 * 0.4 / 1.3 - 2 * 0.28 / 1.1)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.004)


def test_a_harmonic_mean_of_nothing_has_an_interval_too() -> None:
    found = on_unseen([on(base=([0.0], 50), novel=([0.0], 50))], [on(base=([0.1], 50), novel=([0.0], 50))], "H")
    assert found
    assert found.mean == 0.0
    assert found.low < 0 < found.high
