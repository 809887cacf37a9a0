"""`shapes`: small drawn pictures with captions, made from a seed.

One shape per picture, in a colour, texture, size, place and angle, drawn in one of several styles. The label is the
shape, the domain is the style. The same seed gives the same bytes on every machine: positions, pixels and noise come
from elementwise arithmetic that IEEE 754 rounds the same everywhere, never from sums, matrix products or libm.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Self

import numpy as np

SIZE = 32  # pixels per side
COUNT = 9600  # pictures of the dataset: 75 of each shape in each style
VERSION = 1  # raise it when the same seed draws other pictures

SHAPES = (
    "circle", "oval", "ring", "moon", "square", "rectangle", "triangle", "pentagon",
    "hexagon", "star", "cross", "heart", "drop", "arrow", "house", "bolt",
)  # fmt: skip
_COLOURS = {
    "red": (0.85, 0.12, 0.12), "orange": (0.96, 0.52, 0.08), "yellow": (0.93, 0.84, 0.12), "green": (0.15, 0.62, 0.18),
    "teal": (0.05, 0.62, 0.62), "blue": (0.14, 0.26, 0.86), "purple": (0.52, 0.14, 0.70), "pink": (0.96, 0.48, 0.72),
    "brown": (0.48, 0.28, 0.12), "grey": (0.50, 0.50, 0.50),
}  # fmt: skip
_RGB = np.array(list(_COLOURS.values()), dtype=np.float32)
COLOURS = tuple(_COLOURS)
TEXTURES = ("plain", "striped", "dotted", "checkered")
SIZES = ("small", "medium", "large")
PLACES = (
    "upper left", "top", "upper right",
    "left", "centre", "right",
    "lower left", "bottom", "lower right",
)  # fmt: skip
STYLES = ("clean", "outline", "noisy", "blurred", "neon", "sketch", "inverted", "stippled")
ATTRIBUTES = ("shape", "colour", "texture", "size", "place", "style")

# What clip-mini never saw in its pre-training.
UNSEEN_STYLES = ("sketch", "inverted", "stippled")
SEEN_STYLES = tuple(style for style in STYLES if style not in UNSEEN_STYLES)

_RADII = np.array([(5.2, 6.5), (7.0, 9.0), (9.5, 12.0)])  # pixels, by size
_TILT = 25.0  # degrees to either side
_CHUNK = 256  # pictures drawn at once: their layers fit into a CPU's cache
_STROKES = 2  # distractor strokes per picture


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """What N pictures show. Attributes are indices into the tuples above."""

    shape: np.ndarray  # int64 (N,)
    colour: np.ndarray
    texture: np.ndarray
    size: np.ndarray
    place: np.ndarray
    style: np.ndarray
    x: np.ndarray  # float64 (N,), centre in pixels
    y: np.ndarray
    radius: np.ndarray  # pixels
    tilt: np.ndarray  # degrees
    squeeze: np.ndarray  # height over width

    def __len__(self) -> int:
        return len(self.shape)

    @property
    def attributes(self) -> np.ndarray:
        """int64 (N, 6), in the order of ATTRIBUTES."""
        return np.stack([getattr(self, name) for name in ATTRIBUTES], axis=1)

    def take(self, chosen: np.ndarray) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def unseen(shape: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Whether clip-mini's pre-training left out a shape in a colour: two of the ten colours of each shape."""
    left_out: np.ndarray = (3 * shape + colour) % 5 == 0
    return left_out


