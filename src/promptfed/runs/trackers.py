"""Experiment trackers: each is given the numbers of every round. All of them work offline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..server import Line
from . import record
from .record import STAGES, View

Log = Callable[[int, dict[str, float]], object]  # of a round: tag -> value
PROJECT = "promptfed"


def scalars(line: Line) -> dict[str, float]:
    """Tag -> value, of all that is known of a round."""
    found = {
        "train/loss": line["train_loss"],
        "train/passes": line["passes"],
        "train/seconds": line["seconds"]["train"],
        "train/left_out": len(line["left_out"]),
        "bytes/up": line["bytes"]["up"],
        "bytes/down": line["bytes"]["down"],
    }
    for stage in STAGES:
        if stage in line:
            summary = line[stage]["summary"]
            flat = {"local": summary["local"]["mean"], "worst": summary["local"]["worst"]}
            flat |= {tag: summary[tag] for tag in ("global", "macro_f1", "loss")}
            found |= {f"{stage}/{tag}": value for tag, value in flat.items()}
    return {tag: float(value) for tag, value in found.items() if value is not None and math.isfinite(value)}


@contextmanager
def tensorboard(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Event files in the run's folder."""
    from tensorboardX import SummaryWriter

    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:

        def log(round: int, values: dict[str, float]) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag, value, round)
            writer.flush()

        yield log


@contextmanager
def mlflow(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """mlflow.db in the run's folder: mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db"""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    known = client.get_experiment_by_name(PROJECT)
    artifacts = (folder.absolute() / "mlruns").as_uri()
    experiment = known.experiment_id if known else client.create_experiment(PROJECT, artifact_location=artifacts)
    run = client.create_run(experiment, run_name=folder.name).info.run_id
    client.log_dict(run, dict(settings), "config.json")

    def log(round: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            client.log_metric(run, tag, value, step=round)

    yield log
    client.set_terminated(run)


@contextmanager
def wandb(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """wandb/ in the run's folder; `wandb sync` uploads it."""
    import wandb as W

    run = W.init(project=PROJECT, name=folder.name, dir=str(folder), mode="offline", config=dict(settings))
    yield lambda round, values: run.log(values, step=round)
    run.finish()


@contextmanager
def trackio(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Trackio's own folder on this machine; `trackio show` shows it."""
    import trackio as T

    run = T.init(project=PROJECT, name=folder.name, config=dict(settings), embed=False)
    yield lambda round, values: run.log(values, step=round)
    run.finish()


TRACKERS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any]], AbstractContextManager[Log]]]] = {
    "tensorboard": ("tensorboardX", tensorboard),  # the module that the extra of this name installs
    "mlflow": ("mlflow", mlflow),
    "wandb": ("wandb", wandb),
    "trackio": ("trackio", trackio),
}


class Tracked(View):
    """A View that gives trackers the rounds of a run. A resumed run is tracked anew, with its earlier rounds."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        for name in names:
            if find_spec(TRACKERS[name][0]) is None:
                raise UserError(f'engine.trackers = "{name}" needs pip install "promptfed[{name}]"')
        self._names, self._folder, self._settings = names, folder, settings
        self._open, self._logs = ExitStack(), list[Log]()

    def begin(self, round: int, clients: Sequence[int]) -> None:
        if self._names and not self._logs:
            opened = (TRACKERS[name][1](self._folder, self._settings) for name in self._names)
            self._logs = [self._open.enter_context(tracker) for tracker in opened]
            for line in record.read_lines(self._folder):
                if line["round"] < round:
                    self.end(line)

    def end(self, line: Line) -> None:
        for log in self._logs:
            log(line["round"], scalars(line))

    def close(self) -> None:
        self._open.close()
