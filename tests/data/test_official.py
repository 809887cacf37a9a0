"""The splits of pFedPT's code, and official test sets."""

from collections.abc import Callable

import numpy as np
import pytest

from promptfed.data import Dataset, federate
from promptfed.data.partitions import Dirichlet, Disjoint, Domain, Iid, Pathological
from promptfed.errors import UserError

Make = Callable[..., Dataset]
LABELS = np.arange(3000) % 10  # 10 classes of 300
LAST = (np.arange(3000) >= 2500) * np.int8(2)  # 250 for training and 50 for testing of each class


def test_a_client_that_has_its_even_share_gets_no_further_class(make: Make) -> None:
    data = make(LABELS)
    counts = [
        np.stack([np.bincount(LABELS[part], minlength=10) for part in kind.assign(data, np.random.default_rng(4))])
        for kind in (Dirichlet(alpha=0.1, clients=20, capped=True), Dirichlet(alpha=0.1, clients=20))
    ]
    for capped, found in zip((True, False), counts, strict=True):
        before = np.cumsum(found, axis=1) - found  # what a client has when a class is dealt
        assert bool(found[before >= len(data) / 20].sum() == 0) is capped
        assert found.sum() == len(data)


def test_in_the_authors_pathological_split_two_clients_hold_nearly_half(make: Make) -> None:
    data = make(np.arange(30_000) % 10)
    parts = Pathological(clients=50, classes_per_client=5, uneven=True).assign(data, np.random.default_rng(0))
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 30_000
    assert set(np.argsort(-sizes)[:2]) == {24, 49}
    assert 0.42 < sizes[[24, 49]].sum() / 30_000 < 0.52
    even = 30_000 / 10 / 25
    for i, part in enumerate(parts):
        counts = np.bincount(data.labels[part], minlength=10)
        assert np.flatnonzero(counts).tolist() == (list(range(5)) if i < 25 else list(range(5, 10)))
        if i not in (24, 49):
            assert even / 10 <= counts[counts > 0].min() <= counts.max() < even


def test_in_the_authors_iid_split_one_client_holds_nearly_half(make: Make) -> None:
    sizes = [
        len(site.train) + len(site.test)
        for site in federate(make(LABELS), Iid(uneven=True, split=(0.8, 0, 0.2)), 0).sites
    ]
    assert sum(sizes) == 3000
    assert max(sizes) == sizes[-1] > 0.4 * 3000


def test_classes_that_clients_cannot_hold_are_told(make: Make) -> None:
    with pytest.raises(UserError, match=r"4 clients with 2 classes each cannot hold all 10 classes"):
        federate(make(LABELS), Pathological(clients=4, uneven=True), 0)


@pytest.mark.parametrize(
    "partition", [Iid(official=True), Dirichlet(official=True), Pathological(official=True), Disjoint(official=True)]
)
def test_the_official_test_set_is_divided_as_the_training_data(make: Make, partition: Iid) -> None:
    found = federate(make(LABELS, split=LAST), partition, 1)
    train, val, test = (found.label_counts(split) for split in ("train", "val", "test"))
    assert train.sum() + val.sum() == 2500
    assert test.sum() == 500
    assert all(site.test.min() >= 2500 and max(site.train.max(), site.val.max()) < 2500 for site in found.sites)
    assert np.abs(test - (train + val) / 5).max() < 1  # in every client's own proportions
    assert val.sum() == pytest.approx(2500 / 8, rel=0.1)  # 0.1 of 0.7 + 0.1


def test_domains_have_their_own_official_test_data(make: Make) -> None:
    domain = np.arange(3000) // 10 % 2
    data = make(LABELS, split=LAST, domains=("x", "y"), domain=domain)
    for i, site in enumerate(federate(data, Domain(official=True), 0).sites):
        assert set(domain[site.test]) == {i}
        assert len(site.test) == 250


@pytest.mark.parametrize("split", [None, np.zeros(3000, np.int8)])
def test_a_dataset_without_an_official_test_set_is_refused(make: Make, split: np.ndarray | None) -> None:
    with pytest.raises(UserError, match=r'^partition.official = true: dataset "toy" has no official test set'):
        federate(make(LABELS, split=split), Iid(official=True), 0)
