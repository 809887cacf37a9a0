"""Preprocessing against Pillow, and from each layout's settings."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

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


def pictures(height: int, width: int, channels: int = 3, n: int = 2) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, height, width), generator=g, dtype=torch.uint8)


def pillow(x: Tensor, size: tuple[int, int], kind: int) -> Tensor:
    made = [Image.fromarray(i.permute(1, 2, 0).numpy()).resize(size[::-1], kind) for i in x]
    return torch.stack([torch.from_numpy(np.array(i)).permute(2, 0, 1) for i in made])


@pytest.mark.parametrize(("interpolation", "kind"), [("bicubic", 3), ("bilinear", 2)])
@pytest.mark.parametrize("side", [20, 48, 70])
def test_stretching_equals_pillow_to_a_gray_level(interpolation: str, kind: int, side: int) -> None:
    x = pictures(side, side)
    made = Preprocess((48, 48), None, interpolation, HALF, HALF).resize(x)
    assert made.dtype == torch.uint8
    assert (made.int() - pillow(x, (48, 48), kind).int()).abs().max() <= 1


@pytest.mark.parametrize("size", [(50, 40), (40, 50), (41, 40), (33, 99)])
def test_the_shorter_side_is_scaled_and_the_middle_cut_out(size: tuple[int, int]) -> None:
    x = pictures(*size)
    made = Preprocess((32, 32), 36, "bilinear", HALF, HALF).resize(x)
    height, width = (int(36 * side / min(size)) for side in size)
    top, left = (height - 32) // 2, (width - 32) // 2
    expected = pillow(x, (height, width), 2)[:, :, top : top + 32, left : left + 32]
    assert made.shape == (2, 3, 32, 32)
    assert (made.int() - expected.int()).abs().max() <= 2  # Pillow takes columns first where that is less work


def test_images_of_the_right_size_are_left_alone() -> None:
    x = pictures(32, 32)
    for shortest in (None, 32):
        assert torch.equal(Preprocess((32, 32), shortest, "bicubic", HALF, HALF).resize(x), x)


def test_normalising() -> None:
    x = pictures(8, 8)
    made = Preprocess((8, 8), None, "bicubic", CLIP_MEAN, CLIP_STD)(x)
    for channel in range(3):
        expected = (x[:, channel] / 255 - CLIP_MEAN[channel]) / CLIP_STD[channel]
        torch.testing.assert_close(made[:, channel], expected, rtol=0, atol=1e-6)


def test_gray_images_get_three_channels() -> None:
    x = pictures(8, 8, channels=1)
    made = Preprocess((8, 8), None, "bicubic", HALF, HALF)(x)
    assert made.shape == (2, 3, 8, 8)
    torch.testing.assert_close(made[:, 2], x[:, 0] / 127.5 - 1)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        # openai/clip-vit-base-patch16, in its older and its newer form
        (
            from_transformers({"size": 224, "crop_size": 224, "resample": 3}, 224, True, "x"),
            Preprocess((224, 224), 224, "bicubic", CLIP_MEAN, CLIP_STD),
        ),
        (
            from_transformers(
                {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "image_mean": [0.1] * 3},
                224,
                True,
                "x",
            ),
            Preprocess((224, 224), 256, "bicubic", (0.1, 0.1, 0.1), CLIP_STD),
        ),
        # google/vit-base-patch16-224-in21k
        (
            from_transformers({"size": 224, "resample": 2, "image_std": [0.5] * 3}, 224, False, "x"),
            Preprocess((224, 224), None, "bilinear", HALF, HALF),
        ),
        (
            from_transformers({"size": {"height": 224, "width": 224}}, 224, False, "x"),
            Preprocess((224, 224), None, "bilinear", HALF, HALF),
        ),
        (from_transformers({}, 32, True, "x"), Preprocess((32, 32), 32, "bicubic", CLIP_MEAN, CLIP_STD)),
        # timm/vit_base_patch16_224.augreg_in21k
        (
            from_timm({"crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}, 224, "x"),
            Preprocess((224, 224), 248, "bicubic", HALF, HALF),
        ),
        # timm/resnet50_clip.openai
        (
            from_open_clip({"mean": list(CLIP_MEAN), "std": list(CLIP_STD)}, 224, "x"),
            Preprocess((224, 224), 224, "bicubic", CLIP_MEAN, CLIP_STD),
        ),
        (
            from_open_clip({"resize_mode": "squash", "interpolation": "bilinear"}, 224, "x"),
            Preprocess((224, 224), None, "bilinear", CLIP_MEAN, CLIP_STD),
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
    with pytest.raises(UserError, match=r"takes 224x224 pixels, but its preprocessing makes 0x0$"):
        from_transformers({"size": {"longest_edge": 224}}, 224, False, "x")
    with pytest.raises(UserError, match='interpolation = "random" is not'):
        from_timm({"interpolation": "random"}, 224, "x")
    with pytest.raises(UserError, match='resize_mode = "longest" is not'):
        from_open_clip({"resize_mode": "longest"}, 224, "x")
    with pytest.raises(UserError, match="no mean and std of 3 channels"):
        from_open_clip({"std": [1.0]}, 224, "x")
