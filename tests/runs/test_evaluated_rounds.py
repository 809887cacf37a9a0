"""Which rounds are evaluated if nothing is said."""

import json

import numpy as np
import pytest

import promptfed
from promptfed import UserError
from promptfed.data import Site
from promptfed.runs import build
from promptfed.runs import config as C

# 50 clients of 100 images each: 70 for training, 10 for validation, 20 for testing.
SITES = [Site(f"site {i}", np.arange(70), np.arange(10), np.arange(20)) for i in range(50)]


def interval(sites=SITES, **settings):
    config = C.make({"backbone": "cnn", "method": "fedavg"}, C.undot(settings.items()))
    return build.rounds(config, sites, ()).eval_every


def test_by_samples_passed_evaluation_takes_a_fifth_of_the_time():
    # A round of ten clients passes 10 x 70 = 700 samples, which take as long as 2,100 evaluated ones; scored are
    # 50 x 30 samples of all clients, and 10 x 30 of the participants after local training: 1,800.
    one = {"method.epochs": 1, "fraction": 0.2, "rounds": 100, "eval.pooled": "last"}
    assert interval(**one) == 3  # 1800 / (2100 / 4) = 3.4
    assert interval(**one, **{"eval.after_local": "none"}) == 3  # 2.9
    assert interval(**one | {"method.epochs": 4}) == 1  # 0.9
    assert interval(**one | {"fraction": 1.0}) == 1
    assert interval(**one | {"method.epochs": 0}) == 3, "as one epoch"


def test_models_of_each_client_on_all_test_data_cost_most():
    given = {"method.epochs": 5, "fraction": 0.2}
    assert interval(**given, rounds=400) == 20  # 50 x 1,000 + 1,800 of 10,500 / 4
    assert interval(**given, rounds=60) == 6, "ten evaluations at least"
    assert interval(**given, rounds=10) == interval(**given, rounds=3) == 1


@pytest.mark.parametrize("method", ["fedper", "pfedpt", "centralised", "fedem", "ditto"])
def test_methods_that_are_compared_and_their_seeds_have_the_same_rounds(method):
    rng = np.random.default_rng(0)
    sites = [Site("", np.arange(rng.integers(1, 200)), np.arange(30), np.arange(90)) for _ in range(8)]
    given = {"fraction": 0.15, "method.epochs": 2, "rounds": 400, "eval.pooled": "last"}
    expected = interval(sites, **given)
    assert expected > 1
    assert {interval(sites, method=method, seed=seed, **given) for seed in range(8)} == {expected}


def test_a_number_is_taken_as_it_is_and_what_is_not_trained_is_evaluated_once():
    assert interval(rounds=100, **{"eval.every": 7}) == 7
    assert interval(rounds=100, method="zero-shot", backbone="clip-mini") == 100


def test_sites_of_unknown_size_are_evaluated_in_every_round():
    nothing = np.zeros(0, np.int64)
    assert interval([Site("a", nothing, nothing, nothing)] * 50, rounds=100) == 1


@pytest.mark.parametrize("value", [0, -1, 2.5, "often", ""])
def test_other_values_are_refused(value):
    with pytest.raises(UserError, match=rf"^eval.every = {value} must be a positive number of rounds, or auto$"):
        C.make({"eval": {"every": value}})


def test_a_run_evaluates_these_rounds_and_goes_on_with_them(tmp_path):
    given = {"method": "fedper", "method.epochs": 1, "dataset": "digits", "dataset.limit": 200, "fraction": 0.2}
    given |= {"partition": "iid", "partition.clients": 10, "backbone": "cnn-code", "engine.workers": 1}
    once = promptfed.run(out=tmp_path / "run", rounds=23, progress=False, **given)
    lines = [json.loads(line) for line in (once.folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "aggregated" in line] == [*range(2, 23, 2), 23]
    more = promptfed.run(out=tmp_path / "run", rounds=26, resume=True, progress=False)
    lines = [json.loads(line) for line in (more.folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "aggregated" in line] == [*range(2, 23, 2), 23, 24, 26]
