"""How samples are dealt to clients, and a client's samples to train, validation and test."""

from typing import NamedTuple

import numpy as np

from ..errors import UserError
from .datasets import Dataset


class Share(NamedTuple):
    """The indices of one client."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def by_owner(owner: np.ndarray, count: int) -> list[np.ndarray]:
    """Index lists of `count` owners from the owner of each index; negative: no owner."""
    order = np.argsort(owner, kind="stable")
    sizes = np.bincount(owner[owner >= 0], minlength=count)
    return np.split(order[len(owner) - sizes.sum() :], np.cumsum(sizes)[:-1])


def hands_of(classes: np.ndarray, clients: int, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal `size` different classes to every client from shuffled decks, so that all classes are used about equally."""
    deck: list[int] = []
    hands = []
    for _ in range(clients):
        hand: list[int] = []
        while len(hand) < size:
            drawn = next((card for card in deck if card not in hand), None)
            if drawn is None:
                deck += rng.permutation(classes).tolist()
                continue
            deck.remove(drawn)
            hand.append(drawn)
        hands.append(np.array(hand))
    return hands


def shards(dataset: Dataset, hands: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Every class is split evenly among the clients that hold it; `hands` are the classes of each client."""
    holder = np.repeat(np.arange(len(hands)), [len(hand) for hand in hands])
    held = np.concatenate(hands)
    owner = np.full(len(dataset), -1, dtype=np.int64)
    for label in np.unique(held):
        clients = holder[held == label]
        members = rng.permutation(np.flatnonzero(dataset.labels == label))
        if len(members) < len(clients):
            raise UserError(
                f"partition.clients = {len(hands)} is too many: {len(clients)} of them would share "
                f'the {len(members)} samples of "{dataset.classes[label]}"'
            )
        owner[members] = clients[np.arange(len(members)) * len(clients) // len(members)]
    return by_owner(owner, len(hands))


def among(able: np.ndarray, proportions: np.ndarray) -> np.ndarray:
    """Proportions among those that are able, at least one; even ones where all of theirs have vanished."""
    left = np.where(able, proportions, 0.0)
    left = left if left.sum() > 0 else able.astype(float)
    return np.asarray(left / left.sum())


def uneven_shards(
    dataset: Dataset, clients: int, classes_per_client: int, min_samples: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Classes go to clients in order, each to equally many. Of a class all holders but the last draw between a tenth
    and the whole of an even share, and the last one gets the rest: about 46 % of the class if there are many."""
    present = np.unique(dataset.labels)
    holders = clients * classes_per_client // len(present)
    if not holders:
        raise UserError(
            f"partition.uneven = true: {clients} clients with {classes_per_client} classes each cannot hold all "
            f"{len(present)} classes; raise partition.clients or partition.classes_per_client"
        )
    owner = np.full(len(dataset), -1, dtype=np.int64)
    free = np.full(clients, classes_per_client)  # classes that a client may still get
    for label in present:
        chosen = np.flatnonzero(free)[:holders]
        members = rng.permutation(np.flatnonzero(dataset.labels == label))
        even = len(members) / len(chosen)
        low = int(max(even / 10, min_samples / len(present)))
        ends = np.cumsum(rng.integers(low, max(int(even), low + 1), len(chosen) - 1))
        owner[members] = chosen[np.searchsorted(ends, np.arange(len(members)), side="right")]
        free[chosen] -= 1
    return by_owner(owner, clients)


def rank_of(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often each label occurs, and for each position how many equal labels come before it."""
    counts = np.bincount(labels)
    rank = np.empty(len(labels), dtype=np.int64)
    rank[np.argsort(labels, kind="stable")] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return counts, rank


def stratified(
    parts: list[np.ndarray], labels: np.ndarray, split: tuple[float, float, float], rng: np.random.Generator
) -> list[Share]:
    """Split every client's samples so that train, validation and test have its own class proportions.

    Classes with 1 or 2 samples stay in train, and each class keeps at least one sample there. All clients at once,
    as a loop over ten thousand of them would take minutes.
    """
    clients = len(parts)
    sizes = np.array([len(part) for part in parts])
    index = np.concatenate(parts).astype(np.int64)  # (M,)
    owner = np.repeat(np.arange(clients), sizes)  # (M,)
    shuffle = rng.permutation(len(index))
    order = shuffle[np.lexsort((labels[index][shuffle], owner[shuffle]))]  # by client, class, at random
    index, owner = index[order], owner[order]

    # groups of one class of one client: g of them
    fresh = np.r_[True, (owner[1:] != owner[:-1]) | (labels[index][1:] != labels[index][:-1])]
    start = np.flatnonzero(fresh)  # (g,)
    holder = owner[start]  # (g,)
    size = np.diff(np.r_[start, len(index)])  # (g,)
    val = _quota(size, holder, split[1])
    test = np.minimum(_quota(size, holder, split[2]), size - 1)
    val = np.minimum(val, size - 1 - test)

    if split[2] > 0:  # a client with at least 3 samples gets test data
        tested = np.bincount(holder, test, minlength=clients)
        largest = np.lexsort((np.arange(len(size)), -size, holder))  # groups of a client, largest first
        first = largest[np.r_[True, holder[largest][1:] != holder[largest][:-1]]]
        lacking = first[(tested[holder[first]] == 0) & (sizes[holder[first]] >= 3)]
        val[lacking] = np.minimum(val[lacking], np.maximum(size[lacking] - 2, 0))
        test[lacking] = 1

    rank = np.arange(len(index)) - np.repeat(start, size)  # (M,) place within the group
    held_out = np.repeat(test, size)
    which = np.where(rank < held_out, 2, np.where(rank < held_out + np.repeat(val, size), 1, 0))
    return thirds([index[cell] for cell in by_owner(owner * 3 + which, clients * 3)])


def thirds(cells: list[np.ndarray]) -> list[Share]:
    """Train, validation and test of one client after the other."""
    return [Share(*cells[i : i + 3]) for i in range(0, len(cells), 3)]


def _quota(size: np.ndarray, holder: np.ndarray, share: float) -> np.ndarray:
    """How many samples of each group to hold out: rounded on the running total, so that a client's sum is right."""
    eligible = np.where(size >= 3, size, 0)
    running = np.cumsum(eligible)
    before = np.r_[0, running[:-1]][np.searchsorted(holder, holder)]  # total of all earlier clients
    upto = np.floor((running - before) * share + 0.5)
    since = np.floor((running - eligible - before) * share + 0.5)
    quota: np.ndarray = (upto - since).astype(np.int64)
    return quota


def official_test(
    dataset: Dataset, parts: list[np.ndarray], test: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Test samples for every client: of each class (and domain) in the proportions of what clients hold of it. What
    nobody holds is left out."""
    cell = dataset.labels if dataset.domain is None else dataset.labels * len(dataset.domains) + dataset.domain
    cells = int(cell.max()) + 1
    held = np.stack([np.bincount(cell[part], minlength=cells) for part in parts])  # (clients, cells)
    owner = np.full(len(test), -1, dtype=np.int64)
    for c in np.unique(cell[test]):
        if held[:, c].any():
            members = rng.permutation(np.flatnonzero(cell[test] == c))
            owner[members] = apportion(held[:, c] / held[:, c].sum(), len(members), rng)
    return [test[part] for part in by_owner(owner, len(parts))]


def apportion(proportions: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """The owner of each of n samples, in these proportions, (n,)."""
    # rounded from a random start: always rounding down would starve the first of many clients
    cuts = np.floor(np.cumsum(proportions)[:-1] * n + rng.random())
    return np.searchsorted(cuts, np.arange(n), side="right")


def draw_from_pools(
    labels: np.ndarray, demand: np.ndarray, cuts: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Train, validation and test of one client after the other, as many of each class as demand (3 clients, classes)
    says. A class is cut into three pools at these places; each client draws from them as if it were alone."""
    drawn: list[list[np.ndarray]] = [[] for _ in demand]
    for label, counts in enumerate(demand.T):
        pools = np.split(rng.permutation(np.flatnonzero(labels == label)), cuts)
        for i, count in enumerate(counts):
            drawn[i].append(rng.permutation(pools[i % 3])[:count])
    return [np.concatenate(parts) for parts in drawn]
