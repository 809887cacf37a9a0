"""Dual encoders, DINOv2 and DeiT, and images of other sizes: outputs against `transformers`."""

import json
from pathlib import Path

import pytest
import torch
from published import LENGTH, VIT, random, settle, timm_vit, write, write_tokenizer
from safetensors.torch import load_file, save_file
from test_load import CLASSES, SENTENCES, images
from torch import Tensor
from transformers import (
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    PreTrainedModel,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
)

from promptfed.data.images import Resize
from promptfed.errors import UserError
from promptfed.models import CLIP, ViT, build, image_vit
from promptfed.models.pretrained.known import KNOWN, fresh
from promptfed.models.pretrained.load import load
from promptfed.models.pretrained.preprocess import IMAGENET_MEAN, IMAGENET_STD
from promptfed.params import numel

SIZES = {"image_size": 16, "patch_size": 4}
DINO = {name: size for name, size in VIT.items() if name != "intermediate_size"}


def save(model: PreTrainedModel, folder: Path, **preprocessor: object) -> PreTrainedModel:
    """With weights of order one, so that every part matters."""
    settle(model)
    model.save_pretrained(folder)
    if preprocessor:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return model.eval()


# ---- dual encoders


def vision(kind: str) -> PreTrainedModel:
    if kind == "clip":
        return CLIPVisionModel(CLIPVisionConfig(**VIT, **SIZES))
    if kind == "dinov2":
        return Dinov2Model(Dinov2Config(**DINO, **SIZES))
    return ViTModel(ViTConfig(**VIT, **SIZES, layer_norm_eps=0.01, pooler_act=kind))


def dual(kind: str, folder: Path) -> PreTrainedModel:
    """The towers differ in activation and in the epsilon of their norms."""
    torch.manual_seed(0)
    tokens = write_tokenizer(folder)
    text = CLIPTextConfig(
        **VIT | {"hidden_size": 32, "num_hidden_layers": 2},
        layer_norm_eps=0.1,
        max_position_embeddings=LENGTH,
        vocab_size=tokens,
        bos_token_id=tokens - 2,
        eos_token_id=tokens - 1,
    )
    model = VisionTextDualEncoderModel(None, vision(kind), CLIPTextModel(text))
    return save(model, folder, size={"shortest_edge": 16}, crop_size=16, image_mean=[0.4] * 3)


@pytest.mark.parametrize("kind", ["tanh", "linear", "dinov2", "clip"])
def test_dual_encoder(kind: str, tmp_path: Path) -> None:
    theirs = dual(kind, tmp_path)
    model = build(str(tmp_path), (3, 16, 16), 3, 0, CLASSES)
    assert isinstance(model, CLIP)
    assert model.preprocess is not None
    assert model.preprocess.mean == (0.4, 0.4, 0.4)
    assert isinstance(model.image_tower, ViT)
    activations = model.image_tower.activation, model.text_tower.activation
    assert activations == ("quick_gelu" if kind == "clip" else "gelu", "quick_gelu")
    words = CLIPTokenizer.from_pretrained(tmp_path)(
        SENTENCES, padding="max_length", max_length=LENGTH, return_tensors="pt"
    )
    x = images(16)
    with torch.no_grad():
        expected = theirs(**words, pixel_values=x)
    w = model.weights
    image = model.features(w, x)
    assert (image - expected.image_embeds).abs().max() < 1e-5
    assert (model.zero_shot(w) - expected.text_embeds).abs().max() < 1e-5
    assert (model.classify(w, image) - expected.logits_per_image).abs().max() < 1e-4
    unused = 24 if kind == "dinov2" else 0  # its mask token
    assert numel(w) == sum(p.numel() for p in theirs.parameters()) - unused


@pytest.mark.parametrize("kind", ["tanh", "clip"])
def test_image_tower_of_a_dual_encoder(kind: str, tmp_path: Path) -> None:
    theirs = dual(kind, tmp_path)
    model = load(str(tmp_path), 3, 0)
    assert isinstance(model, CLIP)
    tower = image_vit(model, 5, 0, "tower")
    with torch.no_grad():
        found = theirs.vision_model(images(16))
    cls = found.pooler_output if kind == "clip" else found.last_hidden_state[:, 0]
    assert (tower.features(tower.weights, images(16)) - cls).abs().max() < 1e-5
    assert not [name for name in tower.weights if "pooler" in name]


