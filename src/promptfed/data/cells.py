"""`cells`: drawn blood smears, sixteen forms of a cell under eight stains.

A task downstream of clip-mini, which knows drawn shapes but no cell, no stain and few of these names. The label is the
form of the cell in the middle; parts of other, normal cells are around it. The domain is the stain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import drawing
from .drawing import NOTHING, SIZE, Layer, Parts, mix, uniform

COUNT = 3840  # pictures of the dataset: 30 of each form under each stain
VERSION = 1  # raise it when the same seed draws other pictures


@dataclass(frozen=True)
class _Inside:
    """A part within a cell; places and radii in radii of the cell."""

    ink: str  # "pale", "dark" or "paper"
    shape: str = "circle"
    radius: float = 0.45
    x: float = 0.0
    y: float = 0.0
    squeeze: float = 1.0


_PALE = (_Inside("pale"),)  # the dent of a red cell
# Body, its texture, its relative size, and what is in it.
_FORMS: dict[str, tuple[str, str, float, tuple[_Inside, ...]]] = {
    "normal cell": ("circle", "plain", 1.0, _PALE),
    "target cell": ("circle", "plain", 1.0, (_Inside("pale", radius=0.7), _Inside("dark", radius=0.36))),
    "sickle cell": ("moon", "plain", 1.2, ()),
    "drop cell": ("drop", "plain", 1.2, (_Inside("pale", radius=0.3, y=0.35),)),
    "burr cell": ("gear", "plain", 1.1, _PALE),
    "oval cell": ("oval", "plain", 1.15, (_Inside("pale", radius=0.4, squeeze=0.7),)),
    "helmet cell": ("dome", "plain", 1.1, ()),
    "mouth cell": ("circle", "plain", 1.0, (_Inside("pale", "bar", 0.75, squeeze=1.2),)),
    "dotted cell": ("circle", "dotted", 1.0, ()),
    "twin cell": ("circle", "plain", 1.0, (_Inside("dark", radius=0.3, x=-0.4), _Inside("dark", radius=0.3, x=0.4))),
    "lobed cell": (
        "circle", "plain", 1.0,
        tuple(_Inside("dark", radius=0.3, x=x, y=y) for x, y in ((-0.4, 0.25), (0.4, 0.25), (0.0, -0.4))),
    ),
    "ring cell": ("circle", "plain", 1.0, (_Inside("dark", "ring", 0.38, x=0.3, y=-0.2),)),
    "bitten cell": ("circle", "plain", 1.0, (_Inside("paper", radius=0.45, x=0.85),)),
    "spur cell": ("spark", "plain", 1.2, (_Inside("dark", radius=0.25),)),
    "cell fragment": ("triangle", "plain", 0.7, ()),
    "dense cell": ("circle", "plain", 0.75, ()),
}  # fmt: skip
CLASSES = tuple(_FORMS)
_NEIGHBOURS = 3
_SLOTS = max(len(inside) for *_, inside in _FORMS.values())


# ---- stains


def _even(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Under a lamp that is not quite even."""
    lit: np.ndarray = drawing.clean(paper, layers, rng) + np.float32(0.1) * drawing.smooth(len(paper), rng)[:, None]
    return lit


def _soft(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Out of focus."""
    return drawing.blur(_even(paper, layers, rng), 2)


def _grainy(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """On coarse film."""
    coarse = np.repeat(np.repeat(uniform(rng, -0.22, 0.22, len(paper), 1, 16, 16), 2, 2), 2, 3)
    return _even(paper, layers, rng) + coarse


def _scanned(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """By a line scanner: every other line is darker, rows are shifted."""
    picture = _even(paper, layers, rng)
    picture = np.where((np.arange(SIZE) // 4 % 2 == 1)[:, None], np.roll(picture, 1, axis=3), picture)
    return picture * np.where(np.arange(SIZE) % 2, np.float32(0.8), np.float32(1))[:, None]


def _phase(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Phase contrast: grey, with bright halos around edges."""
    for part in layers:
        paper = mix(paper, part.filling, np.float32(0.35) * part.inside)
        paper = mix(paper, np.float32(0.15) + 0 * part.ink, np.float32(0.8) * part.line(1.0, 0.6))
        paper = mix(paper, np.float32(1.0) + 0 * part.ink, np.float32(0.7) * part.line(1.2, -1.0))
    return paper


# Colours of paper, cell and what is dark in it, and the painter.
_STAINS: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], drawing.Painter]] = {
    "giemsa": ((0.96, 0.92, 0.90), (0.86, 0.58, 0.60), (0.38, 0.16, 0.52), _even),
    "eosin": ((0.97, 0.86, 0.90), (0.92, 0.68, 0.78), (0.70, 0.30, 0.50), _soft),
    "fluorescent": ((0.02, 0.05, 0.06), (0.10, 0.52, 0.22), (0.60, 0.98, 0.50), _soft),
    "phase": ((0.55, 0.56, 0.55), (0.45, 0.46, 0.45), (0.30, 0.30, 0.30), _phase),
    "silver": ((0.80, 0.70, 0.50), (0.52, 0.38, 0.20), (0.14, 0.08, 0.04), _grainy),
    "cresyl": ((0.86, 0.90, 0.97), (0.55, 0.66, 0.90), (0.16, 0.18, 0.56), _scanned),
    "night": ((0.16, 0.10, 0.22), (0.42, 0.26, 0.44), (0.86, 0.60, 0.80), _grainy),
    "faded": ((0.88, 0.85, 0.74), (0.78, 0.72, 0.60), (0.58, 0.50, 0.42), _scanned),
}
STAINS = tuple(_STAINS)


