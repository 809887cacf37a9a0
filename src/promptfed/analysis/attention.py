"""What the last layer attends to, with and without the prompt if there is one (pFedPT, Fig. 4 and 12).

A transformer: the last layer's attention from the tokens that the head reads (cls) to the patches, mean over heads. A
CNN: Grad-CAM of the last convolution for the image's own class (Selvaraju et al., ICCV 2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import UserError, unknown
from ..methods import layers
from ..models import CLIP, Model, ViT
from ..params import Params
from ..phases import Batch, Context
from ..report import images as pictures
from ..report.style import GREEN, VERMILION
from ..runs import statistics
from ..seeding import torch_rng
from ..training import CHUNK
from ..tuning import Tuning
from ..tunings.pixels import Pixels
from . import Found, Options
from .opened import Opened

IMAGES = 6


@dataclass(frozen=True)
class Looks:
    maps: np.ndarray  # (B, rows, columns), not negative
    prompt: np.ndarray  # (B,): share of the attention on prompt tokens; zero for Grad-CAM
    probabilities: np.ndarray  # (B, classes)


class _Watch(TorchFunctionMode):
    """Keeps the output of the last convolution, and the inputs of the last attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolved: Tensor | None = None
        self.attended: tuple[Tensor, Tensor] | None = None  # queries, keys

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is F.conv2d:
            self.convolved = made
        elif func is F.scaled_dot_product_attention:
            self.attended = args[:2]
        return made


def look(tuning: Tuning, model: Model, params: Params, batch: Batch, ctx: Context) -> Looks:
    """Of a batch that carries images."""
    batch = batch._replace(x=batch.x.detach().clone().requires_grad_(), frozen={})
    with torch.enable_grad():
        with _Watch() as watch:
            features = tuning.features(model, params, batch, ctx)
        logits = tuning.head(model, params, features)
        prompt = np.zeros(len(batch.y))
        tower = transformer(model)
        if tower is not None and watch.attended is not None:
            queries, keys = watch.attended
            maps, prompt = attention_map(queries, keys, tower)
        elif watch.convolved is not None:
            maps = grad_cam(logits.gather(1, batch.y[:, None]).sum(), watch.convolved)
        else:
            raise UserError(f'attention: backbone "{model.name}" has neither attention nor convolutions')
    return Looks(maps, prompt, logits.detach().softmax(1).cpu().numpy())


def transformer(model: Model) -> ViT | None:
    """The part of a model that sees images, if it is a transformer."""
    image = model.image_tower if isinstance(model, CLIP) else model
    return image if isinstance(image, ViT) else None


def attention_map(queries: Tensor, keys: Tensor, tower: ViT) -> tuple[np.ndarray, np.ndarray]:
    """(B, heads, tokens read, d), (B, heads, tokens, d) -> attention to patches (B, rows, columns), to prompts (B,)."""
    weights = (queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])).softmax(-1)
    mean = weights.mean((1, 2)).detach().double().cpu().numpy()  # (B, tokens): cls, prompts, patches
    rows, columns = tower.image[1] // tower.patch, tower.image[2] // tower.patch
    count = rows * columns
    return mean[:, -count:].reshape(-1, rows, columns), mean[:, 1:-count].sum(1)


def grad_cam(score: Tensor, layer: Tensor) -> np.ndarray:
    """relu(sum_k a_k A_k), a_k = mean over places of d score / d A_k: (B, K, H, W) -> (B, H, W)."""
    (slope,) = torch.autograd.grad(score, layer, retain_graph=True)
    cam = (slope.mean((2, 3), keepdim=True) * layer).sum(1).relu()
    return np.asarray(cam.detach().double().cpu().numpy())


