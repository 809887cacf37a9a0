"""Experiment trackers: each is given the numbers of every round. All of them work offline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..clients.base import Notice
from ..errors import UserError
from ..server import Line
from . import record
from .record import STAGES, View

Log = Callable[[int, dict[str, float]], object]  # of a round: tag -> value
PROJECT = "promptfed"
_SUMMARY = {  # tag -> path in a stage's summary
    "local": ("local", "mean"),
    "worst": ("local", "worst"),
    "global": ("global",),
    "macro_f1": ("macro_f1",),
    "loss": ("loss",),
}


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
            for tag, path in _SUMMARY.items():
                value = line[stage]["summary"]
                for key in path:
                    value = value[key]
                found[f"{stage}/{tag}"] = value
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


class Tracker(NamedTuple):
    module: str  # that the extra of the tracker's name installs
    open: Callable[[Path, Mapping[str, Any]], AbstractContextManager[Log]]


TRACKERS = {
    "tensorboard": Tracker("tensorboardX", tensorboard),
    "mlflow": Tracker("mlflow", mlflow),
    "wandb": Tracker("wandb", wandb),
    "trackio": Tracker("trackio", trackio),
}


class Tracked(View):
    """A View that gives trackers the rounds of a run. A resumed run is tracked anew, with its earlier rounds."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        for name in names:
            if find_spec(TRACKERS[name].module) is None:
                raise UserError(f'engine.trackers = "{name}" needs pip install "promptfed[{name}]"')
        self._names, self._folder, self._settings = names, folder, settings
        self._open, self._logs = ExitStack(), list[Log]()

    def begin(self, round: int, clients: Sequence[int]) -> None:
        if self._names and not self._logs:
            for name in self._names:
                self._logs.append(self._open.enter_context(TRACKERS[name].open(self._folder, self._settings)))
            for line in record.read_lines(self._folder):
                if line["round"] < round:
                    self._log(line)

    def end(self, line: Line) -> None:
        self.begin(line["round"], line["clients"])
        self._log(line)

    def _log(self, line: Line) -> None:
        for log in self._logs:
            log(line["round"], scalars(line))

    def close(self) -> None:
        self._open.close()


class Views(View):
    """Several views as one."""

    def __init__(self, *views: View) -> None:
        self._views = views

    def begin(self, round: int, clients: Sequence[int]) -> None:
        for view in self._views:
            view.begin(round, clients)

    def on_notice(self, notice: Notice) -> None:
        for view in self._views:
            view.on_notice(notice)

    def end(self, line: Line) -> None:
        for view in self._views:
            view.end(line)
