"""LoRA of a CLIP and of a ViT with its head, and a text context, in the format of the peft library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import promptfed
from promptfed import models
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.models import CLIP
from promptfed.phases import Batch, Context
from promptfed.serving import peft
from promptfed.serving.predictor import Predictor
from promptfed.tunings.text import TextContext
from tiny import near

CPU = torch.device("cpu")


def predictor(name: str = "fedit", backbone: str = "clip-mini", size: int = 32, **settings: object) -> Predictor:
    """As if it had been trained."""
    model = models.build(backbone, (3, size, size), 3, 0, ("circle", "square", "star"))
    tuning = create(name, settings).tuning
    card = {"method": {"name": name}, "classes": ["circle", "square", "star"]}
    return Predictor(card, tuning, model, near(tuning.init(model, 0), 1, 0.1), CPU)


def expected(made: Predictor, x: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    batch = Batch(x, torch.zeros(len(x), dtype=torch.int64), None, torch.zeros(2), {})
    with torch.no_grad():
        return made.tuning.logits(made.model, made.params, batch, Context({}, {}, None, zero, zero.expand(3)))


def logits(clip: torch.nn.Module, made: Predictor, x: torch.Tensor) -> torch.Tensor:
    """By transformers, of the same sentences."""
    assert isinstance(made.model, CLIP)
    sentences = made.model.sentences(made.model.template)
    assert made.model.tokenizer is not None
    ids = sentences.ids.clone()
    for row, end in zip(ids, sentences.end, strict=True):
        row[end:] = made.model.tokenizer.end
    with torch.no_grad():
        found: torch.Tensor = clip(input_ids=ids, pixel_values=x).logits_per_image
    return found


def test_the_files_hold_what_was_trained(tmp_path: Path) -> None:
    """Added to the weights of transformers' own CLIP by hand, they give the same logits."""
    transformers = pytest.importorskip("transformers")
    made = predictor(rank=2, alpha=6, projections=("q", "v"))
    tensors = load_file(peft.write(made, tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    clip = transformers.CLIPModel.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = logits(clip, made, x)
    modules = dict(clip.named_modules())
    for name in config["target_modules"]:
        a, b = (tensors.pop(f"base_model.model.{name}.lora_{m}.weight") for m in "AB")
        modules[name].weight.data += config["lora_alpha"] / config["r"] * b @ a
    assert not tensors
    torch.testing.assert_close(logits(clip, made, x), expected(made, x), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(before, expected(made, x), atol=0.1)


def test_peft_loads_them_on_the_same_backbone(tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    made = predictor(rank=2, tower="image")
    peft.write(made, tmp_path)
    base = json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    frozen = transformers.CLIPModel.from_pretrained(base, dtype=torch.float32)
    clip = library.PeftModel.from_pretrained(frozen, tmp_path).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(clip, made, x), expected(made, x), rtol=1e-4, atol=1e-3)


# ---- a ViT


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published ViT with two classes of its own, and random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    torch.manual_seed(0)
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    folder = tmp_path_factory.mktemp("vit")
    vit.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    return folder


def vit_predictor(folder: Path, size: int = 32, **settings: object) -> Predictor:
    """Its head sees features on a scale."""
    made = predictor(backbone=str(folder), size=size, rank=2, **settings)
    g = torch.Generator().manual_seed(2)
    made.params["scale.mean"] = torch.randn(24, generator=g)
    made.params["scale.std"] = 0.5 + torch.rand(24, generator=g)
    return made


def vit_logits(vit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = vit(pixel_values=x, interpolate_pos_encoding=x.shape[-1] != 32).logits
    return found


def test_the_files_of_a_vit_hold_lora_and_head(vit_folder: Path, tmp_path: Path) -> None:
    """Added to the weights of transformers' own ViT by hand, they give the same logits."""
    transformers = pytest.importorskip("transformers")
    made = vit_predictor(vit_folder, projections=("q", "v"))
    tensors = load_file(peft.write(made, tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    vit = transformers.ViTForImageClassification.from_pretrained(
        vit_folder, num_labels=3, ignore_mismatched_sizes=True
    ).eval()
    modules = dict(vit.named_modules())
    there = [name for name in config["target_modules"] if name in modules]
    assert len(there) == 2 * 2, "layers and projections"
    for name in there:
        a, b = (tensors[f"base_model.model.{name}.lora_{m}.weight"] for m in "AB")
        modules[name].weight.data += config["lora_alpha"] / config["r"] * b @ a
    assert config["modules_to_save"] == ["classifier"]
    vit.classifier.weight.data, vit.classifier.bias.data = (
        tensors[f"base_model.model.classifier.{part}"] for part in ("weight", "bias")
    )
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(vit_logits(vit, x), expected(made, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [32, 48])
def test_peft_loads_a_vit_with_its_head(size: int, vit_folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    made = vit_predictor(vit_folder, size)
    peft.write(made, tmp_path)
    frozen = transformers.ViTForImageClassification.from_pretrained(
        vit_folder, num_labels=3, ignore_mismatched_sizes=True
    )
    vit = library.PeftModel.from_pretrained(frozen, tmp_path).eval()
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(vit_logits(vit, x), expected(made, x), rtol=1e-4, atol=1e-5)


# ---- text prompts


def with_slots(made: Predictor, indices: list[int]) -> torch.Tensor:
    """Sentences with these tokens in the slots of the context, and end tokens after the end."""
    assert isinstance(made.tuning, TextContext)
    assert isinstance(made.model, CLIP)
    assert made.model.tokenizer is not None
    sentences = made.tuning.sentences(made.model)
    ids = sentences.ids.scatter(1, sentences.slots, torch.tensor(indices).expand(len(sentences.ids), -1))
    for row, end in zip(ids, sentences.end, strict=True):
        row[end:] = made.model.tokenizer.end
    return ids


@pytest.mark.parametrize("position", ["end", "middle"])
def test_peft_loads_a_context_as_tokens(position: str, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    made = predictor("promptfl", context=4, name_position=position)
    peft.write(made, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    frozen = transformers.CLIPModel.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
    clip = library.PeftModel.from_pretrained(frozen, tmp_path).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = clip(input_ids=with_slots(made, config["token_indices"]), pixel_values=x).logits_per_image
    torch.testing.assert_close(found, expected(made, x), rtol=1e-4, atol=1e-3)


def test_a_context_takes_the_places_of_tokens_that_no_sentence_has(tmp_path: Path) -> None:
    made = predictor("promptfl", context=4)
    (name,) = tensors = load_file(peft.write(made, tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert name == f"base_model.model.{config['target_modules'][0]}.trainable_tokens_delta"
    assert torch.equal(tensors[name], made.params["context"])
    indices = config["token_indices"]
    assert isinstance(made.tuning, TextContext)
    assert len(set(indices)) == 4
    assert not set(indices) & set(made.tuning.sentences(made.model).ids.flatten().tolist())


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "backbone"), [("fedit", "vit-mini"), ("promptfolio", "clip-mini"), ("fedvpt", "vit-mini")]
)
def test_what_has_no_form_in_peft_is_refused(name: str, backbone: str, tmp_path: Path) -> None:
    message = (
        rf'^export --peft: "{name}" on backbone "{backbone}" has no form in PEFT \(allowed: LoRA on a whole CLIP, '
        r"or on a ViT that transformers loads as ViTForImageClassification; a text context alone\)$"
    )
    with pytest.raises(UserError, match=message):
        peft.write(predictor(name, backbone), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_is_exported(tmp_path: Path) -> None:
    result = promptfed.run(
        method={"name": "flexlora", "epochs": 1, "rank": 3, "ranks": (1, 3), "alpha": 6, "tower": "text"},
        dataset={"name": "shapes", "limit": 32},
        partition={"name": "iid", "clients": 2},
        backbone="clip-mini",
        rounds=1,
        engine={"workers": 1},
        out=tmp_path / "run",
    )
    file = promptfed.export(result.folder, client=0, peft=True)
    assert file == result.folder / "exports" / "client-0-peft" / "adapter_model.safetensors"
    assert {min(p.shape) for p in load_file(file).values()} == {1}
    config = json.loads((file.parent / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (1, 2.0)
