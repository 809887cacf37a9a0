"""Drawings of 32 x 32 pixels, many at a time: named shapes in colours and textures, painted in one of several styles.

The same seed gives the same bytes on every machine: positions, pixels and noise come from elementwise arithmetic that
IEEE 754 rounds the same everywhere, never from sums, matrix products or libm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Self

import numpy as np

SIZE = 32  # pixels per side
TEXTURES = ("plain", "striped", "dotted", "checkered", "ringed", "speckled")
NOTHING = -1  # a shape index: there is no such part in this picture

_CHUNK = 256  # pictures drawn at once: their layers fit into a CPU's cache
_CELLS = 160  # per side of a shape's table
_REACH = 1.6  # the table covers -1.6..1.6; a shape lies within the unit circle


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What N pictures consist of: up to P parts each, later ones over earlier ones."""

    shape: np.ndarray  # int64 (N, P), index into SHAPES, or NOTHING
    texture: np.ndarray  # int64 (N, P), index into TEXTURES
    x: np.ndarray  # float64 (N, P), centre in pixels
    y: np.ndarray
    radius: np.ndarray  # pixels
    tilt: np.ndarray  # degrees, up to 90 to either side
    squeeze: np.ndarray  # height over width
    ink: np.ndarray  # float32 (N, P, 3)
    paper: np.ndarray  # float32 (N, 3)

    def take(self, chosen: np.ndarray) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


@dataclass(frozen=True)
class Layer:
    """One part in B pictures."""

    distance: np.ndarray  # float32 (B, 32, 32), pixels to the part's edge, negative inside
    pattern: np.ndarray  # float32 (B, 32, 32), 1 where the texture leaves the ink darker
    hatching: np.ndarray  # float32 (B, 32, 32), 1 on a pencil's parallel strokes
    ink: np.ndarray  # float32 (B, 3, 1, 1)

    @property
    def inside(self) -> np.ndarray:
        """Coverage by the filled part, float32 (B, 32, 32)."""
        return (np.float32(0.5) - self.distance).clip(0, 1)

    @property
    def filling(self) -> np.ndarray:
        """Ink with its texture, float32 (B, 3, 32, 32)."""
        filled: np.ndarray = self.ink * (1 - np.float32(0.55) * self.pattern[:, None])
        return filled

    def line(self, width: float, shift: float = 0.0) -> np.ndarray:
        """Coverage by a line around the part, `shift` pixels inside its edge."""
        return np.clip(np.float32(0.5 + width / 2) - np.abs(self.distance + np.float32(shift)), 0, 1)


Painter = Callable[[np.ndarray, Sequence[Layer], np.random.Generator], np.ndarray]