@pytest.mark.parametrize("kind", ["tanh", "clip"])
def test_dual_encoder_of_older_versions(kind: str, tmp_path: Path) -> None:
    """CLIP's towers were models inside models."""
    dual(kind, tmp_path)
    expected = load(str(tmp_path), 3, 0, CLASSES)
    nested = ("text_model.", "vision_model.") if kind == "clip" else ("text_model.",)
    file = tmp_path / "model.safetensors"
    tensors = {n.split(".")[0] + "." + n if n.startswith(nested) else n: p for n, p in load_file(file).items()}
    save_file(tensors, file)
    model = load(str(tmp_path), 3, 0, CLASSES)
    assert "text_model.text_model.final_layer_norm.weight" in tensors
    assert model.weights.keys() == expected.weights.keys()
    assert all(torch.equal(p, model.weights[name]) for name, p in expected.weights.items())


def test_a_dual_encoder_needs_its_pooler(tmp_path: Path) -> None:
    dual("tanh", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: p for name, p in load_file(file).items() if "pooler" not in name}, file)
    with pytest.raises(UserError, match=r'"vision_model\.pooler\.dense\.weight" is missing in its weights'):
        load(str(tmp_path), 3, 0)


# ---- DINOv2 and DeiT

# Positions for 28 x 28 pixels, as those of 518 x 518 in the hub's files, and a preprocessing that makes 16 x 16.
CROP = {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}, "resample": 3}