def attention(opened: Opened, options: Options) -> Found:
    """The first client's maps are drawn; the share of attention on a prompt on pixels is told for all clients."""
    method = opened.config.method.name
    if opened.mixes:
        raise UserError(f'attention: "{method}" mixes several models, each with attention of its own')
    clients, data = who(opened, options), opened.federation.dataset
    found = {client: _of(opened, client, options) for client in clients}
    client, (index, looks) = next(iter(found.items()))
    bare = "attention" in looks
    last = list(looks.values())[-1]
    rows = [
        {
            "client": client,
            "image": int(index[n]),
            "label": data.classes[data.labels[index[n]]],
            **{
                "predicted" if bare else f"predicted_{name}": data.classes[one.probabilities[n].argmax()]
                for name, one in looks.items()
            },
            "attention_to_prompt": float(last.prompt[n]),
            "row": y,
            "column": x,
            **{name: float(one.maps[n, y, x]) for name, one in looks.items()},
        }
        for n, y, x in np.ndindex(last.maps.shape)
    ]
    where = "the last layer's attention" if transformer(opened.model) else "Grad-CAM of the last convolution"
    text = f"{where[0].upper()}{where[1:]} on test images of client {client}. Each map is scaled to its own maximum."
    if last.prompt.any():
        text += f" With the prompt, {100 * last.prompt.mean():.0f} % of the attention goes to prompt tokens."
    area = prompted(opened.model, opened.method.tuning)
    more = {}
    if area is not None and not bare:
        more["clients"] = shares = _on_prompt(found, area)
        text += _told(shares, float(area.mean()))
    shown = {name if bare else f"{name} prompt": one for name, one in looks.items()}
    figure = draw(data.classes, data.images[index], data.labels[index], shown)
    pictures.title(figure, f"{opened.title}\n{where}, client {client}")
    compared = "" if bare else ", without and with the prompt"
    return Found(figure, rows, f"What client {client} attends to{compared}", text, more)


def _of(opened: Opened, client: int, options: Options) -> tuple[np.ndarray, dict[str, Looks]]:
    """Some of its test images, and where its model looks on them: without and with the prompt, if there is one."""
    data = opened.federation.dataset
    work, params = opened.own(client)
    bare, own = opened.bare(work, params), opened.method.tuning
    index = different(data.labels, of_class(opened, client, options.label), min(options.images or IMAGES, CHUNK))
    batch, ctx = next(opened.batches(work, opened.samples(data.images[index])))
    batch = batch._replace(y=torch.from_numpy(data.labels[index]).to(batch.y.device))
    tunings = {"attention": own} if bare is None else {"without": bare, "with": own}
    return index, {name: look(tuning, opened.model, params, batch, ctx) for name, tuning in tunings.items()}


def prompted(model: Model, tuning: Tuning) -> np.ndarray | None:
    """Where a prompt lies on the image (H, W), if on pixels and always on the same."""
    found: list[object] = [*layers(tuning)]
    for layer in found:
        if isinstance(layer, Pixels) and not layer.draws:
            ones = {name: torch.ones_like(p) for name, p in layer.pixels(model, torch_rng(0, "area")).items()}
            return np.asarray(layer.canvas(model, ones, torch.zeros(2))[0].numpy() > 0)
    return None


def share(maps: np.ndarray, area: np.ndarray) -> np.ndarray:
    """Of each map, enlarged to the image, how much lies there (B,); NaN of a map that is zero everywhere."""
    large = F.interpolate(torch.from_numpy(maps)[:, None], size=area.shape, mode="bilinear")[:, 0].numpy()
    whole = large.sum((1, 2))
    return np.asarray((large * area).sum((1, 2)) / np.where(whole, whole, np.nan))


def _on_prompt(found: dict[int, tuple[np.ndarray, dict[str, Looks]]], area: np.ndarray) -> list[dict[str, float]]:
    """Means over a client's images; only images that have a map with and without the prompt."""
    rows: list[dict[str, float]] = []
    for client, (_, looks) in found.items():
        both = np.stack([share(looks[name].maps, area) for name in ("with", "without")])  # (2, B)
        if (both := both[:, np.isfinite(both).all(0)]).size:
            means = both.mean(1)
            rows.append({"client": client, "on_prompt_with": float(means[0]), "on_prompt_without": float(means[1])})
    return rows


