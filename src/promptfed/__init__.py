"""Prompt-based federated learning over vision and vision-language models."""

from typing import TYPE_CHECKING

from .cli import lazy

if TYPE_CHECKING:
    from .data import Dataset, DatasetConfig, Federation, Partition, federate
    from .data import load as load_dataset
    from .errors import UserError
    from .method import FedAvg, Method, State
    from .models import Model
    from .params import Params
    from .phases import Batch, Context, Optimizer, Phase, Update
    from .runs.api import Result, run
    from .runs.comparison import compare
    from .search.choose import choose
    from .search.tune import tune
    from .serving import Predictions, Predictor, export, load
    from .serving.joining import join
    from .tuning import Full, PrivatePrompt, Tuning
    from .tunings.pixels import PixelPrompt
    from .tunings.tokens import TokenPrompt
else:
    __getattr__ = lazy.names(
        __name__,
        {
            **dict.fromkeys(("Result", "run"), ".runs.api"),
            "compare": ".runs.comparison",
            "tune": ".search.tune",
            "choose": ".search.choose",
            **dict.fromkeys(("Dataset", "DatasetConfig", "Federation", "Partition", "federate"), ".data"),
            "load_dataset": ".data:load",
            "UserError": ".errors",
            **dict.fromkeys(("FedAvg", "Method", "State"), ".method"),
            "Model": ".models",
            "Params": ".params",
            **dict.fromkeys(("Batch", "Context", "Optimizer", "Phase", "Update"), ".phases"),
            **dict.fromkeys(("Predictions", "Predictor", "export", "load"), ".serving"),
            "join": ".serving.joining",
            **dict.fromkeys(("Full", "PrivatePrompt", "Tuning"), ".tuning"),
            "PixelPrompt": ".tunings.pixels",
            "TokenPrompt": ".tunings.tokens",
        },
    )

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
    "choose",
    "compare",
    "export",
    "federate",
    "join",
    "load",
    "load_dataset",
    "run",
    "tune",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