def sample(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forms (N,), stains (N,) and pictures uint8 (N, 3, 32, 32): equally many of each form under each stain, in random
    order."""
    rng = np.random.default_rng([seed, 0])
    cell = (np.arange(count) % (len(CLASSES) * len(STAINS)))[rng.permutation(count)]
    form, stain = cell % len(CLASSES), cell // len(CLASSES)
    painters = [painter for *_, painter in _STAINS.values()]
    return form, stain, drawing.draw(_parts(form, stain, rng), stain, painters, seed)


def _parts(form: np.ndarray, stain: np.ndarray, rng: np.random.Generator) -> Parts:
    """Neighbours, the body, what is in it."""
    count, width = len(form), _NEIGHBOURS + 1 + _SLOTS
    body, inside = _NEIGHBOURS, slice(_NEIGHBOURS + 1, None)
    names = {name: index for index, name in enumerate(drawing.SHAPES)}
    forms = [_FORMS[name] for name in CLASSES]
    table = [[*within, *[None] * (_SLOTS - len(within))] for *_, within in forms]

    def of_slot(key: str, missing: float) -> np.ndarray:
        """(classes, slots)"""
        return np.array([[missing if one is None else getattr(one, key) for one in row] for row in table])

    shape = np.full((count, width), names["circle"])
    shape[:, body] = np.array([names[name] for name, *_ in forms])[form]
    shape[:, inside] = np.array([[NOTHING if one is None else names[one.shape] for one in row] for row in table])[form]
    texture = np.zeros((count, width), dtype=np.int64)
    texture[:, body] = np.array([drawing.TEXTURES.index(name) for _, name, *_ in forms])[form]

    radius = np.repeat(6.5 + 2.5 * rng.random((count, 1)), width, 1)
    size = radius[:, body] * np.array([relative for _, _, relative, _ in forms])[form]
    radius[:, body] = size
    radius[:, inside] = size[:, None] * of_slot("radius", 1.0)[form]
    tilt = np.repeat(90 * (2 * rng.random((count, 1)) - 1), width, 1)
    x, y = (SIZE / 2 + 7 * (rng.random((count, width)) - 0.5) for _ in range(2))
    cosine, sine = (w[:, body, None] for w in drawing.turn(tilt))
    u, v = (of_slot(key, 0.0)[form] * size[:, None] for key in "xy")
    x[:, inside], y[:, inside] = (
        x[:, body, None] + cosine * u - sine * v,
        y[:, body, None] + sine * u + cosine * v,
    )
    # neighbours touch the border: somewhere on a side, or outside
    side, along = rng.integers(4, size=(count, _NEIGHBOURS)), SIZE * rng.random((count, _NEIGHBOURS))
    edge = np.where(side % 2 == 0, -2.0, SIZE + 2.0)
    x[:, :body], y[:, :body] = np.where(side < 2, edge, along), np.where(side < 2, along, edge)

    paper, cell, dark = (np.array([row[i] for row in _STAINS.values()], dtype=np.float32)[stain] for i in range(3))
    shift = uniform(rng, -0.05, 0.05, count, 1, 3)
    inks = {"pale": cell + (paper - cell) * np.float32(0.6), "dark": dark, "paper": paper}
    ink = np.repeat(cell[:, None], width, 1)
    for name, colour in inks.items():
        has = np.array([[one is not None and one.ink == name for one in row] for row in table])[form]
        ink[:, inside] = np.where(has[..., None], colour[:, None], ink[:, inside])
    squeeze = np.repeat(0.85 + 0.3 * rng.random((count, 1)), width, 1)
    squeeze[:, inside] *= of_slot("squeeze", 1.0)[form]
    return Parts(
        shape=shape,
        texture=texture,
        x=x,
        y=y,
        radius=radius,
        tilt=tilt,
        squeeze=squeeze,
        ink=ink + shift,
        paper=paper + shift[:, 0],
    )
