"""Preprocessing against the image processors of `transformers`, and from each layout's settings."""

import math

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers import CLIPImageProcessorPil, DeiTImageProcessorPil, ViTImageProcessorPil

from promptfed.data.images import Resize, pixels
from promptfed.errors import UserError
from promptfed.models.pretrained.preprocess import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Preprocess,
    from_open_clip,
    from_timm,
    from_transformers,
)

PHOTOS = [Image.fromarray(photo) for photo in load_sample_images().images]  # 640 x 427
# width, height: as they are, wide, tall, odd margins on either side, smaller than the crop, a few pixels
SHAPES = [(640, 427), (640, 90), (101, 427), (333, 250), (227, 225), (150, 213), (9, 7), (256, 256)]


def photos(width: int, height: int) -> list[Image.Image]:
    return [photo.crop((40, 0, 40 + width, height)) for photo in PHOTOS]


def assert_same(found: Preprocess, photo: Image.Image, expected: np.ndarray) -> None:
    made = pixels(photo, 3, found.resize)
    assert made.shape == expected.shape == (3, 224, 224)
    assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("processor", "clip", "settings"),
    [
        (CLIPImageProcessorPil, True, {}),
        (CLIPImageProcessorPil, True, {"size": {"shortest_edge": 256}, "resample": 2}),
        (ViTImageProcessorPil, False, {}),
        (ViTImageProcessorPil, False, {"resample": 3}),
        (DeiTImageProcessorPil, False, {}),
    ],
)
def test_pixels_equal_those_of_transformers(
    processor: type, clip: bool, settings: dict, shape: tuple[int, int]
) -> None:
    theirs = processor(**settings)
    found = from_transformers(theirs.to_dict(), 224, clip, "x")
    for photo in photos(*shape):
        raw = theirs(photo, return_tensors="np", do_rescale=False, do_normalize=False)["pixel_values"][0]
        assert_same(found, photo, raw)
        assert found.mean == pytest.approx(theirs.image_mean)
        assert found.std == pytest.approx(theirs.image_std)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("crop", "kind", "filter"), [(0.9, "bicubic", 3), (0.875, "bilinear", 2), (1.0, "bicubic", 3)])
def test_pixels_equal_those_of_timm(crop: float, kind: str, filter: int, shape: tuple[int, int]) -> None:
    """Written out: the shorter side becomes 224 / crop_pct; the centre is cropped, half pixels rounded to even."""
    found = from_timm({"crop_pct": crop, "interpolation": kind}, 224, "x")
    for photo in photos(*shape):
        shorter, side = min(photo.size), math.floor(224 / crop)
        scaled = photo.resize(tuple(int(side * length / shorter) for length in photo.size), filter)
        left, top = (round((length - 224) / 2) for length in scaled.size)
        expected = np.asarray(scaled)[top : top + 224, left : left + 224].transpose(2, 0, 1)
        assert_same(found, photo, expected)


def test_the_reference_photos_tell_the_transforms_apart() -> None:
    """Otherwise equal pixels would prove nothing."""
    published = [
        from_transformers({}, 224, True, "x"),
        from_transformers({}, 224, False, "x"),
        from_transformers({"size": 256, "do_center_crop": True, "resample": 3}, 224, False, "x"),
        from_timm({}, 224, "x"),
    ]
    made = [pixels(PHOTOS[0], 3, resize).astype(int) for resize in [Resize((224, 224)), *(p.resize for p in published)]]
    for i, one in enumerate(made):
        assert all(np.abs(one - other).max() > 20 for other in made[:i])


@pytest.mark.parametrize("mode", ["fit", "shortest", "squash"])
def test_images_of_the_right_size_are_left_alone(mode: str) -> None:
    photo = photos(224, 224)[0]
    assert np.array_equal(pixels(photo, 3, Resize((224, 224), mode, 248)), np.asarray(photo).transpose(2, 0, 1))


def preprocess(
    side: int, mode: str, scaled: int, kind: str, mean: tuple, std: tuple, crop: str = "floor"
) -> Preprocess:
    return Preprocess(Resize((side, side), mode, scaled, kind, crop), mean, std)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # openai/clip-vit-base-patch16, in its older and its newer form
        (
            from_transformers({"size": 224, "crop_size": 224, "resample": 3}, 224, True, "x"),
            preprocess(224, "shortest", 224, "bicubic", CLIP_MEAN, CLIP_STD),
        ),
        (
            from_transformers(
                {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "image_mean": [0.1] * 3},
                224,
                True,
                "x",
            ),
            preprocess(224, "shortest", 256, "bicubic", (0.1, 0.1, 0.1), CLIP_STD),
        ),
        # google/vit-base-patch16-224-in21k
        (
            from_transformers({"size": 224, "resample": 2, "image_std": [0.5] * 3}, 224, False, "x"),
            preprocess(224, "squash", 224, "bilinear", HALF, HALF),
        ),
        (
            from_transformers({"size": {"height": 224, "width": 224}}, 224, False, "x"),
            preprocess(224, "squash", 224, "bilinear", HALF, HALF),
        ),
        # facebook/deit-base-distilled-patch16-224
        (
            from_transformers({"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3}, 224, False, "x"),
            preprocess(224, "squash", 256, "bicubic", HALF, HALF),
        ),
        (from_transformers({}, 32, True, "x"), preprocess(32, "shortest", 32, "bicubic", CLIP_MEAN, CLIP_STD)),
        # timm/vit_base_patch16_224.augreg_in21k
        (
            from_timm({"crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}, 224, "x"),
            preprocess(224, "shortest", 248, "bicubic", HALF, HALF, "round"),
        ),
        # timm/resnet50_clip.openai
        (
            from_open_clip({"mean": list(CLIP_MEAN), "std": list(CLIP_STD)}, 224, "x"),
            preprocess(224, "shortest", 224, "bicubic", CLIP_MEAN, CLIP_STD, "round"),
        ),
        (
            from_open_clip({"resize_mode": "squash", "interpolation": "bilinear"}, 224, "x"),
            preprocess(224, "squash", 224, "bilinear", CLIP_MEAN, CLIP_STD, "round"),
        ),
    ],
)
def test_published_settings(made: Preprocess, expected: Preprocess) -> None:
    assert made == expected


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"resample = 0 is not bilinear \(2\) or bicubic \(3\)"):
        from_transformers({"resample": 0}, 224, True, "x")
    with pytest.raises(UserError, match="takes 224x224 pixels, but its preprocessing makes 336x336"):
        from_transformers({"size": {"shortest_edge": 336}, "crop_size": 336}, 224, True, "x")
    with pytest.raises(
        UserError, match=r"size = \{'longest_edge': 224\} of its preprocessing must be shortest_edge, or"
    ):
        from_transformers({"size": {"longest_edge": 224}}, 224, False, "x")
    with pytest.raises(UserError, match='interpolation = "random" is not'):
        from_timm({"interpolation": "random"}, 224, "x")
    with pytest.raises(UserError, match=r"size = .* must be shortest_edge, or height and width of equal length"):
        from_transformers({"size": {"height": 224, "width": 256}}, 224, False, "x")
    with pytest.raises(UserError, match='crop_mode = "border" is not'):
        from_timm({"crop_mode": "border"}, 224, "x")
    with pytest.raises(UserError, match='resize_mode = "longest" is not'):
        from_open_clip({"resize_mode": "longest"}, 224, "x")
    with pytest.raises(UserError, match="no mean and std of 3 channels"):
        from_open_clip({"std": [1.0]}, 224, "x")
