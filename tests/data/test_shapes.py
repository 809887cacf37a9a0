from collections.abc import Iterator
from hashlib import sha256
from time import process_time

import numpy as np
import pytest

from promptfed.data import PARTITIONS, Dataset, DatasetConfig, federate, load, shapes


@pytest.fixture(scope="module")
def scenes() -> shapes.Scenes:
    return shapes.sample(1280, seed=7)


@pytest.fixture(scope="module")
def pictures(scenes: shapes.Scenes) -> np.ndarray:
    return shapes.draw(scenes, seed=7)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield load(DatasetConfig(name="shapes"))


def test_the_same_bytes_on_every_machine(scenes: shapes.Scenes, pictures: np.ndarray) -> None:
    assert pictures.dtype == np.uint8
    assert pictures.shape == (1280, 3, 32, 32)
    assert sha256(scenes.attributes.astype("<i8").tobytes()).hexdigest()[:16] == "d48c3ba067860d0e"
    assert sha256(pictures.tobytes()).hexdigest()[:16] == "372ba5fe50cd9087"
    assert sha256("\n".join(shapes.captions(scenes, seed=7)).encode()).hexdigest()[:16] == "a0515a21c9f98680"


def test_another_seed_draws_other_pictures(scenes: shapes.Scenes, pictures: np.ndarray) -> None:
    assert (shapes.sample(1280, seed=8).attributes != scenes.attributes).any()
    assert (shapes.draw(scenes, seed=8) != pictures).any()


def test_there_is_enough_of_everything() -> None:
    assert len(shapes.SHAPES) >= 12
    assert len(shapes.COLOURS) >= 8
    assert len(shapes.STYLES) >= 6
    assert set(shapes.SEEN_STYLES) | set(shapes.UNSEEN_STYLES) == set(shapes.STYLES)
    assert shapes.COUNT % (len(shapes.SHAPES) * len(shapes.STYLES)) == 0


def test_shapes_and_styles_are_balanced(scenes: shapes.Scenes) -> None:
    cells = np.bincount(scenes.style * 16 + scenes.shape)
    assert cells.tolist() == [10] * 128
    for name, count in (("colour", 10), ("texture", 4), ("size", 3), ("place", 9)):
        share = np.bincount(getattr(scenes, name), minlength=count) / len(scenes)
        assert np.abs(share - 1 / count).max() < 0.05, name


def test_chosen_styles_only() -> None:
    scenes = shapes.sample(64, seed=0, styles=("neon", "sketch"))
    assert {shapes.STYLES[i] for i in scenes.style} == {"neon", "sketch"}


def test_every_shape_lacks_two_colours_in_pre_training() -> None:
    grid = shapes.unseen(np.arange(16)[:, None], np.arange(10)[None])
    assert grid.sum(1).tolist() == [2] * 16
    assert grid.any(0).all()


def test_shapes_are_where_and_as_large_as_said(scenes: shapes.Scenes) -> None:
    """Against the clean drawing: its distance layer is negative inside the shape only."""
    layers = shapes._layers(scenes, np.random.default_rng(0), wobble=0)
    inside = layers.distance < 0
    area = inside.sum((1, 2))
    for shape in range(16):
        small, medium, large = (np.median(area[(scenes.shape == shape) & (scenes.size == size)]) for size in range(3))
        assert 8 < small < medium < large < 600, shapes.SHAPES[shape]
    full = (inside.sum((1, 2)) > 0) & (scenes.size == 0)
    column = (inside * (np.arange(32) + 0.5)).sum((1, 2))[full] / area[full]
    side = np.array([0 if "left" in name else 2 if "right" in name else 1 for name in shapes.PLACES])[
        scenes.place[full]
    ]
    assert column[side == 0].max() < 15
    assert column[side == 2].min() > 17
    assert np.abs(column[side == 1] - 16).max() < 5


def test_the_distance_of_a_circle_and_a_square() -> None:
    """Signed distances worked out by hand, in radii."""
    tables = shapes._tables()
    at = [int((value + 1.6) * 80) for value in (0.0, 0.5, 1.5)]  # 256 cells over -1.6..1.6
    circle, square, ring = (tables[shapes.SHAPES.index(name)] for name in ("circle", "square", "ring"))
    np.testing.assert_allclose(circle[at[0], at], [-1.0, -0.5, 0.5], atol=0.02)
    np.testing.assert_allclose(square[at[0], at], [-0.78, -0.28, 0.72], atol=0.02)
    np.testing.assert_allclose(square[at[2], at[2]], 0.72 * 2**0.5, atol=0.02)
    np.testing.assert_allclose(ring[at[0], at], [0.52, 0.02, 0.5], atol=0.02)