def _told(shares: list[dict[str, float]], area: float) -> str:
    if not shares:
        return ""
    ours, bare = (np.array([row[f"on_prompt_{name}"] for row in shares]) for name in ("with", "without"))
    whose = f"mean over {len(shares)} clients" if len(shares) > 1 else f"client {shares[0]['client']}"
    return (
        f" Share of it on the prompt's pixels, which are {area:.2f} of the image: {ours.mean():.2f} with the prompt, "
        f"{bare.mean():.2f} without ({whose}; difference {statistics.over_clients(ours - bare, '+.2f')})."
    )


def who(opened: Opened, options: Options) -> list[int]:
    """The clients that are looked at: those with images of the class that is asked for, unless they are named."""
    if not options.label:
        return opened.chosen(options, "test", 1)
    named = opened.chosen(replace(options, everyone=True), "test")
    having = [client for client in named if len(of_class(opened, client, options.label))]
    missing = [client for client in options.clients if client not in having]
    if missing or not having:
        about = f"client {missing[0]} has no" if missing else "no client has a"
        raise UserError(f'--class = "{options.label}": {about} test image of this class')
    return having if options.clients or options.everyone else having[:1]


def of_class(opened: Opened, client: int, label: str) -> np.ndarray:
    """The client's test images; with a label, those of this class."""
    data = opened.federation.dataset
    index: np.ndarray = np.asarray(opened.federation.sites[client].test)
    if label and label not in data.classes:
        raise unknown("--class", label, data.classes)
    return np.asarray(index[data.labels[index] == data.classes.index(label)]) if label else index


def different(labels: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Some of these samples, of as many classes as possible: the first of each class, then the second..."""
    own = labels[index]
    turns = [np.count_nonzero(own[:i] == label) for i, label in enumerate(own)]
    return np.asarray(index[np.lexsort((own, turns))][:count])


def draw(classes: tuple[str, ...], images: np.ndarray, labels: np.ndarray, looks: dict[str, Looks]) -> Figure:
    """Two images per row: each as it is, then with each of these looks."""
    each = 1 + len(looks)
    lines = -(-len(images) // 2)
    figure = pictures.blank(0.85 + lines * (0.22 + 3.54 / each * images.shape[2] / images.shape[3]), gap=0.01)
    grid = figure.subplots(lines, 2 * each + 1, squeeze=False, width_ratios=[*[1] * each, 0.15, *[1] * each])
    for axes in grid.ravel():
        axes.axis("off")
    for n, (image, label) in enumerate(zip(images, labels, strict=True)):
        at = grid[n // 2, (each + 1) * (n % 2) :]
        shown = np.broadcast_to(image.transpose(1, 2, 0) / 255, (*image.shape[1:], 3))
        at[0].imshow(shown, interpolation="nearest")
        _name(at[0], classes[label], "black")
        for axes, one in zip(at[1:], looks.values(), strict=False):
            best = one.probabilities[n].argmax()
            _overlay(axes, shown, one.maps[n])
            share = f"{100 * one.probabilities[n, best]:.0f} %"
            _name(axes, f"{_short(classes[best], 10)}: {share}", GREEN if best == label else VERMILION)
    for half in range(min(2, len(images))):
        below = grid[(len(images) - 1 - half) // 2, (each + 1) * half :]
        for axes, text in zip(below, ("image", *looks), strict=False):
            axes.text(0.5, -0.06, text, transform=axes.transAxes, ha="center", va="top", fontsize=9, color="0.3")
    return figure


def _overlay(axes: Axes, image: np.ndarray, look: np.ndarray) -> None:
    height, width = image.shape[:2]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(0.5 + 0.5 * np.broadcast_to(image.mean(2, keepdims=True), image.shape), interpolation="nearest")
    most = look.max() or 1.0
    axes.imshow(look / most, cmap="inferno", alpha=0.65, vmin=0, vmax=1, extent=extent, interpolation="bilinear")


def _name(axes: Axes, text: str, colour: str) -> None:
    axes.set_title(pictures.plain(_short(text, 16)), fontsize=8, pad=3, color=colour)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