def sample(count: int, seed: int, styles: Iterable[str] = STYLES) -> Scenes:
    """Random scenes with equally many of each shape in each of these styles, in random order."""
    rng = np.random.default_rng([seed, 0])
    chosen = np.array([STYLES.index(style) for style in styles])
    cell = np.arange(count) % (len(SHAPES) * len(chosen))
    cell = cell[rng.permutation(count)]
    size, place = (rng.integers(len(names), size=count) for names in (SIZES, PLACES))
    low, high = _RADII[size].T
    radius = low + (high - low) * rng.random(count)
    room = SIZE / 2 - 0.8 * radius  # how far the centre may move: a shape's tip may touch the border
    column, row = place % 3 - 1, place // 3 - 1
    return Scenes(
        shape=cell % len(SHAPES),
        colour=rng.integers(len(COLOURS), size=count),
        texture=rng.integers(len(TEXTURES), size=count),
        size=size,
        place=place,
        style=chosen[cell // len(SHAPES)],
        x=SIZE / 2 + room * (0.7 * column + 0.4 * (rng.random(count) - 0.5)),
        y=SIZE / 2 + room * (0.7 * row + 0.4 * (rng.random(count) - 0.5)),
        radius=radius,
        tilt=_TILT * (2 * rng.random(count) - 1),
        squeeze=0.85 + 0.3 * rng.random(count),
    )


def draw(scenes: Scenes, seed: int) -> np.ndarray:
    """uint8 (N, 3, 32, 32)."""
    rng = np.random.default_rng([seed, 1])
    pictures = np.empty((len(scenes), 3, SIZE, SIZE), dtype=np.uint8)
    for index, style in enumerate(STYLES):
        members = np.flatnonzero(scenes.style == index)
        for start in range(0, len(members), _CHUNK):
            part = members[start : start + _CHUNK]
            layers = _layers(scenes.take(part), rng, wobble=1.3 if style == "sketch" else 0.0)
            pixels = _PAINTED[style][0](layers, rng)  # float32 (B, 3, 32, 32)
            pictures[part] = np.floor(pixels.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return pictures


@dataclass(frozen=True)
class _Layers:
    """What the styles are mixed from; B pictures."""

    distance: np.ndarray  # float32 (B, 32, 32), pixels to the shape's edge, negative inside
    pattern: np.ndarray  # float32 (B, 32, 32), 1 where the texture leaves the ink darker
    hatching: np.ndarray  # float32 (B, 32, 32), 1 on a pencil's parallel strokes
    clutter: np.ndarray  # float32 (B, 32, 32), coverage by strokes that mean nothing
    ink: np.ndarray  # float32 (B, 3, 1, 1)
    paper: np.ndarray  # float32 (B, 3, 32, 32)
    dirt: np.ndarray  # float32 (B, 3, 1, 1), the strokes' colour

    @property
    def inside(self) -> np.ndarray:
        """Coverage by the filled shape, float32 (B, 32, 32)."""
        return (np.float32(0.5) - self.distance).clip(0, 1)

    def line(self, width: float, shift: float = 0.0) -> np.ndarray:
        """Coverage by a line around the shape, `shift` pixels inside its edge."""
        return np.clip(np.float32(0.5 + width / 2) - np.abs(self.distance + np.float32(shift)), 0, 1)

    @property
    def littered(self) -> np.ndarray:
        """The paper with its strokes, float32 (B, 3, 32, 32)."""
        return _mix(self.paper, self.dirt, np.float32(0.7) * self.clutter)


def _layers(scenes: Scenes, rng: np.random.Generator, wobble: float) -> _Layers:
    n = len(scenes)
    # pixel centres, the shape's own centre being the origin: (B, 1, 32) and (B, 32, 1)
    grid = np.arange(SIZE, dtype=np.float32) + np.float32(0.5)
    dx, dy = grid - _column(scenes.x), grid[:, None] - _column(scenes.y)
    if wobble:
        dx, dy = dx + wobble * _smooth(n, rng), dy + wobble * _smooth(n, rng)
    cosine, sine = (_column(part) for part in _turn(scenes.tilt))
    u, v = cosine * dx + sine * dy, cosine * dy - sine * dx
    radius = _column(scenes.radius)
    distance = _lookup(scenes.shape, u / radius, v / (radius * _column(scenes.squeeze))) * radius

    shade = _uniform(rng, 0.75, 1.0, n, 1, 1, 1)
    dark = rng.random((n, 1, 1, 1)) < 0.3
    paper = np.where(dark, shade - np.float32(0.72), shade) + _uniform(rng, -0.06, 0.06, n, 3, 1, 1)
    slope, middle = _uniform(rng, -0.008, 0.008, n, 2), grid - SIZE / 2
    light = slope[:, :1, None] * middle + slope[:, 1:, None] * middle[:, None]  # (B, 32, 32)
    return _Layers(
        distance=distance,
        pattern=_pattern(scenes.texture, u, v),
        hatching=(((u + 2 * v) / 5) % 1 < 0.42).astype(np.float32),
        clutter=_clutter(n, grid, rng),
        ink=_RGB[scenes.colour][:, :, None, None] + _uniform(rng, -0.07, 0.07, n, 3, 1, 1),
        paper=paper + light[:, None].astype(np.float32),
        dirt=_RGB[rng.integers(len(COLOURS), size=n)][:, :, None, None],
    )


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    return np.float32(low) + np.float32(high - low) * rng.random(shape, dtype=np.float32)


def _column(values: np.ndarray) -> np.ndarray:
    """(B,) -> float32 (B, 1, 1)."""
    return values.astype(np.float32)[:, None, None]


def _smooth(n: int, rng: np.random.Generator) -> np.ndarray:
    """A slowly changing field in -1..1: float32 (n, 32, 32), bilinear between 5 x 5 random values."""
    knots = _uniform(rng, -1, 1, n, 5, 5)
    at = np.arange(SIZE, dtype=np.float32) / np.float32(SIZE / 4)
    low = at.astype(np.int64)
    part = at - low
    rows = knots[:, low] * (1 - part)[None, :, None] + knots[:, low + 1] * part[None, :, None]
    field: np.ndarray = rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
    return field


def _turn(degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine by their series, which unlike libm's are the same on every machine; good to 1e-6 below 90."""
    a = degrees * 0.017453292519943295
    b = a * a
    cosine = 1 - b / 2 * (1 - b / 12 * (1 - b / 30 * (1 - b / 56 * (1 - b / 90))))
    sine = a * (1 - b / 6 * (1 - b / 20 * (1 - b / 42 * (1 - b / 72))))
    return cosine, sine


def _pattern(texture: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float32 (B, 32, 32); u and v are the shape's own coordinates in pixels."""
    striped = v / 4 % 1 < 0.5
    column, row = u / 3 % 1 < 0.5, v / 3 % 1 < 0.5
    pattern = np.zeros(u.shape, dtype=np.float32)
    for name, where in (("striped", striped), ("dotted", column & row), ("checkered", column ^ row)):
        members = texture == TEXTURES.index(name)
        pattern[members] = where[members]
    return pattern


def _clutter(n: int, grid: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Coverage by thin straight strokes anywhere: float32 (n, 32, 32)."""
    cover = np.zeros((n, SIZE, SIZE), dtype=np.float32)
    for _ in range(_STROKES):
        x, y, dx, dy = (_uniform(rng, low, high, n, 1, 1) for low, high in ((0, SIZE), (0, SIZE), (-9, 9), (-9, 9)))
        px, py = grid[None, None, :] - x, grid[None, :, None] - y
        along = ((px * dx + py * dy) / (dx * dx + dy * dy + np.float32(1e-3))).clip(0, 1)
        gap = np.sqrt((px - along * dx) ** 2 + (py - along * dy) ** 2)
        cover = np.maximum(cover, (np.float32(1.1) - gap).clip(0, 1))
    return cover


def _mix(below: np.ndarray, above: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Paint `above` with this coverage (B, 32, 32) over `below` (B, 3, 32, 32)."""
    mixed: np.ndarray = below + (above - below) * cover[:, None]
    return mixed


def _clean(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    filled = layers.ink * (1 - np.float32(0.5) * layers.pattern[:, None])
    return _mix(layers.littered, filled, layers.inside)


def _outline(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    tinted = _mix(layers.littered, layers.ink, np.float32(0.3) * layers.pattern * layers.inside)
    return _mix(tinted, layers.ink, layers.line(1.2))


def _noisy(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    clean = _clean(layers, rng)
    grain = rng.random(clean.shape, dtype=np.float32) + rng.random(clean.shape, dtype=np.float32) - 1  # triangular
    lost = rng.random((len(clean), 1, SIZE, SIZE), dtype=np.float32)
    noisy = clean + np.float32(0.42) * grain
    return np.where(lost < 0.03, np.float32(0), np.where(lost > 0.97, np.float32(1), noisy))


def _blurred(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    picture = _clean(layers, rng)
    for _ in range(3):
        for axis in (2, 3):
            edge = np.concatenate([picture.take([0], axis), picture, picture.take([-1], axis)], axis)
            a, b, c = (edge.take(range(i, i + SIZE), axis) for i in range(3))
            picture = (a + b + b + c) / 4
    return np.float32(0.5) + (picture - np.float32(0.5)) * np.float32(0.7)


def _neon(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    glow = 1 / (1 + layers.distance * layers.distance / np.float32(2.5))[:, None]
    night = np.float32(0.12) * layers.paper + np.float32(0.35) * layers.dirt * layers.clutter[:, None]
    lit: np.ndarray = night + np.float32(0.8) * layers.ink * glow + np.float32(0.45) * layers.line(1.0)[:, None]
    return lit


def _sketch(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    paper = np.float32(0.93) + _uniform(rng, -0.05, 0.05, len(layers.ink), 1, SIZE, SIZE)
    pencil = np.float32(0.35) * layers.ink + np.float32(0.12)
    second = layers.line(0.8, 1.6)  # drawn twice, slightly shifted
    rough = _uniform(rng, 0.45, 1.0, *layers.distance.shape)
    cover = np.maximum(np.float32(0.55) * layers.hatching * layers.inside, np.float32(0.5) * second)
    cover = np.maximum(cover, np.maximum(layers.line(0.9), np.float32(0.6) * layers.clutter))
    return _mix(paper, pencil, cover * rough)


def _inverted(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    return 1 - _clean(layers, rng)


def _stippled(layers: _Layers, rng: np.random.Generator) -> np.ndarray:
    inside = layers.inside
    density = np.float32(0.04) + np.float32(0.7) * inside + np.float32(0.3) * layers.clutter * (1 - inside)
    dots = (rng.random(density.shape, dtype=np.float32) < density).astype(np.float32)
    stray = np.float32(0.25) * layers.ink + np.float32(0.2)
    paper = np.full_like(layers.paper, np.float32(0.96))
    return _mix(paper, np.where(inside[:, None] > 0.5, layers.ink, stray), dots)


# Each style's painter, and how a caption calls it.
_PAINTED: dict[str, tuple[Callable[[_Layers, np.random.Generator], np.ndarray], tuple[str, str]]] = {
    "clean": (_clean, ("drawn cleanly", "in flat colours")),
    "outline": (_outline, ("drawn as an outline", "in thin lines")),
    "noisy": (_noisy, ("with a lot of noise", "in a noisy picture")),
    "blurred": (_blurred, ("out of focus", "in a blurred picture")),
    "neon": (_neon, ("as a neon light", "glowing in the dark")),
    "sketch": (_sketch, ("drawn as a sketch", "in pencil")),
    "inverted": (_inverted, ("in inverted colours", "as a negative")),
    "stippled": (_stippled, ("drawn in dots", "as a stippled print")),
}

_CELLS = 256  # per side of a shape's table
_REACH = 1.6  # the table covers -1.6..1.6; a shape lies within the unit circle


def _lookup(shape: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Signed distance in radii at (u, v), from the nearest cell of the shape's table: float32 (B, 32, 32)."""
    scale = np.float32(_CELLS / (2 * _REACH))
    column, row = (((w + np.float32(_REACH)) * scale).clip(0, _CELLS - 1).astype(np.int64) for w in (u, v))
    distance: np.ndarray = _tables()[shape[:, None, None], row, column]
    return distance


@cache
def _tables() -> np.ndarray:
    """Signed distances of all shapes, negative inside: float32 (shapes, 256, 256)."""
    centres = (np.arange(_CELLS) + 0.5) * (2 * _REACH / _CELLS) - _REACH
    x, y = np.broadcast_arrays(centres[None, :], centres[:, None])
    outlines = _outlines()
    circle = _signed(outlines["circle"], x, y)
    made = {
        "ring": np.abs(circle + 0.24) - 0.24,
        "moon": np.maximum(circle, -_signed([(0.45 + 0.85 * a, 0.85 * b) for a, b in outlines["circle"]], x, y)),
    }
    tables = [made[name] if name in made else _signed(outlines[name], x, y) for name in SHAPES]
    return np.stack(tables).astype(np.float32)


Points = list[tuple[float, float]]


def _outlines() -> dict[str, Points]:
    """Polygons within the unit circle, y pointing down."""
    circle = [_polar(360 * i / 64) for i in range(64)]
    # A heart's halves and a drop's belly are arcs that run on into a tip.
    lobe = [(0.46 + 0.5 * x, -0.34 + 0.5 * y) for x, y in (_polar(angle) for angle in range(-66, 121, 6))]
    heart = [*lobe, (0.0, 0.92), *((-x, y) for x, y in reversed(lobe))]
    belly = [(0.62 * x, 0.36 + 0.62 * y) for x, y in (_polar(angle) for angle in range(60, 301, 10))]
    return {
        "circle": circle,
        "oval": [(x, 0.56 * y) for x, y in circle],
        "square": [(-0.78, -0.78), (0.78, -0.78), (0.78, 0.78), (-0.78, 0.78)],
        "rectangle": [(-0.95, -0.5), (0.95, -0.5), (0.95, 0.5), (-0.95, 0.5)],
        "triangle": [_polar(120 * i) for i in range(3)],
        "pentagon": [_polar(72 * i) for i in range(5)],
        "hexagon": [_polar(60 * i) for i in range(6)],
        "star": [_polar(36 * i, 0.42 if i % 2 else 1.0) for i in range(10)],
        "cross": [
            (-0.3, -0.95), (0.3, -0.95), (0.3, -0.3), (0.95, -0.3), (0.95, 0.3), (0.3, 0.3),
            (0.3, 0.95), (-0.3, 0.95), (-0.3, 0.3), (-0.95, 0.3), (-0.95, -0.3), (-0.3, -0.3),
        ],
        "heart": heart,
        "drop": [(0.0, -1.0), *belly],
        "arrow": [
            (-0.95, -0.24), (0.1, -0.24), (0.1, -0.72), (0.98, 0.0), (0.1, 0.72), (0.1, 0.24), (-0.95, 0.24),
        ],
        "house": [(0.0, -0.98), (0.85, -0.2), (0.62, -0.2), (0.62, 0.8), (-0.62, 0.8), (-0.62, -0.2), (-0.85, -0.2)],
        "bolt": [(0.25, -1.0), (-0.6, 0.15), (-0.08, 0.15), (-0.3, 1.0), (0.6, -0.25), (0.08, -0.25), (0.55, -1.0)],
    }  # fmt: skip


def _polar(degrees: float, radius: float = 1.0) -> tuple[float, float]:
    """A point on a circle; 0 degrees is up, 90 to the right."""
    quarter, rest = divmod(degrees, 90)
    cosine, sine = (float(part) for part in _turn(np.array(rest)))
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


_LEADS = ("a photo of {}", "a picture of {}", "an image of {}", "a drawing of {}", "{}")
_WHERE = {
    "top": ("at the top",), "bottom": ("at the bottom",), "left": ("on the left",), "right": ("on the right",),
    "centre": ("in the centre", "in the middle"),
}  # fmt: skip


def captions(scenes: Scenes, seed: int, mentioned: np.ndarray | None = None) -> list[str]:
    """A sentence for each scene that names the attributes marked in `mentioned`, bool (N, 6); none: all of them.

    The shape is always named, "plain" and "medium" never.
    """
    told = np.ones((len(scenes), len(ATTRIBUTES)), dtype=bool) if mentioned is None else mentioned
    draws = np.random.default_rng([seed, 2]).random((len(scenes), 4))
    return list(map(_caption, scenes.attributes.tolist(), told.tolist(), draws.tolist()))


def _caption(row: list[int], mask: list[bool], wording: list[float]) -> str:
    shape, colour, texture, size, place, style = row
    _, tell_colour, tell_texture, tell_size, tell_place, tell_style = mask
    words = ((tell_size, SIZES[size]), (tell_colour, COLOURS[colour]), (tell_texture, TEXTURES[texture]))
    told = [word for tell, word in words if tell and word not in ("medium", "plain")]
    thing = " ".join([*told, SHAPES[shape]])
    text = _pick(_LEADS, wording[0]).format(("an " if thing[0] in "aeiou" else "a ") + thing)
    if tell_place:
        text += " " + _pick(_WHERE.get(PLACES[place], (f"in the {PLACES[place]}",)), wording[1])
    if tell_style:
        text += ", " + _pick(_PAINTED[STYLES[style]][1], wording[2])
    return text + _pick(("", "."), wording[3])


def _pick(choices: tuple[str, ...], draw: float) -> str:
    return choices[int(draw * len(choices))]


def vocabulary() -> tuple[str, ...]:
    """Every word a caption can hold."""
    names = (*SHAPES, *COLOURS, *TEXTURES, *SIZES, *PLACES, *STYLES, "in the")
    spoken = (*_WHERE.values(), *(phrases for _, phrases in _PAINTED.values()))
    phrases = (*names, *_LEADS, *(text for texts in spoken for text in texts))
    return tuple(sorted({word for phrase in phrases for word in phrase.replace("{}", "").split()}))
