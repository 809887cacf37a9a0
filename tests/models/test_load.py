"""Published layouts: outputs against `transformers`, or a plain forward pass where it has no such model."""

import json
from pathlib import Path

import pytest
import torch
from published import (
    LENGTH,
    VIT,
    open_clip_resnet,
    open_clip_text,
    open_clip_vit,
    random,
    settle,
    timm_vit,
    write,
    write_tokenizer,
)
from reference import Part, layer, norm
from safetensors.torch import load_file, save_file
from test_resnet import reference as resnet_reference
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer, ViTConfig, ViTForImageClassification, ViTModel

from promptfed.data.images import Resize
from promptfed.models import CLIP, ViT, build
from promptfed.models.pretrained.load import load

CLASSES = ("dog", "school bus", "sunflowers")
SENTENCES = [f"a photo of a {name}." for name in CLASSES]


def images(side: int, n: int = 2) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(3))


# ---- transformers


@pytest.mark.parametrize("kind", [ViTModel, ViTForImageClassification])
@pytest.mark.parametrize("settings", [{}, {"hidden_act": "quick_gelu", "layer_norm_eps": 0.1, "patch_size": 8}])
def test_vit_of_transformers(kind: type, settings: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = kind(ViTConfig(**VIT, **{"image_size": 16, "patch_size": 4, **settings})).eval()
    settle(theirs)
    theirs.save_pretrained(tmp_path)
    model = build(str(tmp_path), (3, 16, 16), 7, 5)
    assert isinstance(model, ViT)
    x = images(16)
    with torch.no_grad():
        inner = theirs if kind is ViTModel else theirs.vit
        expected = inner(x, output_hidden_states=True)
    w = model.weights
    h = model.embed(w, x)
    for i, state in enumerate(expected.hidden_states[: model.depth]):
        assert (model.encode(w, h, stop=i) - state).abs().max() < 1e-5
    assert (model.norm(w, model.encode(w, h)) - expected.last_hidden_state).abs().max() < 1e-5
    assert (model.features(w, x) - expected.last_hidden_state[:, 0]).abs().max() < 1e-5
    assert model.classify(w, model.features(w, x)).shape == (2, 7)


def test_clip_of_transformers(clip_folder: Path) -> None:
    theirs = CLIPModel.from_pretrained(clip_folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(clip_folder)
    model = build(str(clip_folder), (3, 16, 16), 3, 0, CLASSES)
    assert isinstance(model, CLIP)
    assert model.preprocess is not None
    assert model.preprocess.resize == Resize((16, 16), "shortest", 16, "bilinear")
    assert model.preprocess.mean == (0.4, 0.4, 0.4)
    x = images(16)
    words = tokenizer(SENTENCES, padding="max_length", max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**words, pixel_values=x)
    w = model.weights
    image = model.features(w, x)
    assert (image - expected.image_embeds).abs().max() < 1e-5
    assert (model.zero_shot(w) - expected.text_embeds).abs().max() < 1e-5
    assert (model.classify(w, image) - expected.logits_per_image).abs().max() < 1e-4
    start = model.words("a photo")
    assert torch.equal(start, w["body.text.tokens"][tokenizer("a photo").input_ids[1:-1]])
    # Context vectors that are the words themselves change nothing.
    learned = model.text(w, model.sentences("of a {}.", context=2), start)
    torch.testing.assert_close(learned, model.zero_shot(w), rtol=0, atol=1e-6)


def test_sizes_that_the_config_leaves_out_come_from_shapes(clip_folder: Path, tmp_path: Path) -> None:
    expected = load(str(clip_folder), 3, 0, CLASSES)
    for file in ("model.safetensors", "vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((clip_folder / file).read_bytes())
    heads = {"vision_config": {"num_attention_heads": 4}, "text_config": {"num_attention_heads": 2}}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    model = load(str(tmp_path), 3, 0, CLASSES)
    x = images(16)
    torch.testing.assert_close(model.features(model.weights, x), expected.features(expected.weights, x))
    assert isinstance(model, CLIP)
    assert isinstance(expected, CLIP)
    torch.testing.assert_close(model.zero_shot(model.weights), expected.zero_shot(expected.weights))


def test_weights_in_pytorchs_own_format(clip_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(clip_folder / "model.safetensors")
    ids = torch.arange(LENGTH)[None]  # buffers that older files have
    torch.save(tensors | {"text_model.embeddings.position_ids": ids}, tmp_path / "pytorch_model.bin")
    for file in ("config.json", "vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((clip_folder / file).read_bytes())
    ours, expected = load(str(tmp_path), 3, 0), load(str(clip_folder), 3, 0)
    assert all(torch.equal(p, ours.weights[name]) for name, p in expected.weights.items())


def test_half_precision_becomes_single(clip_folder: Path, tmp_path: Path) -> None:
    save_file(
        {name: p.half() for name, p in load_file(clip_folder / "model.safetensors").items()},
        tmp_path / "model.safetensors",
    )
    for file in ("config.json", "vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((clip_folder / file).read_bytes())
    assert all(p.dtype == torch.float32 for p in load(str(tmp_path), 3, 0).weights.values())


# ---- timm


def timm_part(w: dict[str, Tensor], at: str) -> Part:
    names = {
        "norm1": "norm1",
        "qkv": "attn.qkv",
        "proj": "attn.proj",
        "norm2": "norm2",
        "mlp.in": "mlp.fc1",
        "mlp.out": "mlp.fc2",
    }
    return lambda part: (w[f"{at}.{names[part]}.weight"], w[f"{at}.{names[part]}.bias"])


def tokens(w: dict[str, Tensor], x: Tensor, patch: int, kernel: str, cls: str, position: str) -> Tensor:
    """Cls and patches, each a product with the kernel."""
    grid = x.shape[-1] // patch
    rows = [w[cls].reshape(1, -1).expand(len(x), -1)]
    for i in range(grid * grid):
        top, left = i // grid * patch, i % grid * patch
        rows.append(x[:, :, top : top + patch, left : left + patch].flatten(1) @ w[kernel].flatten(1).T)
    return torch.stack(rows, 1) + w[position]


@pytest.mark.parametrize("config", ["whole", "none", "other heads"])
def test_vit_of_timm(config: str, tmp_path: Path) -> None:
    w = random(timm_vit(width=128, depth=2, hidden=256, side=16, patch=4, classes=21))
    heads = 4 if config == "other heads" else 2  # 64 units each unless told
    made = {"input_size": [3, 16, 16], "interpolation": "bicubic", "crop_pct": 0.9, "mean": [0.5] * 3, "std": [0.5] * 3}
    configs: dict[str, object] = {"architecture": "vit_tiny_patch4_16", "num_classes": 21, "pretrained_cfg": made}
    if config == "other heads":
        configs["model_args"] = {"num_heads": 4}
    write(tmp_path, w, **({} if config == "none" else {"config": configs}))
    model = build(str(tmp_path), (3, 16, 16), 5, 0)
    x = images(16)
    h = tokens(w, x, 4, "patch_embed.proj.weight", "cls_token", "pos_embed")
    h[:, 1:] += w["patch_embed.proj.bias"]
    for i in range(2):
        h = layer(h, timm_part(w, f"blocks.{i}"), heads, 1e-6, quick=False)
    expected = norm(h[:, 0], w["norm.weight"], w["norm.bias"], 1e-6)
    assert (model.features(model.weights, x) - expected).abs().max() < 1e-5
    assert model.preprocess is not None
    assert (model.resize.size, model.resize.scaled) == ((16, 16), 17)


def test_the_head_comes_from_the_seed_and_the_body_from_the_file(tmp_path: Path) -> None:
    w = random(timm_vit(width=64, depth=1, hidden=64, side=8, patch=4, classes=21))
    write(tmp_path, w)
    one, again, other = (load(str(tmp_path), 5, seed).weights for seed in (1, 1, 2))
    assert one["head.weight"].shape == (5, 64)
    assert all(torch.equal(one[name], again[name]) for name in one)
    differs = [name for name in one if not torch.equal(one[name], other[name])]
    assert differs == ["head.weight", "head.bias"]


# ---- open_clip


def open_clip_part(w: dict[str, Tensor], at: str) -> Part:
    names = {"norm1": "ln_1.", "qkv": "attn.in_proj_", "proj": "attn.out_proj."}
    names |= {"norm2": "ln_2.", "mlp.in": "mlp.c_fc.", "mlp.out": "mlp.c_proj."}
    return lambda part: (w[f"{at}.{names[part]}weight"], w[f"{at}.{names[part]}bias"])


def open_clip_text_reference(w: dict[str, Tensor], folder: Path, heads: int, quick: bool) -> Tensor:
    """All sentences at full length, padded with zeros, as open_clip has them."""
    tokenizer, features = CLIPTokenizer.from_pretrained(folder), []
    for sentence in SENTENCES:
        ids = tokenizer(sentence).input_ids
        padded = torch.tensor(ids + [0] * (LENGTH - len(ids)))
        h = (w["token_embedding.weight"][padded] + w["positional_embedding"])[None]
        for i in range(2):
            h = layer(h, open_clip_part(w, f"transformer.resblocks.{i}"), heads, 1e-5, quick, causal=True)
        end = norm(h[0, int(padded.argmax())], w["ln_final.weight"], w["ln_final.bias"], 1e-5)
        features.append(end @ w["text_projection"])
    return torch.nn.functional.normalize(torch.stack(features), dim=-1)


TEXT_CFG = {"context_length": LENGTH, "width": 64, "heads": 2, "layers": 2}


@pytest.mark.parametrize("quick", [True, False])
def test_open_clip_with_a_vit(quick: bool, tmp_path: Path) -> None:
    vocabulary = write_tokenizer(tmp_path)
    w = random({**open_clip_vit(128, 2, 16, 4, 20), **open_clip_text(64, 2, vocabulary, LENGTH, 20)})
    vision = {"image_size": 16, "layers": 2, "width": 128, "patch_size": 4}
    cfg = {"embed_dim": 20, "vision_cfg": vision, "text_cfg": TEXT_CFG | {"vocab_size": vocabulary}}
    if quick:
        cfg["quick_gelu"] = True
    config = {"model_cfg": cfg, "preprocess_cfg": {"mean": [0.4] * 3, "std": [0.2] * 3}}
    write(tmp_path, w, "open_clip_model.safetensors", open_clip_config=config)
    model = build(str(tmp_path), (3, 16, 16), 3, 0, CLASSES)
    assert isinstance(model, CLIP)
    x = images(16)
    h = tokens(w, x, 4, "visual.conv1.weight", "visual.class_embedding", "visual.positional_embedding")
    h = norm(h, w["visual.ln_pre.weight"], w["visual.ln_pre.bias"], 1e-5)
    for i in range(2):
        h = layer(h, open_clip_part(w, f"visual.transformer.resblocks.{i}"), 2, 1e-5, quick)
    image = norm(h[:, 0], w["visual.ln_post.weight"], w["visual.ln_post.bias"], 1e-5) @ w["visual.proj"]
    image = torch.nn.functional.normalize(image, dim=-1)
    text = open_clip_text_reference(w, tmp_path, 2, quick)
    assert (model.features(model.weights, x) - image).abs().max() < 1e-5
    assert (model.zero_shot(model.weights) - text).abs().max() < 1e-5
    logits = w["logit_scale"].exp() * image @ text.T
    assert (model.classify(model.weights, model.features(model.weights, x)) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("config", [True, False])
def test_open_clip_with_a_resnet(config: bool, tmp_path: Path) -> None:
    vocabulary = write_tokenizer(tmp_path)
    blocks, width, side = (2, 1, 2, 1), 16, 64
    w = random({**open_clip_resnet(width, blocks, side, 20), **open_clip_text(128, 2, vocabulary, LENGTH, 20)})
    text = TEXT_CFG | {"vocab_size": vocabulary, "width": 128}
    vision = {"image_size": side, "layers": list(blocks), "width": width, "patch_size": None}
    cfg = {"embed_dim": 20, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    # The repositories of timm also have the image tower alone, in another layout.
    write(tmp_path, {"stem.conv1.conv.weight": torch.zeros(1)}, config={"architecture": "resnet50_clip"})
    write(tmp_path, w, "open_clip_model.safetensors", **({"open_clip_config": {"model_cfg": cfg}} if config else {}))
    model = build(str(tmp_path), (3, side, side), 3, 0, CLASSES)
    assert isinstance(model, CLIP)
    assert model.width is None
    x = images(side)
    image = torch.nn.functional.normalize(resnet_reference(w, x, blocks, width * 32 // 64), dim=-1)
    assert (model.features(model.weights, x) - image).abs().max() < 1e-5
    expected = open_clip_text_reference(w, tmp_path, 2, quick=True)
    assert (model.zero_shot(model.weights) - expected).abs().max() < 1e-5
