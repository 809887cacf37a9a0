"""Prompt-based federated learning over vision and vision-language models."""

from .api import Result, run
from .comparison import compare
from .data import Dataset, DatasetConfig, Federation, Partition, federate
from .data import load as load_dataset
from .errors import UserError
from .method import Batch, Context, FedAvg, Method, Phase, State, Update
from .models import Model
from .params import Params
from .serving import Predictions, Predictor, export, load
from .serving.joining import join
from .tuning import Full, Optimizer, PixelPrompt, PrivatePrompt, TokenPrompt, Tuning

__all__ = [
    "Batch",
    "Context",
    "Dataset",
    "DatasetConfig",
    "FedAvg",
    "Federation",
    "Full",
    "Method",
    "Model",
    "Optimizer",
    "Params",
    "Partition",
    "Phase",
    "PixelPrompt",
    "Predictions",
    "Predictor",
    "PrivatePrompt",
    "Result",
    "State",
    "TokenPrompt",
    "Tuning",
    "Update",
    "UserError",
    "compare",
    "export",
    "federate",
    "join",
    "load",
    "load_dataset",
    "run",
]
