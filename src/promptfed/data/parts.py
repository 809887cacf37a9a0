"""`parts`: drawn machine parts, sixteen kinds before the cameras of eight plants.

A task downstream of clip-mini, which has seen shapes, and so knows the first word of most names, but none of these
parts and cameras. The label is the kind of part, the domain the camera.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import drawing
from .drawing import NOTHING, SIZE, Layer, Parts, mix, uniform

COUNT = 3840  # pictures of the dataset: 30 of each kind before each camera
VERSION = 2  # raise it when the same seed draws other pictures


@dataclass(frozen=True)
class _Inside:
    """A hole or mark in a part; places and radii in radii of the part."""

    ink: str  # "paper" (a hole) or "dark" (a mark)
    shape: str = "circle"
    radius: float = 0.45
    x: float = 0.0
    y: float = 0.0
    squeeze: float = 1.0


_HOLE = (_Inside("paper"),)
# Body, and what is in it.
_KINDS: dict[str, tuple[str, tuple[_Inside, ...]]] = {
    "hexagon nut": ("hexagon", _HOLE),
    "square nut": ("square", _HOLE),
    "bow nut": ("bow", (_Inside("dark", radius=0.3),)),
    "ring washer": ("circle", (_Inside("paper", radius=0.6),)),
    "sun washer": ("sun", (_Inside("paper", radius=0.4),)),
    "gear wheel": ("gear", (_Inside("paper", radius=0.3),)),
    "cross screw": ("circle", (_Inside("dark", "cross", 0.62),)),
    "bar screw": ("circle", (_Inside("dark", "bar", 0.8),)),
    "star screw": ("circle", (_Inside("dark", "star", 0.62),)),
    "angle bracket": ("angle", ()),
    "tee joint": ("tee", ()),
    "gate clamp": ("gate", ()),
    "hook": ("hook", ()),
    "pill link": ("pill", (_Inside("paper", "pill", 0.55),)),
    "rectangle plate": ("rectangle", (_Inside("paper", radius=0.22, x=-0.55), _Inside("paper", radius=0.22, x=0.55))),
    "zigzag clip": ("zigzag", ()),
}
CLASSES = tuple(_KINDS)
_SLOTS = max(len(inside) for _, inside in _KINDS.values())


# ---- cameras


def _even(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Under a lamp that is not quite even."""
    lit: np.ndarray = drawing.clean(paper, layers, rng) + np.float32(0.1) * drawing.smooth(len(paper), rng)[:, None]
    return lit


