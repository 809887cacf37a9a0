"""Datasets, and how they are dealt out to clients."""

from promptfed.data.catalogue import CATALOGUE, Entry
from promptfed.data.datasets import Dataset, DatasetConfig, load
from promptfed.data.federation import Federation, Site
from promptfed.data.partition import PARTITIONS, Partition, federate

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
