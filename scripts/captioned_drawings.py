"""What clip-mini is pre-trained on: drawings of one or several shapes, and sentences that describe them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from promptfed.data import drawing, shapes
from promptfed.data.drawing import NOTHING, SIZE, Parts, uniform

COLOURS, STYLES, TEXTURES = tuple(drawing.COLOURS), tuple(drawing.STYLES), drawing.TEXTURES
SIZES = ("small", "medium", "large")
COUNTS = ("two", "three", "four")
# How the first thing is to the second; the counts: there are several of it.
RELATIONS = ("alone", "around", "left of", "right of", "above", "below", *COUNTS)
ATTRIBUTES = {
    "shape": len(drawing.SHAPES), "colour": len(COLOURS), "texture": len(TEXTURES), "size": len(SIZES),
    "style": len(STYLES), "relation": len(RELATIONS), "other": len(drawing.SHAPES) + 1,
    "other colour": len(COLOURS) + 1,
}  # fmt: skip
# What the first lessons consist of: shapes that look least alike, in the styles that show them best.
EASY_SHAPES = np.array([drawing.SHAPES.index(name) for name in shapes.SHAPES])
EASY_STYLES = np.array([STYLES.index(name) for name in ("clean", "blurred", "neon")])
LEADS = ("a photo of {}.", "a photo of {}", "a picture of {}", "an image of {}", "a drawing of {}", "{}")
_WHERE = {
    "around": ("around {}", "with {} inside"),
    "left of": ("left of {}", "with {} on its right"),
    "right of": ("right of {}", "with {} on its left"),
    "above": ("above {}", "over {}"),
    "below": ("below {}", "under {}"),
}
_SIDE = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
_RADII = np.array([(4.5, 6.5), (6.5, 9.5), (9.5, 12.5)])  # pixels, by size


@dataclass(frozen=True)
class Scenes:
    """N drawings and what there is to say of them."""

    attributes: np.ndarray  # int64 (N, 8), in the order of ATTRIBUTES
    parts: Parts
    seed: int

    @cached_property
    def pictures(self) -> np.ndarray:
        """uint8 (N, 3, 32, 32)."""
        painters = [painter for painter, _ in drawing.STYLES.values()]
        return drawing.draw(self.parts, self.attributes[:, 4], painters, self.seed)

    def outlines(self, chosen: slice) -> np.ndarray:
        """Where the first thing is in these pictures: bool (n, 32, 32)."""
        some = self.parts.take(np.arange(len(self.attributes))[chosen])
        inside: np.ndarray = drawing.layer(some, 0, np.random.default_rng(0)).distance < 0
        return inside

    def captions(self, told: np.ndarray) -> list[str]:
        """A sentence each that names the attributes marked in `told`, bool (N, 8); the shape always."""
        words = np.random.default_rng([self.seed, 2]).random((len(told), 3))
        return list(map(_caption, self.attributes.tolist(), told.tolist(), words.tolist()))


def sample(count: int, seed: int, ease: float = 1.0) -> Scenes:
    """Random scenes; for smaller `ease` more of them plain and easy ones, and all closer to single large upright shapes
    in the centre."""
    rng = np.random.default_rng([seed, 0])
    easy = rng.random(count) >= ease
    shape, other = rng.integers(len(drawing.SHAPES), size=(2, count))
    shape = np.where(easy, EASY_SHAPES[shape % len(EASY_SHAPES)], shape)
    style = rng.integers(len(STYLES), size=count)
    style = np.where(easy, EASY_STYLES[style % len(EASY_STYLES)], style)
    colour, other_colour = rng.integers(len(COLOURS), size=(2, count))
    texture = rng.integers(len(TEXTURES), size=count) * (~easy & (rng.random(count) < 0.6))
    size = rng.integers(len(SIZES), size=count)
    relation = rng.integers(1, len(RELATIONS), size=count) * (rng.random(count) < 0.5 * ease)
    paired = (relation > 0) & (relation < 6)
    attributes = [shape, colour, texture, size, style, relation]
    attributes += [np.where(paired, other, len(drawing.SHAPES)), np.where(paired, other_colour, len(COLOURS))]
    return Scenes(np.stack(attributes, 1), _parts(np.stack(attributes, 1), ease, rng), seed)


def _parts(attributes: np.ndarray, ease: float, rng: np.random.Generator) -> Parts:
    """One to four: the thing, or several of it, and what it stands next to."""
    count = len(attributes)
    shape, colour, texture, size, _, relation, other, other_colour = attributes.T
    low, high = _RADII[size].T
    radius = np.repeat((low + (high - low) * rng.random(count))[:, None], 4, 1)
    radius = 11 + ease * (radius - 11)
    room = SIZE / 2 - 0.8 * radius[:, :1]
    x, y = (SIZE / 2 + ease * room * (2 * rng.random((count, 4)) - 1) for _ in range(2))
    shapes = np.full((count, 4), NOTHING)
    shapes[:, 0] = shape
    around = relation == RELATIONS.index("around")
    radius[around, 0] = 10 + 3 * rng.random(around.sum())
    radius[around, 1] = 3.5 + 2 * rng.random(around.sum())
    for w in (x, y):
        w[around, 0] = SIZE / 2 + 3 * (rng.random(around.sum()) - 0.5)
        w[around, 1] = w[around, 0] + 2 * (rng.random(around.sum()) - 0.5)
    for name, (dx, dy) in _SIDE.items():
        these = relation == RELATIONS.index(name)
        radius[these] = 5 + 2.5 * rng.random((these.sum(), 4))
        for w, side in ((x, dx), (y, dy)):
            middle = SIZE / 2 + 4 * (rng.random((these.sum(), 2)) - 0.5)
            w[these, :2] = middle + side * np.array([8.0, -8.0])
    paired = other < len(drawing.SHAPES)
    shapes[paired, 1] = other[paired]
    for number, name in enumerate(COUNTS, 2):
        these = relation == RELATIONS.index(name)
        shapes[these, :number] = shape[these, None]
        radius[these] = 4 + 2.5 * rng.random((these.sum(), 1))
        corner = np.argsort(rng.random((these.sum(), 4)), axis=1)  # which quarter each has
        for w, side in ((x, corner % 2), (y, corner // 2)):
            w[these] = 8.5 + 15 * side + 3 * (rng.random(side.shape) - 0.5)
    inks = np.stack([colour, *[np.where(paired, other_colour, colour)] * 1, colour, colour], 1)
    shade = uniform(rng, 0.75, 1.0, count, 1)
    dark = rng.random((count, 1)) < 0.3
    tilt = np.where(rng.random((count, 4)) < 0.3, 90.0, 25.0) * ease * (2 * rng.random((count, 4)) - 1)
    second = rng.integers(len(TEXTURES), size=count) * (rng.random(count) < 0.3)
    return Parts(
        shape=shapes,
        texture=np.stack([texture, np.where(paired, second, texture), texture, texture], 1),
        x=x,
        y=y,
        radius=radius,
        tilt=tilt,
        squeeze=0.8 + 0.4 * rng.random((count, 4)),
        ink=drawing.RGB[inks] + uniform(rng, -0.09, 0.09, count, 4, 3),
        paper=np.where(dark, shade - np.float32(0.72), shade) + uniform(rng, -0.1, 0.1, count, 3),
    )


def _caption(row: list[int], told: list[bool], wording: list[float]) -> str:
    shape, colour, texture, size, style, relation, other, other_colour = row
    words = ((told[3], SIZES[size]), (told[1], COLOURS[colour]), (told[2], TEXTURES[texture]))
    thing = [word for tell, word in words if tell and word not in ("medium", "plain")] + [drawing.SHAPES[shape]]
    link = RELATIONS[relation] if told[5] else "alone"
    text = f"{link} {' '.join(thing)}s" if link in COUNTS else _article(thing)
    if link in _WHERE:
        second = [COLOURS[other_colour]] * told[7] + [drawing.SHAPES[other]]
        text += " " + _pick(_WHERE[link], wording[1]).format(_article(second))
    if told[4]:
        text += ", " + _pick(drawing.STYLES[STYLES[style]][1], wording[2])
    return _pick(LEADS, wording[0]).format(text)


def _article(words: list[str]) -> str:
    return ("an " if words[0][0] in "aeiou" else "a ") + " ".join(words)


def _pick(choices: tuple[str, ...], share: float) -> str:
    return choices[int(share * len(choices))]


def mentioned(scenes: Scenes, seed: int) -> np.ndarray:
    """What captions tell: bool (N, 8). Half of them nothing but the shape; never what has no word."""
    rng = np.random.default_rng([seed, 3])
    a = scenes.attributes
    told = rng.random(a.shape) < np.array([1, 0.5, 0.5, 0.3, 0.3, 0.7, 0, 0.6])
    told[rng.random(len(a)) < 0.4, 1:] = False
    told[:, 2] &= a[:, 2] != 0
    told[:, 3] &= (a[:, 3] != 1) & (a[:, 5] == 0)
    told[:, 5] &= a[:, 5] != 0
    told[:, 6] = told[:, 5] & (a[:, 6] < len(drawing.SHAPES))
    told[:, 7] &= told[:, 6]
    return told


def vocabulary() -> list[str]:
    """Every word that a caption can have, each once."""
    texts = [*drawing.SHAPES, *(name + "s" for name in drawing.SHAPES), *COLOURS, *TEXTURES, *SIZES, *COUNTS, "an"]
    texts += [text.replace("{}", "") for texts in (LEADS, *_WHERE.values()) for text in texts]
    texts += [text for _, phrases in drawing.STYLES.values() for text in phrases]
    return sorted({word.strip(".,") for text in texts for word in text.split()} - {""})