def draw(parts: Parts, style: np.ndarray, painters: Sequence[Painter], seed: int) -> np.ndarray:
    """uint8 (N, 3, 32, 32); `style` (N,) says which painter draws a picture."""
    rng = np.random.default_rng([seed, 1])
    count = (parts.shape != NOTHING).sum(1)  # the first so many
    pictures = np.empty((len(style), 3, SIZE, SIZE), dtype=np.uint8)
    for index, painter in enumerate(painters):
        members = np.flatnonzero(style == index)
        members = members[np.argsort(count[members], kind="stable")]
        for start in range(0, len(members), _CHUNK):
            chosen = members[start : start + _CHUNK]
            some = parts.take(chosen)
            paper = np.broadcast_to(some.paper[:, :, None, None], (len(chosen), 3, SIZE, SIZE))
            layers = [layer(some, p, rng, wobble=1.2 * (painter is sketch)) for p in range(count[chosen[-1]])]
            pictures[chosen] = np.floor(painter(paper, layers, rng).clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return pictures


def layer(parts: Parts, p: int, rng: np.random.Generator, wobble: float = 0.0) -> Layer:
    grid = np.arange(SIZE, dtype=np.float32) + np.float32(0.5)  # pixel centres
    dx, dy = grid - _column(parts.x[:, p]), grid[:, None] - _column(parts.y[:, p])
    if wobble:
        dx, dy = (d + np.float32(wobble) * smooth(len(dx), rng) for d in (dx, dy))
    cosine, sine = (_column(part) for part in turn(parts.tilt[:, p]))
    u, v = cosine * dx + sine * dy, cosine * dy - sine * dx  # (B, 32, 32), the part's own axes, in pixels
    radius = _column(parts.radius[:, p])
    distance = _lookup(parts.shape[:, p], u / radius, v / (radius * _column(parts.squeeze[:, p]))) * radius
    hatching = (((u + 2 * v) / 5) % 1 < 0.42).astype(np.float32)
    return Layer(distance, _pattern(parts.texture[:, p], u, v, rng), hatching, parts.ink[:, p, :, None, None])


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    return np.float32(low) + np.float32(high - low) * rng.random(shape, dtype=np.float32)


def smooth(n: int, rng: np.random.Generator) -> np.ndarray:
    """A slowly changing field in -1..1: float32 (n, 32, 32), bilinear between 5 x 5 random values."""
    knots = uniform(rng, -1, 1, n, 5, 5)
    at = np.arange(SIZE, dtype=np.float32) / np.float32(SIZE / 4)
    low = at.astype(np.int64)
    part = at - low
    rows = knots[:, low] * (1 - part)[None, :, None] + knots[:, low + 1] * part[None, :, None]
    field: np.ndarray = rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
    return field


def mix(below: np.ndarray, above: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Paint `above` with this coverage (B, 32, 32) over `below` (B, 3, 32, 32)."""
    mixed: np.ndarray = below + (above - below) * cover[:, None]
    return mixed


def _column(values: np.ndarray) -> np.ndarray:
    """(B,) -> float32 (B, 1, 1)."""
    return values.astype(np.float32)[:, None, None]


def turn(degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine by their series, which unlike libm's are the same on every machine; good to 1e-6 below 90."""
    a = degrees * 0.017453292519943295
    b = a * a
    cosine = 1 - b / 2 * (1 - b / 12 * (1 - b / 30 * (1 - b / 56 * (1 - b / 90))))
    sine = a * (1 - b / 6 * (1 - b / 20 * (1 - b / 42 * (1 - b / 72))))
    return cosine, sine


def _pattern(texture: np.ndarray, u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """float32 (B, 32, 32); u and v are the part's own coordinates in pixels."""
    pattern = np.zeros(u.shape, dtype=np.float32)
    for index, name in enumerate(TEXTURES[1:], 1):
        members = np.flatnonzero(texture == index)
        if not len(members):
            continue
        a, b = u[members], v[members]
        column, row = a / 3 % 1 < 0.5, b / 3 % 1 < 0.5
        match name:
            case "striped":
                pattern[members] = b / 4 % 1 < 0.5
            case "dotted":
                pattern[members] = column & row
            case "checkered":
                pattern[members] = column ^ row
            case "ringed":
                pattern[members] = np.sqrt(a * a + b * b) / 4 % 1 < 0.5
            case _:  # speckled
                pattern[members] = rng.random(a.shape) < 0.35
    return pattern


# ---- styles


def clean(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    for part in layers:
        paper = mix(paper, part.filling, part.inside)
    return paper


def outline(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    for part in layers:
        paper = mix(paper, part.ink, np.float32(0.35) * part.pattern * part.inside)
        paper = mix(paper, part.ink, part.line(1.2))
    return paper


def noisy(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    picture = clean(paper, layers, rng)
    grain = rng.random(picture.shape, dtype=np.float32) + rng.random(picture.shape, dtype=np.float32) - 1  # triangular
    lost = rng.random((len(picture), 1, SIZE, SIZE), dtype=np.float32)
    noise = picture + np.float32(0.42) * grain
    return np.where(lost < 0.03, np.float32(0), np.where(lost > 0.97, np.float32(1), noise))


def blurred(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    return np.float32(0.5) + (blur(clean(paper, layers, rng), 3) - np.float32(0.5)) * np.float32(0.7)


def blur(picture: np.ndarray, times: int) -> np.ndarray:
    for _ in range(times):
        for axis in (2, 3):
            edge = np.concatenate([picture.take([0], axis), picture, picture.take([-1], axis)], axis)
            a, b, c = (edge.take(range(i, i + SIZE), axis) for i in range(3))
            picture = (a + b + b + c) / 4
    return picture


def neon(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    lit = np.float32(0.12) * paper
    for part in layers:
        glow = 1 / (1 + part.distance * part.distance / np.float32(2.5))[:, None]
        lit = lit + np.float32(0.8) * part.ink * glow + np.float32(0.45) * part.line(1.0)[:, None]
    return lit


def sketch(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    paper = np.float32(0.93) + uniform(rng, -0.05, 0.05, len(paper), 1, SIZE, SIZE) + 0 * paper
    for part in layers:
        rough = uniform(rng, 0.45, 1.0, *part.distance.shape)
        cover = np.maximum(np.float32(0.55) * part.hatching * part.inside, np.float32(0.5) * part.line(0.8, 1.6))
        paper = mix(paper, np.float32(0.35) * part.ink + np.float32(0.12), np.maximum(cover, part.line(0.9)) * rough)
    return paper


def inverted(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    return 1 - clean(paper, layers, rng)


def stippled(paper: np.ndarray, layers: Sequence[Layer], rng: np.random.Generator) -> np.ndarray:
    paper = np.full_like(paper, np.float32(0.96))
    for part in layers:
        dots = rng.random(part.distance.shape, dtype=np.float32) < np.float32(0.04) + np.float32(0.7) * part.inside
        paper = mix(paper, part.filling, dots * (part.distance < 1))
    return paper


# Each style's painter, and how a caption calls it.
STYLES: dict[str, tuple[Painter, tuple[str, str]]] = {
    "clean": (clean, ("drawn cleanly", "in flat colours")),
    "outline": (outline, ("drawn as an outline", "in thin lines")),
    "noisy": (noisy, ("with a lot of noise", "in a noisy picture")),
    "blurred": (blurred, ("out of focus", "in a blurred picture")),
    "neon": (neon, ("as a neon light", "glowing in the dark")),
    "sketch": (sketch, ("drawn as a sketch", "in pencil")),
    "inverted": (inverted, ("in inverted colours", "as a negative")),
    "stippled": (stippled, ("drawn in dots", "as a stippled print")),
}

COLOURS = {
    "red": (0.85, 0.12, 0.12), "orange": (0.96, 0.52, 0.08), "yellow": (0.93, 0.84, 0.12), "green": (0.15, 0.62, 0.18),
    "teal": (0.05, 0.62, 0.62), "blue": (0.14, 0.26, 0.86), "purple": (0.52, 0.14, 0.70), "pink": (0.96, 0.48, 0.72),
    "brown": (0.48, 0.28, 0.12), "grey": (0.50, 0.50, 0.50),
}  # fmt: skip
RGB = np.array(list(COLOURS.values()), dtype=np.float32)

# ---- shapes

Points = list[tuple[float, float]]

# Corners on a grid of 0..20 in both directions, y pointing down.
_CORNERS = {
    "square": "2,2 18,2 18,18 2,18",
    "rectangle": "0,5 20,5 20,15 0,15",
    "bar": "0,8 20,8 20,12 0,12",
    "diamond": "10,0 17,10 10,20 3,10",
    "trapezoid": "5,4 15,4 20,16 0,16",
    "slab": "5,5 20,5 15,15 0,15",
    "cross": "7,0 13,0 13,7 20,7 20,13 13,13 13,20 7,20 7,13 0,13 0,7 7,7",
    "arrow": "0,8 11,8 11,3 20,10 11,17 11,12 0,12",
    "chevron": "2,2 10,2 18,10 10,18 2,18 10,10",
    "house": "10,0 19,8 16,8 16,18 4,18 4,8 1,8",
    "bolt": "12,0 4,12 9,12 7,20 16,8 11,8 16,0",
    "hourglass": "3,1 17,1 11,10 17,19 3,19 9,10",
    "bow": "1,3 10,8 19,3 19,17 10,12 1,17",
    "crown": "1,4 6,10 10,2 14,10 19,4 17,17 3,17",
    "boat": "9,1 17,10 11,11 20,11 16,18 4,18 0,11 9,11",
    "tree": "10,0 16,7 13,7 18,14 12,14 12,20 8,20 8,14 2,14 7,7 4,7",
    "cup": "2,3 15,3 15,6 20,6 20,13 15,13 13,18 4,18",
    "bottle": "8,0 12,0 12,6 16,9 16,20 4,20 4,9 8,6",
    "fish": "0,10 6,5 12,5 15,9 20,4 20,16 15,11 12,15 6,15",
    "hook": "4,1 9,1 9,13 12,13 12,9 17,9 17,19 4,19",
    "angle": "3,1 8,1 8,14 18,14 18,19 3,19",
    "tee": "1,2 19,2 19,7 13,7 13,19 7,19 7,7 1,7",
    "gate": "2,2 18,2 18,19 13,19 13,8 7,8 7,19 2,19",
    "comb": "2,2 17,2 17,6 8,6 8,8 15,8 15,12 8,12 8,14 17,14 17,18 2,18",
    "zigzag": "1,3 18,3 10,14 19,14 19,18 2,18 11,7 1,7",
    "stairs": "1,14 7,14 7,8 13,8 13,2 19,2 19,18 1,18",
    "flag": "3,0 17,5 6,10 6,20 3,20",
    "kite": "10,0 16,6 10,20 4,6",
}


def _outline(name: str) -> Points:
    """A polygon within the unit circle, y pointing down."""
    if name in _CORNERS:
        pairs = (corner.split(",") for corner in _CORNERS[name].split())
        return [((int(x) - 10) * 0.097, (int(y) - 10) * 0.097) for x, y in pairs]
    circle = [_polar(7.5 * i) for i in range(48)]
    lobe = [(0.46 + 0.5 * x, -0.34 + 0.5 * y) for x, y in (_polar(angle) for angle in range(-66, 121, 6))]
    belly = [_polar(angle) for angle in range(60, 301, 10)]
    made: dict[str, Callable[[], Points]] = {
        "circle": lambda: circle,
        "oval": lambda: [(x, 0.56 * y) for x, y in circle],
        "egg": lambda: [(x * (0.72 + 0.18 * y), y) for x, y in circle],
        "pill": lambda: [(0.5 * x, 0.5 * y + (0.5 if y > 0 else -0.5)) for x, y in circle],
        "dome": lambda: [(x, 0.45 + min(y, 0) * 1.1) for x, y in circle],
        "bean": lambda: [(x, 0.62 * y + 0.5 * x * x - 0.25) for x, y in circle],
        "triangle": lambda: [_polar(120 * i) for i in range(3)],
        "pentagon": lambda: [_polar(72 * i) for i in range(5)],
        "hexagon": lambda: [_polar(60 * i) for i in range(6)],
        "octagon": lambda: [_polar(45 * i + 22.5) for i in range(8)],
        "star": lambda: [_polar(36 * i, 0.42 if i % 2 else 1.0) for i in range(10)],
        "spark": lambda: [_polar(45 * i, 0.3 if i % 2 else 1.0) for i in range(8)],
        "sun": lambda: [_polar(15 * i, 0.66 if i % 2 else 1.0) for i in range(24)],
        "gear": lambda: [_polar(11.25 * i, 1.0 if i % 4 < 2 else 0.72) for i in range(32)],
        "flower": lambda: [_polar(7.5 * i, 0.74 + 0.26 * _polar(37.5 * i)[0]) for i in range(48)],
        "clover": lambda: [_polar(7.5 * i, 0.66 + 0.34 * _polar(22.5 * i)[0]) for i in range(48)],
        "heart": lambda: [*lobe, (0.0, 0.92), *((-x, y) for x, y in reversed(lobe))],
        "drop": lambda: [(0.0, -1.0), *((0.62 * x, 0.36 + 0.62 * y) for x, y in belly)],
        "leaf": lambda: [(x * (0.9 - 0.5 * abs(y)) * 0.7, y) for x, y in circle],
    }  # fmt: skip
    return made[name]()


_ROUND = (
    "circle", "oval", "egg", "pill", "dome", "bean", "triangle", "pentagon", "hexagon", "octagon", "star", "spark",
    "sun", "gear", "flower", "clover", "heart", "drop", "leaf",
)  # fmt: skip
SHAPES = (*_ROUND, "ring", "moon", *_CORNERS)


@cache
def _table(shape: int) -> np.ndarray:
    """Signed distances to a shape's edge in radii, negative inside: float32 (160, 160). NOTHING is far away."""
    centres = (np.arange(_CELLS) + 0.5) * (2 * _REACH / _CELLS) - _REACH
    x, y = np.broadcast_arrays(centres[None, :], centres[:, None])
    if shape == NOTHING:
        return np.full(x.shape, np.float32(99))
    name = SHAPES[shape]
    if name in ("ring", "moon"):
        circle = _signed(_outline("circle"), x, y)
        bite = _signed([(0.45 + 0.85 * a, 0.85 * b) for a, b in _outline("circle")], x, y)
        return (np.abs(circle + 0.24) - 0.24 if name == "ring" else np.maximum(circle, -bite)).astype(np.float32)
    return _signed(_outline(name), x, y).astype(np.float32)


def _lookup(shape: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Signed distance in radii at (u, v), from the nearest cell of the shape's table: float32 (B, 32, 32)."""
    scale = np.float32(_CELLS / (2 * _REACH))
    column, row = (((w + np.float32(_REACH)) * scale).clip(0, _CELLS - 1).astype(np.int32) for w in (u, v))
    used, index = np.unique(shape, return_inverse=True)
    near = np.stack([_table(int(one)) for one in used])[index[:, None, None], row, column]
    beyond = np.maximum(np.maximum(np.abs(u), np.abs(v)) - np.float32(_REACH), 0)  # the table's end
    distance: np.ndarray = near + beyond
    return distance


def _polar(degrees: float, radius: float = 1.0) -> tuple[float, float]:
    """A point on a circle; 0 degrees is up, 90 to the right."""
    quarter, rest = divmod(degrees, 90)
    cosine, sine = (float(part) for part in turn(np.array(rest)))
    for _ in range(int(quarter) % 4):
        cosine, sine = -sine, cosine
    return radius * sine, -radius * cosine


def _signed(points: Points, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Distance to a polygon, negative inside (even-odd rule)."""
    nearest = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
        ex, ey = bx - ax, by - ay
        along = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey)).clip(0, 1)
        nearest = np.minimum(nearest, (x - ax - along * ex) ** 2 + (y - ay - along * ey) ** 2)
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < ax + (y - ay) * (ex / ey))
    signed: np.ndarray = np.where(inside, -1.0, 1.0) * np.sqrt(nearest)
    return signed
