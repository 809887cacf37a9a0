"""Views of images: what is drawn, and what becomes of the pixels."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed import UserError
from promptfed.data import Dataset, DatasetConfig, load
from promptfed.data.augment import AREA, RATIO, Augment, FixedViews, configured
from promptfed.runs.config import make
from promptfed.seeding import rng

WHOLE, MIRRORED = [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]
CROP = Augment("crop+flip")


def images(n=3, height=8, width=8):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, height, width)).astype(np.uint8))


def views(*rows):
    return np.array(rows, np.float32)


@pytest.mark.parametrize("size", [(32, 32), (28, 32)])
def test_crops_lie_inside_the_image_and_have_the_stated_areas_and_ratios(size):
    left, top, w, h, mirrored = CROP.draw(20_000, size, rng(0)).T
    assert min(left.min(), top.min()) >= 0
    assert max((left + w).max(), (top + h).max()) <= 1 + 1e-6
    assert AREA[0] <= (w * h).min() < 0.09
    assert 0.95 < (w * h).max() <= AREA[1] + 1e-6
    ratio = w * size[1] / (h * size[0])
    assert RATIO[0] - 1e-4 <= ratio.min() < 0.77
    assert 1.3 < ratio.max() <= RATIO[1] + 1e-4
    assert mirrored.mean() == pytest.approx(0.5, abs=0.02)
    assert left[w < 0.9].std() > 0.1  # they are all over the image


def test_areas_are_uniform_among_crops_that_fit():
    """A square crop of area a fits whatever its ratio up to a = 3/4, above with probability log(1/a) / log(4/3)."""
    a = np.linspace(*AREA, 10_001)
    density = np.minimum(1, np.log(1 / a) / np.log(4 / 3))
    expected = (a * density).sum() / density.sum()
    _, _, w, h, _ = CROP.draw(200_000, (16, 16), rng(1)).T
    assert (w * h).mean() == pytest.approx(expected, abs=2e-3)
    assert expected < np.mean(AREA) - 0.05  # far from what it would be if all of them fitted


def test_in_a_very_long_image_a_crop_is_cut_at_the_border():
    left, top, w, h, _ = CROP.draw(1000, (4, 400), rng(0)).T
    assert max(w.max(), h.max()) <= 1
    assert max((left + w).max(), (top + h).max()) <= 1 + 1e-6


def test_a_flip_mirrors_columns_and_changes_nothing_else():
    x = images(2)
    for kind in ("flip", "crop+flip"):
        same, mirrored = Augment(kind)(x, views(WHOLE, MIRRORED), "bilinear")
        torch.testing.assert_close(same, x[0].float(), atol=1e-3, rtol=0)
        torch.testing.assert_close(mirrored, x[1][:, :, range(7, -1, -1)].float(), atol=1e-3, rtol=0)
    drawn = Augment("flip").draw(1000, (8, 8), rng(0))
    assert Counter(map(tuple, drawn.tolist())).keys() == {tuple(WHOLE), tuple(MIRRORED)}
    assert drawn[:, 4].mean() == pytest.approx(0.5, abs=0.05)


def test_a_crop_is_what_pillow_makes_of_it():
    x = images(40, 12, 20)
    drawn = CROP.draw(40, (12, 20), rng(2))
    found = CROP(x, drawn, "bilinear")
    for i, (left, top, w, h, mirrored) in enumerate(drawn.astype(float)):
        box = (left * 20, top * 12, min((left + w) * 20, 20), min((top + h) * 12, 12))
        picture = Image.fromarray(x[i].permute(1, 2, 0).numpy()).resize((20, 12), Image.Resampling.BILINEAR, box=box)
        expected = np.asarray(picture)[:, ::-1] if mirrored else np.asarray(picture)
        assert np.abs(found[i].permute(1, 2, 0).numpy() - expected).max() < 1.5  # Pillow rounds twice


def test_bicubic_crops_keep_the_range_of_pixels():
    found = CROP(images(50), CROP.draw(50, (8, 8), rng(3)), "bicubic")
    assert found.min() == 0
    assert found.max() == 255


def test_a_view_does_not_depend_on_its_batch():
    x, drawn = images(9), CROP.draw(9, (8, 8), rng(4))
    whole = CROP(x, drawn, "bicubic")
    assert all(torch.equal(CROP(x[i : i + 1], drawn[i : i + 1], "bicubic")[0], whole[i]) for i in range(9))


@pytest.fixture
def data(tmp_path):
    return Dataset.from_arrays("noise", images(6).numpy(), np.arange(6) % 2, ("a", "b"), path=tmp_path / "data")


def test_fixed_views_are_the_same_for_everyone_and_every_second_one_is_mirrored(data):
    def fixed(augment):
        return FixedViews(augment, data, "bilinear", torch.device("cpu"))

    two = fixed(Augment("flip", 2))
    assert len(two) == 12
    third = torch.from_numpy(data.images[3].copy())
    assert torch.equal(two(np.array([6, 7])), torch.stack([third, third.flip(2)]).float())
    some, again = fixed(Augment("crop+flip", 8)), fixed(Augment("crop+flip", 8))
    numbers = np.array([40, 3, 17])
    assert torch.equal(some(numbers), again(numbers))
    assert len({view.numpy().tobytes() for view in some(np.arange(8))}) == 8
    assert some._table[:, 4].tolist() == [0, 1] * 24
    assert some.key != two.key


def test_it_says_what_is_cached():
    assert CROP.sentence("features", None).endswith(
        "a new view of each training image; the features are cached for evaluation only"
    )
    assert CROP.sentence("", "all weights are trained").endswith("; nothing is cached: all weights are trained")
    assert "one of 2 fixed views" in Augment("flip", 2).sentence("features", None)


# ---- settings


def test_settings():
    assert configured(DatasetConfig()) is None
    assert configured(DatasetConfig(augment="crop+flip", views=8)) == Augment("crop+flip", 8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"views": 8}, r'dataset.views = 8 needs dataset.augment to be "flip" or "crop\+flip"'),
        (
            {"augment": "flip", "views": 3},
            r'dataset.views = 3: dataset.augment = "flip" has 2 views \(allowed: 0 or 2\)',
        ),
    ],
)
def test_views_that_make_no_sense_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        make({"dataset": given})


def test_images_are_decoded_once_whatever_their_views(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path))
    plain, varied = ({"name": "digits", "limit": 20}, {"name": "digits", "limit": 20, "augment": "flip", "views": 2})
    assert load(DatasetConfig(**plain)).path == load(DatasetConfig(**varied)).path
