"""The clients' private pixel prompts as images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .. import params as P
from ..models import Model
from ..params import Params
from ..runs.opened import Run
from ..tuning import PrivatePrompt, Tuning
from ..tunings.pixels import PixelPrompt
from . import images
from .numbers import thin

MOST = 16  # clients that are shown
_COLUMNS, _LEAST = 8, 5  # prompts in a row; room for at least so many, or they would be huge


@dataclass(frozen=True)
class Prompts:
    round: int
    start: np.ndarray  # (H, W, C): every client's prompt before training
    inside: np.ndarray  # (H, W): where it reaches
    clients: dict[int, np.ndarray]  # of some clients that have trained
    trained: int  # how many there are


def read(run: Run) -> Prompts | None:
    """The prompts after the last completed round; None while no client has one, or if the method has none."""
    tuning = pixel_prompt(run) if run.settings else None
    if not tuning or not run.trained or not (run.folder / "clients" / "data.mdb").exists():
        return None
    image = partial(_image, tuning, run.model)
    found = {}
    with closing(run):
        for client in thin(run.trained, MOST):
            prompt = P.under(P.under(run.store.get(client, run.last + 1), "private", "/"), "prompt")
            if prompt:
                found[client] = image(P.nested("prompt", prompt))
    if not found:
        return None
    start = tuning.start(run.model, run.config.seed)
    inside = image({name: torch.ones_like(p) for name, p in start.items()})[..., 0] > 0
    return Prompts(run.last, image(start), inside, found, len(run.trained))


def _image(tuning: PixelPrompt, model: Model, params: Params) -> np.ndarray:
    """(H, W, C)"""
    middle = torch.tensor([0.5, 0.5])  # a patch that moves is shown in the middle
    return tuning.canvas(model, params, middle).permute(1, 2, 0).numpy()


def pixel_prompt(run: Run) -> PixelPrompt | None:
    """The run's pixel prompt, if its method has one."""
    tuning: Tuning = run.config.method.method.tuning
    while isinstance(tuning, PrivatePrompt):
        if isinstance(tuning, PixelPrompt):
            return tuning
        tuning = tuning.inner
    return None


def draw(run: Run, prompts: Prompts) -> Figure:
    """Each prompt above its change in training: the prompts alone look much the same for all clients."""
    ids, start, inside = list(prompts.clients), prompts.start, prompts.inside
    columns = 1 + min(_COLUMNS, max(_LEAST, len(ids)))
    blocks = -(-len(ids) // _COLUMNS)
    change = {client: image - start for client, image in prompts.clients.items()}
    # One scale for all, so that they can be compared; a few outliers are clipped, as they would make all others pale.
    reach = _reach([start, *prompts.clients.values()], inside)
    step = _reach(list(change.values()), inside)

    height, width = inside.shape
    side = images.WIDTH / columns - 0.09
    figure = images.blank(0.5 + blocks * (2 * side * height / width + 0.4), gap=0)
    grid = figure.subplots(2 * blocks, columns, squeeze=False)
    for axes in grid.ravel():
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    _tile(grid[0, 0], start, reach, inside, "at the start")
    for i, client in enumerate(ids):
        row, column = 2 * (i // _COLUMNS), 1 + i % _COLUMNS
        _tile(grid[row, column], prompts.clients[client], reach, inside, run.name(client).replace("client-", "client "))
        _tile(grid[row + 1, column], change[client], step, inside)
    for i, axes in enumerate(grid[1:, 0]):
        text = "prompt" if i % 2 else "change\nsince then"
        axes.text(1, 0.5, text, transform=axes.transAxes, ha="right", va="center", fontsize=9)
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
