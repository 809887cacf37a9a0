"""Whatever decodes images for a pre-trained backbone decodes them as it was published."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers import DeiTImageProcessorPil, ViTConfig, ViTModel

import promptfed
import site_folders
from promptfed import models
from promptfed.data import DatasetConfig, load
from promptfed.data.images import Resize
from promptfed.errors import UserError
from promptfed.flower.site import SiteFolder
from promptfed.runs import build, dryrun
from promptfed.runs import config as C
from promptfed.runs.opened import reading
from promptfed.serving import joining

PROCESSOR = DeiTImageProcessorPil(size={"height": 20, "width": 20}, crop_size={"height": 16, "width": 16})
SIZES = [(60, 40), (33, 50), (41, 17), (16, 90), (9, 7)]  # width, height


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def backbone(tmp_path: Path) -> str:
    """A ViT that takes 16 x 16 pixels: both sides are scaled to 20, the centre is cropped."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    folder = tmp_path / "vit"
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8), add_pooling_layer=False).save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of photos of unequal sizes."""
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i, (width, height) in enumerate(SIZES * 2):
            part = Image.fromarray(photo[100 + 10 * i :, 30 * i :][:height, :width])
            part.save(tmp_path / "photos" / name / f"{i:02}.png")
    return tmp_path / "photos"


def expected(photos: Path, processor: DeiTImageProcessorPil = PROCESSOR) -> np.ndarray:
    """(N, 3, 16, 16), by `transformers`."""
    opened = [Image.open(file) for file in sorted(photos.rglob("*.png"))]
    made = processor(opened, return_tensors="np", do_rescale=False, do_normalize=False)
    return made["pixel_values"].astype(np.uint8)


def settings(backbone: str, photos: Path) -> dict:
    return {
        "method": "head-tune",
        "backbone": backbone,
        "dataset": str(photos),
        "partition": {"name": "iid", "clients": 2},
        "rounds": 1,
        "engine": {"workers": 1},
    }


def test_images_of_unequal_size_get_the_size_and_the_pixels_of_the_backbone(backbone: str, photos: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.size must be set"):
        load(DatasetConfig(name=str(photos)))
    config = C.make(settings(backbone, photos))
    assert np.array_equal(build.split(config).dataset.images, expected(photos))
    assert np.array_equal(dryrun.placeholder(config.dataset, backbone).images, expected(photos))
    named = C.make(settings(backbone, photos), {"dataset": {"size": 16}})
    assert np.array_equal(build.split(named).dataset.images, expected(photos))


def test_another_size_is_preprocessed_in_the_same_way(backbone: str, photos: Path) -> None:
    parts = build.assemble(C.make(settings(backbone, photos), {"dataset": {"size": 32}}))
    twice = DeiTImageProcessorPil(size={"height": 40, "width": 40}, crop_size={"height": 32, "width": 32})
    assert np.array_equal(parts.federation.dataset.images, expected(photos, twice))
    assert parts.model.image == (3, 32, 32)
    assert parts.model.resize == Resize((32, 32), "squash", 40, "bicubic")


def test_a_size_that_patches_do_not_divide_is_refused(backbone: str, photos: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.size: backbone .* sides that are multiples of 8, got 30x30"):
        build.assemble(C.make(settings(backbone, photos), {"dataset": {"size": 30}}))


def test_without_a_pre_trained_backbone_images_are_fitted(photos: Path) -> None:
    assert models.resize("cnn") is None
    made = build.split(C.make(settings("cnn", photos), {"dataset": {"size": 16}})).dataset.images
    assert np.array_equal(made, load(DatasetConfig(name=str(photos), size=16)).images)
    assert not np.array_equal(made, expected(photos))


@pytest.mark.parametrize(
    "change", [{"mode": "shortest"}, {"scaled": 18}, {"interpolation": "bilinear"}, {"size": (14, 14)}]
)
def test_the_cache_tells_preprocessings_apart(backbone: str, photos: Path, change: dict) -> None:
    published = models.resize(backbone)
    assert published == Resize((16, 16), "squash", 20, "bicubic")
    config = DatasetConfig(name=str(photos))
    path = load(config, published).path
    assert load(config, published).path == path
    other = load(config, Resize(**vars(published) | change))
    assert other.path != path
    assert not np.array_equal(other.images, load(config, published).images)


def test_the_embedded_pictures_stay_as_they_are() -> None:
    few = DatasetConfig(name="shapes", limit=16)
    assert np.array_equal(load(few, models.resize("clip-mini")).images, load(few).images)


@pytest.mark.parametrize("side", [16, 24])
def test_predictions_and_joining_sites_see_the_same_pixels(
    backbone: str, photos: Path, tmp_path: Path, side: int
) -> None:
    sized = {"dataset": {"name": str(photos), "size": side}}
    run = promptfed.run(**settings(backbone, photos) | sized, out=tmp_path / "run").folder
    files = sorted(photos.rglob("*.png"))
    scaled = side * 20 // 16
    processor = DeiTImageProcessorPil(
        size={"height": scaled, "width": scaled}, crop_size={"height": side, "width": side}
    )
    for model in (promptfed.load(run), promptfed.load(promptfed.export(run, tmp_path / "one.safetensors"))):
        wanted = model.predict(expected(photos, processor)).probabilities
        assert np.array_equal(model.predict(files).probabilities, wanted)
    card = json.loads((tmp_path / "one.json").read_text())["preprocessing"]
    assert card["mode"] == "squash"
    assert (card["scaled"], card["interpolation"]) == (scaled, "bicubic")
    with reading(run) as held:
        joined, skipped = joining._dataset(held, photos, tmp_path / "joined")
    assert not skipped
    assert np.array_equal(joined.images, expected(photos, processor))


def test_a_site_of_a_consortium_sees_the_same_pixels(backbone: str, tmp_path: Path) -> None:
    server, _ = site_folders.consortium(tmp_path, **{"backbone.name": backbone, "dataset.size": 16})
    site = SiteFolder.open(site_folders.site(server, tmp_path, 1))
    assert np.array_equal(site.dataset().images, expected(tmp_path / "images1"))
