"""Classes and domains that nobody trains on, to be tested on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import UserError, unknown
from .datasets import Dataset
from .federation import Federation, Site
from .partitions import Partition, federate

Novel = float | tuple[str, ...]  # a share of the classes, or their names


def novel_classes(dataset: Dataset, novel: Novel) -> tuple[str, ...]:
    """The classes that are held back: those named, or of a share the last ones."""
    classes = dataset.classes
    if not isinstance(novel, tuple):
        chosen = classes[len(classes) - round(novel * len(classes)) :]
    else:
        for name in novel:
            if name not in classes:
                raise unknown("eval.novel", name, classes)
        chosen = tuple(name for name in classes if name in novel)
    if not 2 <= len(chosen) <= len(classes) - 2:
        given = list(novel) if isinstance(novel, tuple) else novel
        raise UserError(
            f'eval.novel = {given} holds back {len(chosen)} of the {len(classes)} classes of "{dataset.name}"; at '
            "least 2 must be held back, and 2 must remain"
        )
    return chosen


def without_classes(dataset: Dataset, novel: tuple[str, ...]) -> Dataset:
    """The same images, with labels from which only the remaining classes have names: they come first."""
    base = tuple(name for name in dataset.classes if name not in novel)
    order = [dataset.classes.index(name) for name in (*base, *novel)]
    renumbered = np.argsort(order)  # the inverse permutation
    return replace(dataset, labels=renumbered[dataset.labels], classes=base)


def only_classes(dataset: Dataset, names: tuple[str, ...]) -> tuple[Dataset, np.ndarray]:
    """The dataset labelled by these classes alone, and the indices of their images."""
    others = tuple(name for name in dataset.classes if name not in names)
    found = without_classes(dataset, others)
    return found, _named(found)


def _named(dataset: Dataset) -> np.ndarray:
    """The images whose class has a name."""
    return np.flatnonzero(dataset.labels < len(dataset.classes))


def federate_named(dataset: Dataset, partition: Partition, seed: int) -> Federation:
    """A split of the images whose class has a name; the others are at no client."""
    index = _named(dataset)
    # A partition looks at labels and domains, not at images.
    drawn = federate(replace(dataset, **{k: v[index] for k, v in dataset.arrays().items()}), partition, seed)
    sites = (Site(s.name, index[s.train], index[s.val], index[s.test]) for s in drawn.sites)
    return Federation(dataset, tuple(sites), drawn.about)


def check_named(federation: Federation, source: str) -> None:
    """Refuses a split, read from a source, in which clients hold images of a class without a name."""
    data = federation.dataset
    for site in federation.sites:
        if (data.labels[_held(site)] >= len(data.classes)).any():
            raise UserError(f'eval.novel: "{source}" gives client "{site.name}" images of classes that are held back')


def leave_out(federation: Federation, domain: str) -> Federation:
    """The clients of a domain train on nothing, and are tested on all images that they have."""
    late, sites = clients_of(federation, domain), list(federation.sites)
    if len(late) == len(sites):
        raise UserError(f'eval.leave_out = "{domain}" is the only domain of "{federation.dataset.name}"')
    for i in late:
        none = np.zeros(0, np.int64)
        sites[i] = Site(sites[i].name, train=none, val=none, test=np.sort(_held(sites[i])))
    return replace(federation, sites=tuple(sites), about={**federation.about, "leave_out": domain})


def clients_of(federation: Federation, domain: str) -> tuple[int, ...]:
    """The clients that hold images of a domain, where each holds one only."""
    data = federation.dataset
    if domain not in data.domains:
        raise unknown("eval.leave_out", domain, data.domains)
    assert data.domain is not None
    held, there = map(_held, federation.sites), data.domains.index(domain)
    return tuple(i for i, index in enumerate(held) if len(index) and data.domain[index[0]] == there)


def _held(site: Site) -> np.ndarray:
    return np.concatenate([site.train, site.val, site.test])
