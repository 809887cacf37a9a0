"""`shapes`, `parts` and what draws them."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from time import process_time
from types import ModuleType

import numpy as np
import pytest

from promptfed.data import PARTITIONS, Dataset, DatasetConfig, drawing, federate, load, parts, shapes

WORLDS = {"shapes": (shapes, shapes.SHAPES, shapes.STYLES), "parts": (parts, parts.CLASSES, parts.CAMERAS)}


@pytest.fixture(scope="module", params=WORLDS)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield load(DatasetConfig(name=request.param))


@pytest.mark.parametrize(
    ("world", "labels", "pixels"),
    [(shapes, "6f7e989bdd08a236", "cdb4d21469bc2954"), (parts, "6f7e989bdd08a236", "64ed3ecfe027f525")],
)
def test_the_same_bytes_on_every_machine(world: ModuleType, labels: str, pixels: str) -> None:
    label, domain, pictures = world.sample(1280, seed=7)
    assert pictures.dtype == np.uint8
    assert pictures.shape == (1280, 3, 32, 32)
    assert sha256(np.stack([label, domain]).astype("<i8").tobytes()).hexdigest()[:16] == labels
    assert sha256(pictures.tobytes()).hexdigest()[:16] == pixels
    assert np.bincount(domain * 16 + label).tolist() == [10] * 128  # balanced
    other, _, drawn = world.sample(1280, seed=8)
    assert (other != label).any()
    assert (drawn != pictures).any()


def test_loads_by_name(dataset: Dataset) -> None:
    name = "parts" if "hook" in dataset.classes else "shapes"
    world, classes, domains = WORLDS[name]
    each = world.COUNT // 128
    assert dataset.images.shape == (world.COUNT, 3, 32, 32)
    assert dataset.classes == classes
    assert dataset.domains == domains
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)
    assert dataset.domain is not None
    assert np.bincount(dataset.domain * 16 + dataset.labels).tolist() == [each] * 128
    np.testing.assert_array_equal(dataset.images[:64], world.sample(world.COUNT, seed=0)[2][:64])


def test_federation_by_domain(dataset: Dataset) -> None:
    federation = federate(dataset, PARTITIONS["domain"](), seed=0)
    assert [site.name for site in federation.sites] == list(dataset.domains)
    assert dataset.domain is not None
    for i, site in enumerate(federation.sites):
        members = np.concatenate([site.train, site.val, site.test])
        assert len(members) == len(dataset.labels) // 8
        assert (dataset.domain[members] == i).all()


def test_federation_by_label(dataset: Dataset) -> None:
    federation = federate(dataset, PARTITIONS["pathological"](clients=8, classes_per_client=2), seed=0)
    assert [len(np.unique(dataset.labels[site.train])) for site in federation.sites] == [2] * 8
    skewed = federate(dataset, PARTITIONS["dirichlet"](clients=6, alpha=0.1), seed=0)
    assert sum(len(site.train) + len(site.val) + len(site.test) for site in skewed.sites) == len(dataset.labels)


def some_parts(shape: str, count: int = 64) -> drawing.Parts:
    """One part per picture, of radius 8 in the middle."""

    def column(value: float) -> np.ndarray:
        return np.full((count, 1), value)

    return drawing.Parts(
        shape=np.full((count, 1), drawing.SHAPES.index(shape)),
        texture=np.zeros((count, 1), dtype=np.int64),
        x=column(16),
        y=column(16),
        radius=column(8),
        tilt=column(0),
        squeeze=column(1),
        ink=np.full((count, 1, 3), np.float32(0.2)),
        paper=np.full((count, 3), np.float32(0.9)),
    )


def test_parts_are_where_and_as_large_as_said() -> None:
    one = some_parts("circle", 1)
    inside = drawing.layer(one, 0, np.random.default_rng(0)).distance[0] < 0
    assert inside.sum() == pytest.approx(np.pi * 64, rel=0.05)
    moved = replace(one, x=one.x + 4, radius=one.radius / 2, squeeze=one.squeeze / 2)
    inside = drawing.layer(moved, 0, np.random.default_rng(0)).distance[0] < 0
    assert inside.sum() == pytest.approx(np.pi * 16 / 2, rel=0.15)
    assert (inside * (np.arange(32) + 0.5)).sum() / inside.sum() == pytest.approx(20, abs=0.2)


def test_later_parts_lie_over_earlier_ones() -> None:
    square = some_parts("square", 1)
    both = {name: np.repeat(getattr(square, name), 2, 1) for name in ("texture", "x", "y", "tilt", "squeeze")}
    marked = replace(
        square,
        **both,
        shape=np.array([[drawing.SHAPES.index("square"), drawing.SHAPES.index("circle")]]),
        radius=np.array([[12.0, 5.0]]),
        ink=np.array([[[0.2] * 3, [0.6] * 3]], dtype=np.float32),
    )
    picture = drawing.draw(marked, np.zeros(1, dtype=np.int64), [drawing.clean], seed=0)[0, 0]
    assert picture[16, 16] == 153
    assert picture[16, 8] == 51
    assert picture[0, 0] == 230


def test_the_distance_of_a_circle_and_a_square() -> None:
    """Signed distances worked out by hand, in radii."""
    at = [int((value + 1.6) * 50) for value in (0.0, 0.5, 1.5)]  # 160 cells over -1.6..1.6
    circle, square, ring = (drawing._table(drawing.SHAPES.index(name)) for name in ("circle", "square", "ring"))
    np.testing.assert_allclose(circle[at[0], at], [-1.0, -0.5, 0.5], atol=0.02)
    np.testing.assert_allclose(square[at[0], at], [-0.78, -0.28, 0.72], atol=0.02)
    np.testing.assert_allclose(square[at[2], at[2]], 0.72 * 2**0.5, atol=0.02)
    np.testing.assert_allclose(ring[at[0], at], [0.52, 0.02, 0.5], atol=0.02)


def test_cosine_and_sine() -> None:
    angles = np.linspace(-90, 90, 181)
    cosine, sine = drawing.turn(angles)
    np.testing.assert_allclose(cosine, np.cos(np.radians(angles)), atol=1e-6)
    np.testing.assert_allclose(sine, np.sin(np.radians(angles)), atol=1e-5)
    np.testing.assert_allclose(drawing._polar(450), (1, 0), atol=1e-6)


def test_every_shape_and_every_kind_differs_from_the_others() -> None:
    tables = np.stack([drawing._table(i) < 0 for i in range(len(drawing.SHAPES))]).reshape(len(drawing.SHAPES), -1)
    differing = (tables[:, None] ^ tables[None]).mean(2) + np.eye(len(tables))
    assert differing.min() > 0.01
    kind, camera, pictures = parts.sample(1280, seed=0)
    means = np.stack([pictures[(kind == i) & (camera == 0)].mean(0) for i in range(16)])
    assert (np.abs(means[:, None] - means[None]).mean((2, 3, 4)) + 255 * np.eye(16)).min() > 3


def test_styles_differ() -> None:
    """The same parts in two styles are far from each other; inverted is the negative of clean in general."""
    painters = [painter for painter, _ in drawing.STYLES.values()]
    drawn = {
        name: drawing.draw(some_parts("star"), np.full(64, i), painters, seed=1).astype(np.int64)
        for i, name in enumerate(drawing.STYLES)
    }
    np.testing.assert_allclose(drawn["inverted"], 255 - drawn["clean"], atol=1)
    for i, one in enumerate(drawing.STYLES):
        for other in list(drawing.STYLES)[i + 1 :]:
            assert np.abs(drawn[one] - drawn[other]).mean() > 8, (one, other)


def test_drawing_costs_little_more_than_touching_every_pixel() -> None:
    start = process_time()
    _, _, images = shapes.sample(2400, seed=3)
    drawn = process_time()
    np.exp(images.astype(np.float64))
    assert drawn - start < 20 * (process_time() - drawn)  # about twice
