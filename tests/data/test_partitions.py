"""What every partition promises."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from promptfed.data import PARTITIONS, Dataset, DatasetConfig, Federation, federate, load
from promptfed.data.partitions import (
    Dirichlet,
    Disjoint,
    Domain,
    Dominant,
    FewShot,
    Iid,
    Partition,
    Pathological,
    Sites,
    stratified,
)
from promptfed.errors import UserError
from promptfed.runs import config as C

Make = Callable[..., Dataset]
BALANCED = np.repeat(np.arange(10), 120)  # 10 classes of 120
relaxed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def everything(federation: Federation) -> np.ndarray:
    """All indices that were dealt out; fails when one of them was dealt twice."""
    parts = [part for site in federation.sites for part in (site.train, site.val, site.test)]
    for part in parts:
        assert part.dtype == np.int64
        assert all(a < b for a, b in pairwise(part.tolist()))
    every = np.concatenate(parts)
    assert len(np.unique(every)) == len(every)
    return np.sort(every)


def held(federation: Federation) -> np.ndarray:
    """(clients, classes): samples over all splits."""
    return sum(federation.label_counts(split) for split in ("train", "val", "test"))  # type: ignore[return-value]


PLENTY = [
    Iid(),
    Dirichlet(),
    Pathological(),
    Pathological(classes_per_client=3, clients=7),
    Disjoint(clients=4),
    Domain(),
    Domain(clients=5),
    FewShot(clients=5),
    FewShot(clients=15, shots=4),
    Dominant(clients=5),
    Sites(),
]


@pytest.mark.parametrize("partition", PLENTY, ids=lambda p: f"{p.kind}-{p.clients}")
def test_disjoint_repeatable_and_seeded(make: Make, partition: Partition) -> None:
    three = np.arange(1200) % 3
    dataset = make(BALANCED, domains=("x", "y", "z"), domain=three, sites=("p", "q", "r"), site=three)
    first, same, other = (federate(dataset, partition, seed) for seed in (1, 1, 2))
    every = everything(first)
    if partition.kind != "dominant":
        assert np.array_equal(every, np.arange(1200))  # nothing is lost
    assert [s.train.tolist() for s in first.sites] == [s.train.tolist() for s in same.sites]
    assert [s.train.tolist() for s in first.sites] != [s.train.tolist() for s in other.sites]
    assert len(first.sites) == (partition.clients or 3)
    assert len({site.name for site in first.sites}) == len(first.sites)
    assert first.about["kind"] == partition.kind
    assert PARTITIONS[partition.kind] is type(partition)
    assert first.about["seed"] == 1


@relaxed
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    shares=st.tuples(st.integers(1, 10), st.integers(0, 10), st.integers(0, 10)),
    seed=st.integers(0, 99),
)
def test_stratified_split(labels: list[int], cuts: list[int], shares: tuple[int, int, int], seed: int) -> None:
    split = tuple(part / sum(shares) for part in shares)
    parts = np.split(np.arange(len(labels)), np.sort(np.minimum(cuts, len(labels))).astype(int))
    parts = [part for part in parts if len(part)]
    labels_ = np.array(labels)
    for part, share in zip(parts, stratified(parts, labels_, split, np.random.default_rng(seed)), strict=True):  # type: ignore[arg-type]
        assert sorted(np.concatenate(share).tolist()) == part.tolist()
        assert len(share.train) >= 1
        assert len(share.test) == 0 or split[2] > 0
        assert len(share.val) == 0 or split[1] > 0
        if len(part) >= 3 and split[2] > 0:
            assert len(share.test) >= 1
        for label in np.unique(labels_[part]):
            count = (labels_[part] == label).sum()
            for which, ratio in ((share.val, split[1]), (share.test, split[2])):
                assert (labels_[which] == label).sum() <= count * ratio + 1  # its own proportion, to within one


def test_split_shares_are_exact_for_large_clients(make: Make) -> None:
    site = federate(make(BALANCED), Iid(clients=1), 0).sites[0]
    assert [len(site.train), len(site.val), len(site.test)] == [840, 120, 240]
    counts = federate(make(BALANCED), Iid(clients=1), 0).label_counts("test")
    assert counts.tolist() == [[24] * 10]


def test_clients_of_one_two_and_three_samples(make: Make) -> None:
    dataset = make([0, 0, 0, 1, 2, 3], sites=("a", "b", "c"), site=np.array([0, 1, 1, 2, 2, 2]))
    a, b, c = federate(dataset, Sites(), 0).sites
    assert (len(a.train), len(a.test)) == (1, 0)
    assert (len(b.train), len(b.test)) == (2, 0)
    assert (len(c.train), len(c.test)) == (2, 1)


@relaxed
@given(
    sizes=st.lists(st.integers(0, 60), min_size=2, max_size=6).filter(lambda s: sum(s) >= 40),
    clients=st.integers(1, 8),
    alpha=st.floats(0.05, 50),
)
def test_dirichlet_deals_out_everything(make: Make, sizes: list[int], clients: int, alpha: float) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    dataset = make(labels, classes=len(sizes))
    parts = Dirichlet(clients=clients, alpha=alpha).assign(dataset, np.random.default_rng(0))
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


def test_dirichlet_proportions_have_the_right_moments(make: Make) -> None:
    """The share p of a class that one of K clients gets has mean 1/K and variance (1/K)(1 - 1/K) / (K alpha + 1)."""
    dataset = make(np.repeat(np.arange(40), 500))
    alpha, k = 0.5, 5
    draws = np.stack(
        [
            [
                np.bincount(dataset.labels[part], minlength=40) / 500
                for part in Dirichlet(clients=k, alpha=alpha).assign(dataset, np.random.default_rng(seed))
            ]
            for seed in range(25)
        ]
    )  # (draws, clients, classes)
    assert draws.sum(1) == pytest.approx(1)
    assert draws.mean((0, 2)) == pytest.approx([1 / k] * k, abs=0.03)
    assert draws.var((0, 2)) == pytest.approx([(1 / k) * (1 - 1 / k) / (k * alpha + 1)] * k, rel=0.2)


def test_dirichlet_follows_the_drawn_proportions(make: Make) -> None:
    dataset = make(BALANCED)
    parts = Dirichlet(clients=6, alpha=0.4).assign(dataset, np.random.default_rng(3))
    rng = np.random.default_rng(3)
    for label in range(10):
        rng.permutation(120)
        expected = rng.dirichlet([0.4] * 6) * 120
        rng.random()
        got = [int((dataset.labels[part] == label).sum()) for part in parts]
        assert np.abs(np.array(got) - expected).max() <= 1


def test_dirichlet_retries_then_says_what_to_change(make: Make) -> None:
    dataset = make(BALANCED)
    federation = federate(dataset, Dirichlet(clients=20, alpha=0.3, min_samples=15), 0)
    assert held(federation).sum(1).min() >= 15
    with pytest.raises(UserError, match=r"partition.min_samples = 59 cannot be met: .* or raise partition.alpha"):
        federate(dataset, Dirichlet(clients=20, alpha=0.05, min_samples=59), 0)
    with pytest.raises(UserError, match=r"partition.min_samples = 10 cannot be met"):
        federate(dataset, Dirichlet(clients=1000), 0)


def test_tiny_alpha_is_sound(make: Make) -> None:
    parts = Dirichlet(clients=5, alpha=1e-6).assign(make(BALANCED), np.random.default_rng(0))
    assert sum(map(len, parts)) == 1200


@relaxed
@given(clients=st.integers(1, 40), k=st.integers(1, 10), seed=st.integers(0, 50))
def test_pathological_classes(make: Make, clients: int, k: int, seed: int) -> None:
    federation = federate(make(BALANCED), Pathological(clients=clients, classes_per_client=k), seed)
    counts = held(federation)
    assert ((counts > 0).sum(1) == k).all()
    assert (counts.sum(0) > 0).sum() == min(10, clients * k)  # all classes are used when that is possible
    assert set(counts.sum(0)) <= {0, 120}  # and each one wholly
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 2


def test_pathological_impossible(make: Make) -> None:
    with pytest.raises(UserError, match=r"partition.classes_per_client = 11 is more than the 10 classes"):
        federate(make(BALANCED), Pathological(classes_per_client=11), 0)
    with pytest.raises(
        UserError, match=r"partition.clients = 9 is too many: 9 of them would share the 3 samples of .c1"
    ):
        federate(make([0] * 50 + [1] * 3), Pathological(clients=9), 0)


def test_disjoint_classes(make: Make) -> None:
    counts = held(federate(make(BALANCED), Disjoint(clients=4), 0))
    assert ((counts > 0).sum(0) == 1).all()
    assert sorted((counts > 0).sum(1)) == [2, 2, 3, 3]
    with pytest.raises(UserError, match=r"partition.clients = 11 is more than the 10 classes"):
        federate(make(BALANCED), Disjoint(clients=11), 0)


def test_domain_clients(make: Make) -> None:
    domain = np.repeat([0, 1], 600)
    dataset = make(BALANCED, domains=("art", "web"), domain=domain)
    federation = federate(dataset, Domain(), 0)
    assert [site.name for site in federation.sites] == ["art", "web"]
    assert all((domain[site.train] == i).all() for i, site in enumerate(federation.sites))
    many = federate(dataset, Domain(clients=5), 0)
    assert [site.name for site in many.sites] == ["art-0", "art-1", "art-2", "web-0", "web-1"]
    with pytest.raises(UserError, match=r"partition.clients = 1 must be at least the number of domains, 2"):
        federate(dataset, Domain(clients=1), 0)
    with pytest.raises(UserError, match=r'partition.name = "domain" needs a dataset with domains'):
        federate(make(BALANCED), Domain(), 0)


@pytest.mark.parametrize(("clients", "shots"), [(5, 16), (3, 2), (25, 8)])
def test_few_shot_counts(make: Make, clients: int, shots: int) -> None:
    federation = federate(make(BALANCED), FewShot(clients=clients, shots=shots), 0)
    assert set(federation.label_counts("train").ravel()) == {0, shots}
    assert set(federation.label_counts("val").ravel()) == {0, min(shots, 4)}
    assert held(federation).sum(0).tolist() == [120] * 10
    holders = (held(federation) > 0).sum(0)
    assert holders.max() == max(1, -(-clients // 10))


def test_few_shot_needs_enough(make: Make) -> None:
    with pytest.raises(UserError, match=r"partition.shots = 118 needs 123 samples .*one would have 120"):
        federate(make(BALANCED), FewShot(clients=2, shots=118), 0)


def test_dominant_counts_by_hand(make: Make) -> None:
    """10 classes, 16 shots: 2 are dropped, 7 keep 4 shots, the dominant one has 4 + 12 = 16."""
    federation = federate(make(np.repeat(np.arange(10), 400)), Dominant(clients=6), 0)
    everything(federation)
    for train, val, test in zip(*(federation.label_counts(s) for s in ("train", "val", "test")), strict=True):
        assert sorted(train) == [0, 0, 4, 4, 4, 4, 4, 4, 4, 16]
        assert sorted(val) == [0, 0, 1, 1, 1, 1, 1, 1, 1, 4]
        kept = np.sort(test[train == 4])
        assert kept[0] == kept[-1] > 4
        assert abs(test[train == 16][0] - 4 * kept[0]) < 4  # the client's own proportions
        assert test[train == 0].sum() == 0


def test_dominant_clients_may_draw_from_one_pool(make: Make, tmp_path: Path) -> None:
    """60 samples per class are 16 for training, 4 for validation and 40 for tests, whatever the number of clients."""
    dataset = make(np.repeat(np.arange(10), 60))
    with pytest.raises(UserError, match=r"needs more samples"):
        federate(dataset, Dominant(clients=10), 0)
    federation = federate(dataset, Dominant(clients=10, overlap=True), 0)
    assert [sorted(row) for row in federation.label_counts()] == [[0] * 2 + [4] * 7 + [16]] * 10
    assert [sorted(row) for row in federation.label_counts("val")] == [[0] * 2 + [1] * 7 + [4]] * 10
    assert [sorted(row) for row in federation.label_counts("test")] == [[0] * 2 + [10] * 7 + [40]] * 10
    kinds = [set(np.concatenate([getattr(s, k) for s in federation.sites])) for k in ("train", "val", "test")]
    assert not kinds[0] & kinds[1] | kinds[0] & kinds[2] | kinds[1] & kinds[2]
    assert len(kinds[0]) <= 160  # one pool
    assert len(kinds[0]) < sum(len(site.train) for site in federation.sites)  # from which they draw again and again
    for site in federation.sites:
        assert len(set(site.train)) == len(site.train)
    federation.save(tmp_path / "split.json")
    again = Federation.load(tmp_path / "split.json", dataset)
    assert [s.train.tolist() for s in again.sites] == [s.train.tolist() for s in federation.sites]
    text = json.loads((tmp_path / "split.json").read_text())
    for split in ("train", "test"):  # the client itself, and another one
        changed = json.loads(json.dumps(text))
        changed["clients"][0][split].append(changed["clients"][0 if split == "train" else 1]["train"][0])
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match="assigns some images twice"):
            Federation.load(tmp_path / "changed.json", dataset)


@pytest.mark.parametrize(("classes", "fewest"), [(101, 31), (102, 40)])  # Caltech101, Flowers102
@pytest.mark.parametrize("preset", ["dp2fl", "experiments/dp2fl/table1.toml", "experiments/dp2fl/table3.toml"])
def test_the_presets_of_dp2fl_fit_its_smallest_datasets(make: Make, classes: int, fewest: int, preset: str) -> None:
    """Ten or eleven clients with 16 shots, from one pool."""
    root = Path(__file__).parents[2]
    table = C.read(root / preset if "/" in preset else preset)["partition"]
    partition = PARTITIONS[table["name"]].model_validate({k: v for k, v in table.items() if k != "name"})
    federation = federate(make(np.repeat(np.arange(classes), fewest)), partition, 0)
    assert len(federation.sites) == table["clients"]
    assert all(row.max() == 16 and set(row) == {0, 4, 16} for row in federation.label_counts("train"))
    trained = federation.label_counts("train") > 0
    assert (federation.label_counts("test")[trained] >= 2).all()


def test_dominant_other_settings_and_limits(make: Make) -> None:
    counts = federate(make(BALANCED), Dominant(clients=2, shots=8, drop=0.5, keep=0.5, add=0.25), 0).label_counts()
    assert [sorted(row) for row in counts] == [[0] * 5 + [4] * 4 + [6]] * 2
    with pytest.raises(UserError, match=r"partition.shots = 16 with partition.clients = 40 needs more samples"):
        federate(make(BALANCED), Dominant(clients=40), 0)


def test_sites_keep_the_split_of_the_folder(tmp_path: Path, paint) -> None:
    for client, count in (("one", 3), ("two", 5)):
        for i in range(count):
            paint(tmp_path / "set" / client / "train" / "cup" / f"{i}.png")
        paint(tmp_path / "set" / client / "test" / "cup" / "0.png")
    dataset = load(DatasetConfig(name=str(tmp_path / "set")))
    one, two = federate(dataset, Sites(), 0).sites
    assert [(s.name, len(s.train), len(s.val), len(s.test)) for s in (one, two)] == [("one", 3, 0, 1), ("two", 5, 0, 1)]
    with pytest.raises(UserError, match=r'client "one" has 3 training images'):
        federate(dataset, Sites(min_samples=4), 0)
    with pytest.raises(UserError, match=r"partition.clients = 3 is more than the 2 clients of the folder"):
        federate(dataset, Sites(clients=3), 0)


def test_sites_need_a_folder_of_sites(make: Make) -> None:
    with pytest.raises(UserError, match=r'partition.name = "sites" needs a folder laid out client/'):
        federate(make(BALANCED), Sites(), 0)


@pytest.mark.parametrize("split", [(0.5, 0.1, 0.1), (0, 0.5, 0.5), (1.2, -0.1, -0.1)])
def test_bad_split(split: tuple[float, float, float]) -> None:
    with pytest.raises(ValidationError, match=r"must be three shares"):
        Iid(split=split)


@pytest.mark.parametrize("bad", [{"alpha": 0}, {"alpha": -1}, {"alpha": float("inf")}, {"clients": 0}, {"alhpa": 1}])
def test_bad_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Dirichlet(**bad)  # type: ignore[arg-type]


def test_every_setting_is_described() -> None:
    for model in (DatasetConfig, *PARTITIONS.values()):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_a_partition_of_ones_own(make: Make) -> None:
    class EvenOdd(Partition):
        def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
            return [np.arange(0, len(dataset), 2), np.arange(1, len(dataset), 2)]

    federation = federate(make(BALANCED), EvenOdd(), 0)
    assert all((site.train % 2 == i).all() for i, site in enumerate(federation.sites))


@pytest.mark.parametrize(
    "partition",
    [Iid(clients=10_000), Dirichlet(clients=10_000, alpha=10, min_samples=1), Pathological(clients=10_000)],
    ids=lambda p: p.kind,
)
def test_ten_thousand_clients(make: Make, tmp_path: Path, partition: Partition) -> None:
    """Ten times the clients take less than ten times the time."""
    dataset, spent = make(np.arange(200_000) % 100), []
    for clients in (1_000, 10_000):
        start = process_time()
        federation = federate(dataset, partition.model_copy(update={"clients": clients}), 0)
        federation.save(tmp_path / "partition.json")
        again = Federation.load(tmp_path / "partition.json", dataset)
        spent.append(process_time() - start)
    assert spent[1] < 10 * spent[0]
    assert len(federation.sites) == 10_000
    assert np.array_equal(again.label_counts(), federation.label_counts())
    assert len(everything(federation)) == 200_000
    assert (tmp_path / "partition.json").stat().st_size < 3e6
