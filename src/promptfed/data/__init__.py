"""Datasets, partitions, and the federations they make."""

from .catalogue import CATALOGUE
from .datasets import Dataset, DatasetConfig, load
from .federation import Federation, Site
from .partition import PARTITIONS, Partition, federate

__all__ = ["CATALOGUE", "PARTITIONS", "Dataset", "DatasetConfig", "Federation", "Partition", "Site", "federate", "load"]