@pytest.mark.parametrize("kind", [Dinov2Model, Dinov2ForImageClassification])
@pytest.mark.parametrize("side", [16, 28, 40])
def test_dinov2(kind: type[PreTrainedModel], side: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = save(kind(Dinov2Config(**DINO, image_size=28, patch_size=4)), tmp_path, **CROP)
    published = load(str(tmp_path), 7, 0)
    assert published.image == (3, 16, 16)
    assert published.resize == Resize((16, 16), "shortest", 20, "bicubic")
    model = build(str(tmp_path), (3, side, side), 7, 0)
    assert isinstance(model, ViT)
    x = images(side)
    with torch.no_grad():
        inner = theirs if kind is Dinov2Model else theirs.dinov2
        expected = inner(x, output_hidden_states=True)
    w = model.weights
    h = model.embed(w, x)
    for i, state in enumerate(expected.hidden_states[: model.depth]):
        assert (model.encode(w, h, stop=i) - state).abs().max() < 1e-5
    assert (model.features(w, x) - expected.pooler_output).abs().max() < 1e-5


def test_layer_scale_in_timms_layout(tmp_path: Path) -> None:
    """As in timm's DINOv2. Written out: a scaled branch is one whose last linear map is scaled."""
    shapes = timm_vit(width=64, depth=2, hidden=96, side=8, patch=4, classes=2)
    scales = {f"blocks.{i}.ls{n}.gamma": (64,) for i in range(2) for n in (1, 2)}
    w = random({**shapes, **scales})
    plain = {name: p for name, p in w.items() if "gamma" not in name}
    for i in range(2):
        for scale, branch in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            gamma = w[f"blocks.{i}.{scale}.gamma"]
            plain[f"blocks.{i}.{branch}.weight"] = gamma[:, None] * w[f"blocks.{i}.{branch}.weight"]
            plain[f"blocks.{i}.{branch}.bias"] = gamma * w[f"blocks.{i}.{branch}.bias"]
    found, expected = (load(str(write(tmp_path / name, p)), 2, 0) for name, p in (("ls", w), ("plain", plain)))
    x = images(8)
    assert (found.features(found.weights, x) - expected.features(expected.weights, x)).abs().max() < 1e-5
    assert numel(found.weights) == numel(expected.weights) + 4 * 64


# Published counts of parameters without a head, the mask token of DINOv2 included.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("facebook/deit-tiny-patch16-224", 5_524_416),
        ("facebook/deit-small-patch16-224", 21_665_664),
        ("facebook/deit-base-patch16-224", 85_798_656),
        ("facebook/dinov2-small", 22_056_576),
        ("facebook/dinov2-base", 86_580_480),
    ],
)
def test_known_models_have_the_published_sizes(name: str, count: int) -> None:
    shape = KNOWN[name]
    dino, width = "dinov2" in name, shape.tower.width
    config = {"hidden_size": width, "num_attention_heads": width // 64}
    with torch.device("meta"):
        theirs = (
            Dinov2Model(Dinov2Config(**config, image_size=518))
            if dino
            else ViTModel(ViTConfig(**config, intermediate_size=4 * width), add_pooling_layer=False)
        )
    assert sum(p.numel() for p in theirs.parameters()) == count
    model = fresh(name, 10, [])
    positions = (518 // 14) ** 2 - (224 // 14) ** 2 if dino else 0  # those between which is interpolated
    assert numel(model.weights) - 10 * (width + 1) == count - dino * width - positions * width
    assert model.image == (3, 224, 224)
    assert model.resize == Resize((224, 224), "shortest" if dino else "squash", 256, "bicubic")
    assert model.preprocess is not None
    assert (model.preprocess.mean, model.preprocess.std) == (IMAGENET_MEAN, IMAGENET_STD)


# ---- images of another size than published


@pytest.mark.parametrize("side", [8, 12, 16, 20, 36])
def test_vit_at_another_size(side: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = save(ViTModel(ViTConfig(**VIT, **SIZES)), tmp_path)
    model = build(str(tmp_path), (3, side, side), 7, 0)
    x = images(side)
    with torch.no_grad():
        expected = theirs(x, interpolate_pos_encoding=True).last_hidden_state[:, 0]
    assert (model.features(model.weights, x) - expected).abs().max() < 1e-5
    assert model.image == (3, side, side)
    assert model.resize.size == (side, side)


@pytest.mark.parametrize("side", [8, 24, 40])
def test_clip_at_another_size(side: int, clip_folder: Path) -> None:
    theirs = CLIPModel.from_pretrained(clip_folder).eval()
    model = build(str(clip_folder), (3, side, side), 3, 0, CLASSES)
    x = images(side)
    with torch.no_grad():
        expected = theirs.get_image_features(x, interpolate_pos_encoding=True).pooler_output
    expected = torch.nn.functional.normalize(expected, dim=-1)
    assert (model.features(model.weights, x) - expected).abs().max() < 1e-5
    assert model.resize == Resize((side, side), "shortest", side, "bilinear")


def test_dual_encoder_at_another_size(tmp_path: Path) -> None:
    theirs = dual("tanh", tmp_path)
    model = build(str(tmp_path), (3, 24, 24), 3, 0, CLASSES)
    with torch.no_grad():
        expected = theirs.get_image_features(images(24), interpolate_pos_encoding=True).pooler_output
    expected = torch.nn.functional.normalize(expected, dim=-1)
    assert (model.features(model.weights, images(24)) - expected).abs().max() < 1e-5


def test_published_positions_are_not_touched_at_the_published_size(tmp_path: Path) -> None:
    w = random(timm_vit(width=64, depth=1, hidden=64, side=16, patch=4, classes=2))
    write(tmp_path, w)
    assert torch.equal(build(str(tmp_path), (3, 16, 16), 2, 0).weights["body.position"], w["pos_embed"])
    at = build(str(tmp_path), (3, 24, 24), 2, 0).weights["body.position"]
    assert at.shape == (1, 37, 64)
    assert torch.equal(at[:, 0], w["pos_embed"][:, 0])


def test_prompt_tokens_at_another_size(tmp_path: Path) -> None:
    """Deep prompts replace those before them and leave all patches of the larger grid."""
    torch.manual_seed(0)
    save(ViTModel(ViTConfig(**VIT, **SIZES)), tmp_path)
    model = build(str(tmp_path), (3, 24, 24), 2, 0)
    assert isinstance(model, ViT)
    prompts: dict[int, Tensor] = {i: torch.randn(3, 24) for i in range(2)}
    w = model.weights
    assert model.encode(w, model.embed(w, images(24)), prompts).shape == (2, 1 + 3 + 36, 24)


def test_the_documentation_names_the_known_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-a-backbone.md").read_text()
    assert all(f"`{name}`" in page for name in KNOWN)
