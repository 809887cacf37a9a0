"""The published models at their full size: parameter counts, and outputs equal to `transformers`'."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from published import Shapes, open_clip_resnet, open_clip_text, open_clip_vit, settle, timm_vit, write_tokenizer
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, ViTConfig, ViTModel

from promptfed.models import CLIP, build
from promptfed.models.pretrained import layouts
from promptfed.models.pretrained.layouts import Weight
from promptfed.models.pretrained.shapes import ClipShape, Convolutions, Patches, Text, Transformer, VitShape
from promptfed.params import numel

VISION = Transformer(12, 768, 12, 3072, 1e-5, "quick_gelu")
WORDS = Transformer(12, 512, 8, 2048, 1e-5, "quick_gelu")
TEXT = Text(49408, 77)


def ours(entries: Iterable[Weight]) -> int:
    """Parameters of the model that a layout becomes, without any memory for them."""
    made = {e.ours: e.make(*(torch.empty(e.shape, device="meta") for _ in e.theirs)) for e in entries}
    return numel(made)


def theirs(shapes: Shapes) -> int:
    """Parameters in a published file; statistics of batch norm are none."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(statistics))


def names(entries: Iterable[Weight]) -> Shapes:
    return {name: e.shape for e in entries for name in e.theirs}


@pytest.mark.parametrize(("patch", "count"), [(16, 149_620_737), (32, 151_277_313)])
def test_clip_vit_b(patch: int, count: int) -> None:
    shapes = open_clip_vit(768, 12, 224, patch, 512) | open_clip_text(512, 12, 49408, 77, 512)
    assert theirs(shapes) == count
    shape = ClipShape(Patches(224, patch), VISION, TEXT, WORDS, 512)
    assert ours(layouts.clip_open_clip(shape)) == count
    assert names(layouts.clip_open_clip(shape)) == shapes
    assert ours(layouts.clip_transformers(shape)) == count
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig(vision_config={"patch_size": patch}))
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert names(layouts.clip_transformers(shape)) == expected


def test_clip_rn50() -> None:
    shapes = open_clip_resnet(64, (3, 4, 6, 3), 224, 1024) | open_clip_text(512, 12, 49408, 77, 1024)
    assert theirs(shapes) == 102_007_137
    convolutions = Convolutions(224, (3, 4, 6, 3), 64)
    assert convolutions.heads == 32
    rn50 = ClipShape(convolutions, None, TEXT, WORDS, 1024)
    assert ours(layouts.clip_open_clip(rn50)) == 102_007_137
    found = names(layouts.clip_open_clip(rn50))
    assert found == {name: shape for name, shape in shapes.items() if not name.endswith("num_batches_tracked")}


def test_vit_b16_with_10_classes() -> None:
    head = 768 * 10 + 10
    shape = VitShape(Patches(224, 16), VISION)
    assert ours(layouts.vit_timm(shape)) + head == 85_806_346
    assert ours(layouts.vit_transformers(shape)) + head == 85_806_346
    shapes = timm_vit(768, 12, 3072, 224, 16, 21843)
    found = names(layouts.vit_timm(shape))
    assert found == {name: shape for name, shape in shapes.items() if not name.startswith("head.")}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own, which keeps the last three: these are hundreds of megabytes."""
    with TemporaryDirectory() as made:
        yield Path(made)


@pytest.mark.slow  # small ones are compared in every run of the suite
def test_vit_b16_equals_transformers(folder: Path) -> None:
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(), add_pooling_layer=False).eval()
    settle(model)
    model.save_pretrained(folder)
    own = build(str(folder), (3, 224, 224), 10, 0)
    assert numel(own.weights) == 85_806_346
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        expected = model(x).last_hidden_state[:, 0]
        assert (own.features(own.weights, x) - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_clip_vit_b16_equals_transformers(folder: Path) -> None:
    torch.manual_seed(0)
    tokens = write_tokenizer(folder)
    text = {"vocab_size": tokens, "bos_token_id": tokens - 2, "eos_token_id": tokens - 1}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={"patch_size": 16})).eval()
    settle(model)
    model.save_pretrained(folder)
    classes = ("dog", "school bus", "sunflowers", "red panda")
    own = build(str(folder), (3, 224, 224), 4, 0, classes)
    assert isinstance(own, CLIP)
    assert numel(own.weights) == 149_620_737 - (49408 - tokens) * 512
    x = torch.randn(2, 3, 224, 224)
    words = CLIPTokenizer.from_pretrained(folder)(
        [f"a photo of a {name}." for name in classes], padding="max_length", max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**words, pixel_values=x)
        image = own.features(own.weights, x)
        assert (image - expected.image_embeds).abs().max() < 1e-4
        assert (own.zero_shot(own.weights) - expected.text_embeds).abs().max() < 1e-4
        assert (own.classify(own.weights, image) - expected.logits_per_image).abs().max() < 1e-4
