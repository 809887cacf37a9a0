"""`shapes`: single drawings of sixteen shapes in eight styles, a sample of what clip-mini was pre-trained on.

The label is the shape, the domain is the style.
"""

import numpy as np

from . import drawing
from .drawing import SIZE, Parts, uniform

COUNT = 9600  # pictures of the dataset: 75 of each shape in each style
VERSION = 2  # raise it when the same seed draws other pictures

SHAPES = (
    "circle", "oval", "ring", "moon", "square", "rectangle", "triangle", "pentagon",
    "hexagon", "star", "cross", "heart", "drop", "arrow", "house", "bolt",
)  # fmt: skip
STYLES = tuple(drawing.STYLES)


def sample(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shapes (N,), styles (N,) and pictures uint8 (N, 3, 32, 32): equally many of each shape in each style, in random
    order."""
    rng = np.random.default_rng([seed, 0])
    cell = (np.arange(count) % (len(SHAPES) * len(STYLES)))[rng.permutation(count)]
    shape, style = cell % len(SHAPES), cell // len(SHAPES)
    radius = 5.5 + 7 * rng.random((count, 1))
    room = SIZE / 2 - 0.8 * radius  # how far the centre may move: a shape's tip may touch the border
    shade = uniform(rng, 0.75, 1.0, count, 1)
    dark = rng.random((count, 1)) < 0.3
    parts = Parts(
        shape=np.array([drawing.SHAPES.index(name) for name in SHAPES])[shape][:, None],
        texture=rng.integers(len(drawing.TEXTURES), size=(count, 1)),
        x=SIZE / 2 + room * (2 * rng.random((count, 1)) - 1),
        y=SIZE / 2 + room * (2 * rng.random((count, 1)) - 1),
        radius=radius,
        tilt=25 * (2 * rng.random((count, 1)) - 1),
        squeeze=0.85 + 0.3 * rng.random((count, 1)),
        ink=drawing.RGB[rng.integers(len(drawing.RGB), size=(count, 1))] + uniform(rng, -0.07, 0.07, count, 1, 3),
        paper=np.where(dark, shade - np.float32(0.72), shade) + uniform(rng, -0.06, 0.06, count, 3),
    )
    painters = [painter for painter, _ in drawing.STYLES.values()]
    return shape, style, drawing.draw(parts, style, painters, seed)
