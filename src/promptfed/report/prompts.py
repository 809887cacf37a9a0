"""The clients' private pixel prompts as images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .. import params as P
from ..clients.store import Store
from ..data import Dataset
from ..models import Model
from ..params import Params
from ..runs import config as C
from ..runs.opened import Run
from ..tuning import PrivatePrompt, Tuning
from ..tunings.pixels import PixelPrompt
from . import images

MOST = 16  # clients that are shown
_COLUMNS, _LEAST = 8, 5  # prompts in a row; room for at least so many, or they would be huge


@dataclass(frozen=True)
class Prompts:
    round: int
    start: np.ndarray  # (H, W, C): every client's prompt before training
    inside: np.ndarray  # (H, W): where it reaches
    clients: dict[int, np.ndarray]  # of some clients that have trained
    trained: int  # how many there are


class _Canvas(Model):
    """A prompt needs only the image size of a model."""

    def features(self, weights: Params, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        raise NotImplementedError


def pixel_prompt(run: Run) -> PixelPrompt | None:
    """The run's pixel prompt, if its method has one."""
    tuning: Tuning = C.make(run.settings).method.method.tuning
    while isinstance(tuning, PrivatePrompt):
        if isinstance(tuning, PixelPrompt):
            return tuning
        tuning = tuning.inner
    return None


def read(run: Run, tuning: PixelPrompt, dataset: Dataset) -> Prompts | None:
    """The prompts after the last completed round; None while no client has one."""
    folder = run.folder / "clients"
    if not run.trained or not (folder / "data.mdb").exists():
        return None
    channels, height, width = dataset.images.shape[1:]
    model = _Canvas("", (channels, height, width), len(dataset.classes))

    def image(params: Params) -> np.ndarray:
        middle = torch.tensor([0.5, 0.5])  # a patch that moves is shown in the middle
        return tuning.canvas(model, params, middle).permute(1, 2, 0).numpy()

    found = {}
    store = Store(folder)
    try:
        for client in _some(run.trained):
            state = store.get(client, run.last + 1)
            prompt = P.under(P.under(state, "private", "/"), "prompt")
            if prompt:
                found[client] = image(P.nested("prompt", prompt))
    finally:
        store.close()
    if not found:
        return None
    start = tuning.start(model, int(run.settings.get("seed", 0)))
    inside = image({name: torch.ones_like(p) for name, p in start.items()})[..., 0] > 0
    return Prompts(run.last, image(start), inside, found, len(run.trained))


def _some(clients: Sequence[int]) -> list[int]:
    """At most MOST, evenly spread."""
    at = np.linspace(0, len(clients) - 1, min(MOST, len(clients))).round().astype(int)
    return [clients[i] for i in at]


def draw(run: Run, prompts: Prompts) -> Figure:
    """Each prompt above its change in training: the prompts alone look much the same for all clients."""
    ids = list(prompts.clients)
    columns = 1 + min(_COLUMNS, max(_LEAST, len(ids)))
    blocks = -(-len(ids) // _COLUMNS)
    change = {client: image - prompts.start for client, image in prompts.clients.items()}
    # One scale for all, so that they can be compared; a few outliers are clipped, as they would make all others pale.
    reach = _reach([prompts.start, *prompts.clients.values()], prompts.inside)
    step = _reach(list(change.values()), prompts.inside)

    height, width = prompts.inside.shape
    side = images.WIDTH / columns - 0.09
    figure = images.blank(0.5 + blocks * (2 * side * height / width + 0.4), gap=0)
    grid = figure.subplots(2 * blocks, columns, squeeze=False)
    for axes in grid.ravel():
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    _tile(grid[0, 0], prompts.start, reach, prompts.inside, "at the start")
    for i, client in enumerate(ids):
        row, column = 2 * (i // _COLUMNS), 1 + i % _COLUMNS
        name = run.name(client).replace("client-", "client ")
        _tile(grid[row, column], prompts.clients[client], reach, prompts.inside, name)
        _tile(grid[row + 1, column], change[client], step, prompts.inside)
    for axes in grid[1::2, 0]:
        axes.text(1, 0.5, "change\nsince then", transform=axes.transAxes, ha="right", va="center", fontsize=9)
    for axes in grid[2::2, 0]:
        axes.text(1, 0.5, "prompt", transform=axes.transAxes, ha="right", va="center", fontsize=9)
    some = f" ({len(ids)} of {prompts.trained} clients)" if len(ids) < prompts.trained else ""
    scale = f"grey is 0, black to white ±{reach:.2g} (prompt), ±{step:.2g} (change)"
    images.title(figure, f"{run.title}\nprivate prompts after round {prompts.round}{some}; {scale}")
    return figure


def _reach(images: Sequence[np.ndarray], inside: np.ndarray) -> float:
    values = np.abs(np.concatenate([image[inside].ravel() for image in images]))
    return float(np.quantile(values, 0.99)) or 1.0


def _tile(axes: Axes, image: np.ndarray, reach: float, inside: np.ndarray, name: str = "") -> None:
    show = np.clip(image / (2 * reach) + 0.5, 0, 1)
    colour = np.broadcast_to(show, (*inside.shape, 3))  # one channel: grey
    axes.imshow(np.dstack([colour, inside]), interpolation="nearest")
    axes.spines[:].set(visible=True, color="0.75", linewidth=0.6)
    axes.set_title(images.plain(name if len(name) <= 14 else f"{name[:13]}…"), fontsize=9, pad=3)
