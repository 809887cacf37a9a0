"""The numbers of a table, by hand."""

import itertools

import numpy as np
import pytest

from promptfed.scoring import Score, Scores, average, clustering, per_client, summary


def score(labels: list[int], predictions: list[int], loss: float = 0.0, classes: int = 3) -> Score:
    """Counts of hits, false alarms and misses of each class."""
    pairs = list(zip(labels, predictions, strict=True))
    counts = [
        [sum(f(c, *pair) for pair in pairs) for c in range(classes)]
        for f in (
            lambda c, label, guess: label == c == guess,
            lambda c, label, guess: guess == c != label,
            lambda c, label, guess: label == c != guess,
        )
    ]
    return Score(len(labels), loss, *(np.array(row) for row in counts))


NOTHING = score([], [])
# Accuracies 3/4, 0/1 and unknown on test data; 1/2, unknown and 1/1 on validation data.
A = Scores(
    4,
    {
        "test": score([0, 0, 1, 2], [0, 0, 1, 1], 2.0),
        "val": score([0, 1], [0, 2]),
        "global": score([0] * 5, [0, 1, 1, 1, 1]),
    },
)
B = Scores(5, {"test": score([1], [2], 3.0), "val": NOTHING, "global": score([0] * 5, [0, 0, 0, 1, 1])}, passes=7)
C = Scores(6, {"test": NOTHING, "val": score([2], [2]), "global": score([0] * 5, [0] * 5)})

F1_A = (1 + 2 / 3 + 0) / 3  # class 0: 2 of 2; class 1: a hit and a false alarm; class 2: a miss
F1_B = 0.0


def test_summary_of_personal_models() -> None:
    found = summary([A, B, C], 3, one_model=False)
    assert found["local"]["mean"] == pytest.approx((3 / 4 + 0) / 2)  # a client without test data does not count
    assert found["local"]["std"] == pytest.approx(3 / 8)  # of the population, not of a sample
    assert found["local"]["worst"] == 0
    assert found["local"]["weighted"] == pytest.approx(3 / 5)
    assert found["macro_f1"] == pytest.approx((F1_A + F1_B) / 2)
    assert found["global"] == pytest.approx((1 / 5 + 3 / 5 + 1) / 3)
    # F1 of class 0 with 1, 3 and 5 of 5 found; class 1 has false alarms only, so its F1 is 0 where it occurs.
    assert found["global_macro_f1"] == pytest.approx(((2 / 6) / 2 + (6 / 8) / 2 + 1) / 3)
    assert found["loss"] == pytest.approx((2 + 3) / 5)
    assert found["val"] == pytest.approx((1 / 2 + 1) / 2)


def test_one_global_model_is_known_from_everybodys_own_test_data() -> None:
    found = summary([A, B, C], 3, one_model=True)
    assert found["global"] == pytest.approx(3 / 5)
    # Pooled: class 0 2 hits; class 1 a hit, a false alarm, a miss; class 2 a false alarm, a miss.
    assert found["global_macro_f1"] == pytest.approx((1 + 2 / 4 + 0) / 3)
    assert found["local"]["mean"] == pytest.approx(3 / 8)


def test_the_global_accuracy_of_personal_models_is_unknown_without_everybodys_data() -> None:
    parts = [Scores(s.client, {k: s.parts[k] for k in ("test", "val")}) for s in (A, B)]
    found = summary(parts, 3, one_model=False)
    assert found["global"] is None
    assert found["global_macro_f1"] is None
    assert found["local"]["mean"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("scores", [[], [Scores(0, {"test": NOTHING, "val": NOTHING})]])
def test_what_nobody_has_data_for_is_none(scores: list[Scores]) -> None:
    for one_model in (True, False):
        found = summary(scores, 3, one_model)
        assert set(found.pop("local").values()) == {None}
        assert found.pop("clients") == 0
        assert set(found.values()) == {None}


def test_per_client_rows() -> None:
    rows = per_client([A, C])
    assert rows[0] == {
        "client": 4,
        "n_test": 4,
        "accuracy": 3 / 4,
        "macro_f1": pytest.approx(F1_A),
        "loss": 0.5,
        "n_val": 2,
        "val_accuracy": 1 / 2,
        "global_accuracy": 1 / 5,
    }
    assert rows[1]["accuracy"] is rows[1]["macro_f1"] is rows[1]["loss"] is None
    assert (rows[1]["n_test"], rows[1]["val_accuracy"]) == (0, 1)
    assert "global_accuracy" not in per_client([Scores(0, {"test": NOTHING, "val": NOTHING})])[0]


def test_average_leaves_the_unknown_out_and_goes_into_tables() -> None:
    found = average(
        [
            {"local": {"mean": 0.2, "std": None}, "loss": None, "val": 1.0},
            {"local": {"mean": 0.4, "std": None}, "loss": 3.0, "val": 0.0},
            {"local": {"mean": 0.9, "std": None}, "loss": 5.0, "val": None},
        ]
    )
    assert found == {"local": {"mean": pytest.approx(0.5), "std": None}, "loss": 4.0, "val": 0.5}


def test_clustering_is_that_of_the_best_matching() -> None:
    assert clustering([np.array([[0, 5], [3, 2]])]) == pytest.approx(0.8)
    assert clustering([np.diag([4, 2, 1])[::-1]]) == 1
    assert clustering([np.array([[5] * 20] + [[0] * 20] * 19)]) == pytest.approx(0.05)  # Table 4's collapse
    assert clustering([np.zeros((2, 3), np.int64)]) == 0
    g = np.random.default_rng(0)
    for shape in ((4, 4), (3, 5), (5, 3)):
        table = g.integers(0, 9, shape)
        wide = table if shape[0] <= shape[1] else table.T
        ways = itertools.permutations(range(wide.shape[1]), wide.shape[0])
        best = max(sum(wide[row, column] for row, column in enumerate(way)) for way in ways)
        assert clustering([table]) == pytest.approx(best / table.sum())


def test_clients_that_saw_fewer_groups_are_added_up() -> None:
    assert clustering([np.array([[3, 0]]), np.array([[0, 1], [0, 4]])]) == pytest.approx(7 / 8)