def _soft(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Out of focus."""
    return drawing.blur(_even(paper, layers, rng), 2)


def _grainy(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Through dust."""
    coarse = np.repeat(np.repeat(uniform(rng, -0.14, 0.14, len(paper), 1, 16, 16), 2, 2), 2, 3)
    dusty: np.ndarray = _even(paper, layers, rng) + coarse
    return dusty


def _scanned(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """By a line scanner: every other line is darker, rows are shifted."""
    picture = _even(paper, layers, rng)
    picture = np.where((np.arange(SIZE) // 4 % 2 == 1)[:, None], np.roll(picture, 1, axis=3), picture)
    return picture * np.where(np.arange(SIZE) % 2, np.float32(0.85), np.float32(1))[:, None]


def _lines(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Edges only, on squared paper."""
    squares = (np.arange(SIZE) % 8 == 0).astype(np.float32)
    ruled = np.maximum(squares, squares[:, None])[None]
    paper = mix(paper, paper + np.float32(0.16), np.repeat(ruled, len(paper), 0))
    for part in layers:
        paper = mix(paper, layers[0].ink, part.line(1.4))  # of holes too
    return paper


def _lit(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    """Lit from one side: an edge is bright, the other dark."""
    shifted = []
    for part in layers:
        paper = mix(paper, part.filling, part.inside)
        slope = np.float32(0.5) * (np.roll(part.inside, 1, axis=1) - np.roll(part.inside, -1, axis=1))
        shifted.append(slope)
    lit: np.ndarray = paper + np.float32(0.9) * sum(shifted)[:, None]
    return lit


# Colours of the background, the part and what is dark on it, and the painter.
_CAMERAS: dict[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], drawing.Painter]] = {
    "belt": ((0.25, 0.27, 0.26), (0.70, 0.72, 0.74), (0.32, 0.33, 0.36), _even),
    "tray": ((0.93, 0.90, 0.82), (0.62, 0.50, 0.30), (0.30, 0.20, 0.08), _lit),
    "x-ray": ((0.05, 0.07, 0.10), (0.52, 0.58, 0.66), (0.92, 0.95, 0.98), _soft),
    "thermal": ((0.22, 0.05, 0.40), (0.90, 0.42, 0.12), (0.98, 0.90, 0.40), _soft),
    "blueprint": ((0.12, 0.24, 0.60), (0.88, 0.92, 0.98), (0.88, 0.92, 0.98), _lines),
    "dust": ((0.70, 0.60, 0.46), (0.46, 0.38, 0.28), (0.26, 0.20, 0.14), _grainy),
    "scanner": ((0.96, 0.97, 0.95), (0.36, 0.52, 0.46), (0.10, 0.22, 0.18), _scanned),
    "night": ((0.06, 0.12, 0.08), (0.22, 0.46, 0.26), (0.62, 0.90, 0.60), _grainy),
}
CAMERAS = tuple(_CAMERAS)


def sample(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kinds (N,), cameras (N,) and pictures uint8 (N, 3, 32, 32): equally many of each kind before each camera, in
    random order."""
    rng = np.random.default_rng([seed, 0])
    cell = (np.arange(count) % (len(CLASSES) * len(CAMERAS)))[rng.permutation(count)]
    kind, camera = cell % len(CLASSES), cell // len(CLASSES)
    painters = [painter for *_, painter in _CAMERAS.values()]
    return kind, camera, drawing.draw(_parts(kind, camera, rng), camera, painters, seed)


def _parts(kind: np.ndarray, camera: np.ndarray, rng: np.random.Generator) -> Parts:
    """The body, then what is in it."""
    count, width = len(kind), 1 + _SLOTS
    names = {name: index for index, name in enumerate(drawing.SHAPES)}
    table = [[*inside, *[None] * (_SLOTS - len(inside))] for _, inside in _KINDS.values()]

    def of_slot(key: str, missing: float) -> np.ndarray:
        """(N, slots)"""
        values = np.array([[missing if one is None else getattr(one, key) for one in row] for row in table])
        return values.take(kind, axis=0)

    shape = np.empty((count, width), dtype=np.int64)
    shape[:, 0] = np.array([names[name] for name, _ in _KINDS.values()])[kind]
    shape[:, 1:] = np.array([[NOTHING if one is None else names[one.shape] for one in row] for row in table])[kind]
    size = 8.5 + 4 * rng.random((count, 1))
    tilt = 30 * (2 * rng.random((count, 1)) - 1)
    x, y = (SIZE / 2 + 6 * (rng.random((count, 1)) - 0.5) for _ in range(2))
    cosine, sine = drawing.turn(tilt)
    u, v = (of_slot(key, 0.0) * size for key in "xy")
    paper, ink, dark = (np.array([row[i] for row in _CAMERAS.values()], dtype=np.float32)[camera] for i in range(3))
    hole = np.array([[one is not None and one.ink == "paper" for one in row] for row in table])[kind]
    inside = np.where(hole[..., None], paper[:, None], dark[:, None])  # (N, slots, 3)
    shift = uniform(rng, -0.05, 0.05, count, 1, 3)
    squeeze = 0.9 + 0.2 * rng.random((count, 1))
    return Parts(
        shape=shape,
        texture=np.zeros((count, width), dtype=np.int64),
        x=np.concatenate([x, x + cosine * u - sine * v], 1),
        y=np.concatenate([y, y + sine * u + cosine * v], 1),
        radius=np.concatenate([size, size * of_slot("radius", 1.0)], 1),
        tilt=np.repeat(tilt, width, 1),
        squeeze=np.concatenate([squeeze, squeeze * of_slot("squeeze", 1.0)], 1),
        ink=np.concatenate([ink[:, None], inside], 1) + shift,
        paper=paper + shift[:, 0],
    )