def test_cosine_and_sine() -> None:
    angles = np.linspace(-90, 90, 181)
    cosine, sine = shapes._turn(angles)
    np.testing.assert_allclose(cosine, np.cos(np.radians(angles)), atol=1e-6)
    np.testing.assert_allclose(sine, np.sin(np.radians(angles)), atol=1e-5)
    np.testing.assert_allclose(shapes._polar(450), (1, 0), atol=1e-6)


def test_styles_differ() -> None:
    """The same scenes in two styles are far from each other; inverted is the negative of clean in general."""
    scene = shapes.sample(256, seed=1, styles=("clean",))
    drawn = {}
    for i, style in enumerate(shapes.STYLES):
        styled = shapes.Scenes(**{**vars(scene), "style": np.full(256, i)})
        drawn[style] = shapes.draw(styled, seed=1).astype(np.int64)
    np.testing.assert_allclose(drawn["inverted"], 255 - drawn["clean"], atol=1)
    for i, one in enumerate(shapes.STYLES):
        for other in shapes.STYLES[i + 1 :]:
            assert np.abs(drawn[one] - drawn[other]).mean() > 8, (one, other)


def test_captions_name_the_attributes(scenes: shapes.Scenes) -> None:
    texts = shapes.captions(scenes, seed=0)
    assert len({text.split()[1] for text in texts}) > 5  # wordings vary
    for row, text in zip(scenes.attributes, texts, strict=True):
        shape, colour, texture, size, place, style = row
        words = set(text.rstrip(".").replace(",", "").split())
        assert {shapes.SHAPES[shape], shapes.COLOURS[colour]} <= words
        assert (shapes.TEXTURES[texture] in words) == (texture != 0)
        assert (shapes.SIZES[size] in words) == (shapes.SIZES[size] != "medium")
        where = shapes.PLACES[place]
        assert set(where.split()) <= words or (where == "centre" and "middle" in words)
        assert any(phrase in text for phrase in shapes._PAINTED[shapes.STYLES[style]][1])
        assert words <= set(shapes.vocabulary())


def test_captions_name_no_more_than_asked(scenes: shapes.Scenes) -> None:
    told = np.zeros((len(scenes), 6), dtype=bool)
    told[:, 1] = np.arange(len(scenes)) % 2 == 0
    for i, text in enumerate(shapes.captions(scenes, seed=0, mentioned=told)):
        words = text.rstrip(".").split()
        assert words[-1] == shapes.SHAPES[scenes.shape[i]]
        assert (shapes.COLOURS[scenes.colour[i]] in words) == told[i, 1]
        article, thing = words[-3:-1] if told[i, 1] else words[-2:]
        assert article == ("an" if thing[0] in "aeiou" else "a")


def test_loads_by_name(dataset: Dataset) -> None:
    assert dataset.images.shape == (9600, 3, 32, 32)
    assert dataset.classes == shapes.SHAPES
    assert dataset.domains == shapes.STYLES
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)
    assert dataset.domain is not None
    assert np.bincount(dataset.domain * 16 + dataset.labels).tolist() == [75] * 128
    scenes = shapes.sample(9600, seed=0)
    np.testing.assert_array_equal(dataset.images[:64], shapes.draw(scenes, seed=0)[:64])


def test_drawing_costs_little_more_than_touching_every_pixel() -> None:
    start = process_time()
    images = shapes.draw(shapes.sample(shapes.COUNT // 4, seed=3), seed=3)
    drawn = process_time()
    np.exp(images.astype(np.float64))
    assert drawn - start < 10 * (process_time() - drawn)  # about equal


def test_federation_by_style(dataset: Dataset) -> None:
    federation = federate(dataset, PARTITIONS["domain"](), seed=0)
    assert [site.name for site in federation.sites] == list(shapes.STYLES)
    assert dataset.domain is not None
    for i, site in enumerate(federation.sites):
        members = np.concatenate([site.train, site.val, site.test])
        assert len(members) == 1200
        assert (dataset.domain[members] == i).all()


def test_federation_by_label(dataset: Dataset) -> None:
    federation = federate(dataset, PARTITIONS["pathological"](clients=8, classes_per_client=2), seed=0)
    assert [len(np.unique(dataset.labels[site.train])) for site in federation.sites] == [2] * 8
    skewed = federate(dataset, PARTITIONS["dirichlet"](clients=6, alpha=0.1), seed=0)
    assert sum(len(site.train) + len(site.val) + len(site.test) for site in skewed.sites) == 9600
