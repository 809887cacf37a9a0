"""Ways to split a dataset among clients."""

from abc import abstractmethod
from typing import Any, ClassVar, Unpack

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import UserError
from .datasets import Dataset
from .federation import Federation, Site
from .shares import (
    Share,
    among,
    apportion,
    by_owner,
    draw_from_pools,
    hands_of,
    official_test,
    rank_of,
    shards,
    stratified,
    thirds,
    uneven_shards,
)

_TRIES = 100  # draws of a random partition before giving up on min_samples
_UNEVEN = "Sizes as in pFedPT's code: of each class, one client gets nearly half and the others parts of an even share."
_STREAM = 0x9A27  # keeps these draws apart from other uses of the same seed


class Partition(BaseModel):
    """The [partition] section. Subclasses implement `assign`: which client gets which samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str] = "custom"
    remedy: ClassVar[str] = "lower partition.clients or partition.min_samples"

    clients: int = Field(10, ge=1, description="Number of clients.")
    split: tuple[float, float, float] = Field(
        (0.7, 0.1, 0.2), description="Shares of train, validation and test in every client's own data; they sum to 1."
    )
    min_samples: int = Field(1, ge=1, description="Minimum number of samples per client.")

    def __init_subclass__(cls, kind: str | None = None, **config: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**config)
        cls.kind = kind or cls.kind

    @field_validator("split")
    @classmethod
    def _sums_to_one(cls, split: tuple[float, float, float]) -> tuple[float, float, float]:
        if not all(0 <= part <= 1 for part in split) or split[0] == 0 or abs(sum(split) - 1) > 1e-6:
            raise ValueError("must be three shares of at least 0 that sum to 1, the first above 0")
        return split

    @abstractmethod
    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        """Indices into the dataset for every client, disjoint."""

    def shares(self, dataset: Dataset, rng: np.random.Generator) -> list[Share]:
        """Train, validation and test indices for every client: what was assigned, split within each class."""
        return stratified(self.assigned(dataset, rng), dataset.labels, self.split, rng)

    def assigned(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        """What is assigned, redrawn until every client has enough."""
        for _ in range(_TRIES):
            parts = self.assign(dataset, rng)
            smallest = min(len(part) for part in parts)
            if smallest >= self.min_samples:
                return parts
            if self.min_samples * len(parts) > len(dataset):
                break
        raise UserError(
            f"partition.min_samples = {self.min_samples} cannot be met: the smallest of {len(parts)} clients "
            f"got {smallest} of {len(dataset)} samples; {self.remedy}"
        )

    def names(self, dataset: Dataset, count: int) -> list[str]:
        """What the clients are called."""
        return [f"client-{i}" for i in range(count)]


class Official(Partition):
    """A partition of the whole dataset, or of its training part if its official test set stays a test set."""

    official: bool = Field(
        False,
        description="Keep the dataset's official test set: clients divide it in the proportions of their training data "
        "of each class (and domain), and `split` divides the rest into train and validation.",
    )

    def shares(self, dataset: Dataset, rng: np.random.Generator) -> list[Share]:
        if not self.official:
            return super().shares(dataset, rng)
        held_out = np.zeros(len(dataset), bool) if dataset.split is None else dataset.split == 2
        if not held_out.any() or held_out.all():
            raise UserError(
                f'partition.official = true: dataset "{dataset.name}" has no official test set as it is loaded '
                "(allowed: false)"
            )
        whole = np.flatnonzero(~held_out)
        parts = [whole[part] for part in self.assigned(dataset.part(whole), rng)]
        train, val, _ = self.split
        shares = stratified(parts, dataset.labels, (train / (train + val), val / (train + val), 0.0), rng)
        tests = official_test(dataset, parts, np.flatnonzero(held_out), rng)
        return [share._replace(test=test) for share, test in zip(shares, tests, strict=True)]


class Iid(Official, kind="iid"):
    """Samples are shuffled and split evenly: all clients have the same distribution."""

    uneven: bool = Field(False, description=_UNEVEN)

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        if self.uneven:
            return uneven_shards(dataset, self.clients, len(np.unique(dataset.labels)), self.min_samples, rng)
        if self.clients > len(dataset):
            raise UserError(f"partition.clients = {self.clients} is more than the {len(dataset)} samples")
        return np.array_split(rng.permutation(len(dataset)), self.clients)


class Dirichlet(Official, kind="dirichlet"):
    """Label skew: the samples of each class go to clients in proportions drawn from Dir(alpha) (Hsu et al. 2019)."""

    remedy: ClassVar[str] = f"{Partition.remedy}, or raise partition.alpha"

    alpha: float = Field(
        0.3, gt=0, allow_inf_nan=False, description="Concentration: small: few classes per client, large: nearly iid."
    )
    min_samples: int = Field(10, ge=1, description="Minimum number of samples per client; redrawn until it is reached.")
    capped: bool = Field(
        False,
        description="A client that has its even share of all samples gets none of the next class (pFedPT's code).",
    )

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        owner = np.empty(len(dataset), dtype=np.int64)
        held = np.zeros(self.clients, dtype=np.int64)
        for label in range(len(dataset.classes)):
            members = rng.permutation(np.flatnonzero(dataset.labels == label))
            proportions = rng.dirichlet(np.full(self.clients, self.alpha))
            if self.capped:
                proportions = among(held * self.clients < len(dataset), proportions)
            owner[members] = apportion(proportions, len(members), rng)
            held += np.bincount(owner[members], minlength=self.clients)
        return by_owner(owner, self.clients)


class Pathological(Official, kind="pathological"):
    """Label skew: every client holds the same small number of classes, in equal shards of each."""

    classes_per_client: int = Field(2, ge=1, description="Number of classes per client.")
    uneven: bool = Field(False, description=_UNEVEN)

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        present = np.unique(dataset.labels)
        if self.classes_per_client > len(present):
            raise UserError(
                f"partition.classes_per_client = {self.classes_per_client} is more than the {len(present)} classes"
            )
        if self.uneven:
            return uneven_shards(dataset, self.clients, self.classes_per_client, self.min_samples, rng)
        return shards(dataset, hands_of(present, self.clients, self.classes_per_client, rng), rng)


class Disjoint(Official, kind="disjoint"):
    """Label skew: each class belongs to one client only."""

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        present = np.unique(dataset.labels)
        if self.clients > len(present):
            raise UserError(
                f"partition.clients = {self.clients} is more than the {len(present)} classes, "
                "each of which goes to one client"
            )
        return shards(dataset, np.array_split(rng.permutation(present), self.clients), rng)


class Domain(Official, kind="domain"):
    """Feature skew: every client holds images of one domain only."""

    clients: int = Field(0, ge=0, description="Number of clients, spread evenly over the domains; 0: one per domain.")

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        parts: list[np.ndarray] = []
        for domain, count in enumerate(self._counts(dataset)):
            members = rng.permutation(np.flatnonzero(dataset.domain == domain))
            parts += np.array_split(members, count)
        return parts

    def names(self, dataset: Dataset, count: int) -> list[str]:
        return [
            domain if holders == 1 else f"{domain}-{i}"
            for domain, holders in zip(dataset.domains, self._counts(dataset), strict=True)
            for i in range(holders)
        ]

    def _counts(self, dataset: Dataset) -> list[int]:
        """How many clients each domain has."""
        domains = len(dataset.domains)
        if domains == 0:
            raise UserError(f'partition.name = "domain" needs a dataset with domains; "{dataset.name}" has none')
        clients = self.clients or domains
        if clients < domains:
            raise UserError(f"partition.clients = {clients} must be at least the number of domains, {domains}, or 0")
        return [clients // domains + (i < clients % domains) for i in range(domains)]


class FewShot(Partition, kind="few-shot"):
    """Few-shot learning with label skew: each client gets some of the classes, with a few training samples per class.

    If there are more clients than classes, clients share classes but no samples. Validation has as many samples per
    class as training, at most 4, and test the rest; `split` and `min_samples` are not used.
    """

    shots: int = Field(16, ge=1, description="Training samples per class of a client.")

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        present = rng.permutation(np.unique(dataset.labels))
        copies = -(-self.clients // len(present))  # above 1: a class for each client, in turn
        dealt = present if copies == 1 else np.tile(present, copies)[: self.clients]
        return shards(dataset, np.array_split(dealt, self.clients), rng)

    def shares(self, dataset: Dataset, rng: np.random.Generator) -> list[Share]:
        val = min(self.shots, 4)
        shares = []
        for part in self.assign(dataset, rng):
            order = rng.permutation(part)
            counts, rank = rank_of(dataset.labels[order])
            short = np.flatnonzero((counts > 0) & (counts < self.shots + val + 1))
            if len(short):
                raise UserError(
                    f"partition.shots = {self.shots} needs {self.shots + val + 1} samples of a class for each client "
                    f'that holds it, but one would have {counts[short[0]]} of "{dataset.classes[short[0]]}"; '
                    "lower partition.shots or partition.clients"
                )
            held = rank < self.shots + val
            shares.append(Share(order[rank < self.shots], order[held & (rank >= self.shots)], order[~held]))
        return shares


class Dominant(Partition, kind="dominant"):
    """Few-shot learning where each client lacks some classes and has one dominant class (DP2FL).

    A client's training data start from `shots` samples per class; it loses the share `drop` of the classes, keeps the
    share `keep` of the samples of the others, and gets the share `add` back for one class, the dominant one. Validation
    is a quarter of that, test all that is left, both in the client's own proportions; `split` and `min_samples` are
    not used.
    """

    shots: int = Field(16, ge=1, description="Samples per class in a client's pool.")
    drop: float = Field(0.2, ge=0, lt=1, description="Share of the classes that a client lacks.")
    keep: float = Field(0.25, gt=0, le=1, description="Share of the pool that a client keeps of its other classes.")
    add: float = Field(0.75, ge=0, le=1, description="Additional share of the pool for its dominant class.")
    overlap: bool = Field(
        False,
        description="All clients draw from the same pools, so that they may have samples in common; none is in two of "
        "train, validation and test.",
    )

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.concatenate(share) for share in self.shares(dataset, rng)]

    def shares(self, dataset: Dataset, rng: np.random.Generator) -> list[Share]:
        train = self._train_counts(np.unique(dataset.labels), len(dataset.classes), rng)  # (clients, classes)
        val = -(-train // 4)
        have = np.bincount(dataset.labels, minlength=len(dataset.classes))
        quarter = -(-self.shots // 4)
        taken = np.full(len(have), self.shots + quarter) if self.overlap else train.sum(0) + val.sum(0)
        used = train.max(0) if self.overlap else train.sum(0)
        # how many test samples per training sample each class allows
        room = np.where(used > 0, (have - taken) / np.maximum(used, 1), np.inf)
        test = np.floor(max(room.min(), 0) * train + 1e-9).astype(np.int64)
        if np.any(test[train > 0] < 1):
            scarce = int(room.argmin())
            raise UserError(
                f"partition.shots = {self.shots} with partition.clients = {self.clients} needs more samples of "
                f'"{dataset.classes[scarce]}" than the {have[scarce]} there are; lower one of them'
            )
        demand = np.stack([train, val, test], 1).reshape(3 * self.clients, -1)  # (3 clients, classes)
        if self.overlap:
            return thirds(draw_from_pools(dataset.labels, demand, [self.shots, self.shots + quarter], rng))
        owner = np.full(len(dataset), -1, dtype=np.int64)
        for label, counts in enumerate(demand.T):
            wanted = np.repeat(np.arange(3 * self.clients), counts)
            owner[rng.permutation(np.flatnonzero(dataset.labels == label))[: len(wanted)]] = wanted
        return thirds(by_owner(owner, 3 * self.clients))

    def _train_counts(self, present: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
        kept = max(1, round(self.shots * self.keep))
        lost = min(round(len(present) * self.drop), len(present) - 1)
        counts = np.zeros((self.clients, classes), dtype=np.int64)
        for row in counts:
            own = rng.permutation(present)[lost:]
            row[own] = kept
            row[own[0]] = min(self.shots, kept + round(self.shots * self.add))  # own is in random order
        return counts


class Sites(Partition, kind="sites"):
    """Clients as the dataset's folder defines them, with its train, validation and test data where it has them."""

    clients: int = Field(0, ge=0, description="Number of clients, the first ones by name; 0: all of them.")

    def assign(self, dataset: Dataset, rng: np.random.Generator) -> list[np.ndarray]:
        if dataset.site is None:
            raise UserError(
                f'partition.name = "sites" needs a folder laid out client/{{train,test}}/class, unlike "{dataset.name}"'
            )
        if self.clients > len(dataset.sites):
            raise UserError(
                f"partition.clients = {self.clients} is more than the {len(dataset.sites)} clients of the folder"
            )
        return by_owner(dataset.site, len(dataset.sites))[: self.clients or None]

    def shares(self, dataset: Dataset, rng: np.random.Generator) -> list[Share]:
        if dataset.split is None:
            return super().shares(dataset, rng)
        parts = self.assign(dataset, rng)
        shares = [Share(*(part[dataset.split[part] == which] for which in range(3))) for part in parts]
        for name, share in zip(dataset.sites, shares, strict=False):
            if len(share.train) < self.min_samples:
                raise UserError(
                    f'partition: client "{name}" has {len(share.train)} training images, at least '
                    f"{self.min_samples} are needed (partition.min_samples)"
                )
        return shares

    def names(self, dataset: Dataset, count: int) -> list[str]:
        return list(dataset.sites[:count])


PARTITIONS: dict[str, type[Partition]] = {
    kind.kind: kind for kind in (Iid, Dirichlet, Pathological, Disjoint, Domain, FewShot, Dominant, Sites)
}


def federate(dataset: Dataset, partition: Partition, seed: int) -> Federation:
    """Split a dataset; the same seed gives the same clients on every machine."""
    rng = np.random.default_rng([seed, _STREAM])
    shares = partition.shares(dataset, rng)
    names = partition.names(dataset, len(shares))
    sites = tuple(
        Site(name, *(np.sort(part).astype(np.int64) for part in share))
        for name, share in zip(names, shares, strict=True)
    )
    about: dict[str, Any] = {"kind": partition.kind, **partition.model_dump(mode="json"), "seed": seed}
    return Federation(dataset, sites, about)
