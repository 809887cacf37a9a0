"""Datasets, and how they are split among clients."""

from .catalogue import CATALOGUE, Entry
from .datasets import Dataset, DatasetConfig, load
from .federation import Federation, Site
from .partitions import PARTITIONS, Partition, federate

__all__ = [
    "CATALOGUE",
    "PARTITIONS",
    "Dataset",
    "DatasetConfig",
    "Entry",
    "Federation",
    "Partition",
    "Site",
    "federate",
    "load",
]
