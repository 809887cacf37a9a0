"""Mistakes in a model's files, told in one sentence; and the hub."""

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
    timm_vit,
    write,
    write_tokenizer,
)
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    DeiTConfig,
    DeiTModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    PreTrainedModel,
    SiglipConfig,
    SiglipModel,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTModel,
)

from promptfed.errors import UserError
from promptfed.models import build
from promptfed.models.pretrained.load import load

CLASSES = ("dog", "school bus", "sunflowers")
DINO = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28}
TEXT = {**VIT, "vocab_size": 50, "bos_token_id": 48, "eos_token_id": 49, "max_position_embeddings": LENGTH}


def test_a_missing_weight_is_named(clip_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(clip_folder / "model.safetensors")
    config = json.loads((clip_folder / "config.json").read_text())
    gone = "text_model.encoder.layers.1.mlp.fc2.bias"
    write(tmp_path, {name: p for name, p in tensors.items() if name != gone}, config=config)
    with pytest.raises(UserError, match=f'"{gone}" is missing in its weights'):
        load(str(tmp_path), 3, 0)


def test_fewer_layers_than_the_config_says(clip_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(clip_folder / "model.safetensors")
    config = json.loads((clip_folder / "config.json").read_text())
    write(
        tmp_path, {name: p for name, p in tensors.items() if "vision_model.encoder.layers.2" not in name}, config=config
    )
    with pytest.raises(UserError, match=r"vision_model\.encoder\.layers\.2\..* is missing"):
        load(str(tmp_path), 3, 0)


@pytest.mark.parametrize(
    ("section", "key", "value", "match"),
    [
        (
            "vision_config",
            "image_size",
            32,
            r"position_embedding.weight\" has shape \[5, 24\] instead of \[17, 24\]; its w",
        ),
        ("vision_config", "patch_size", 4, "instead of"),
        ("text_config", "vocab_size", 49408, r"instead of \[49408, 32\]"),
        ("text_config", "intermediate_size", 47, r"instead of \[47, 32\]"),
        ("vision_config", "hidden_act", "relu", r'activation = "relu" is not supported \(allowed: gelu, quick_gelu\)'),
        ("vision_config", "num_attention_heads", 5, "5 heads do not divide a width of 24"),
    ],
)
def test_a_config_of_another_model(
    section: str, key: str, value: object, match: str, clip_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((clip_folder / "config.json").read_text())
    config[section][key] = value
    write(tmp_path, load_file(clip_folder / "model.safetensors"), config=config)
    with pytest.raises(UserError, match=match):
        load(str(tmp_path), 3, 0)


def test_a_clip_without_a_tokenizer(clip_folder: Path, tmp_path: Path) -> None:
    config = json.loads((clip_folder / "config.json").read_text())
    write(tmp_path, load_file(clip_folder / "model.safetensors"), config=config)
    with pytest.raises(UserError, match=r"has no tokenizer: .* needs tokenizer\.json"):
        load(str(tmp_path), 3, 0)


def test_weights_that_this_kind_of_model_has_no_place_for(tmp_path: Path) -> None:
    w = random(timm_vit(width=64, depth=1, hidden=64, side=8, patch=4, classes=2))
    write(tmp_path, w | {"blocks.0.attn.q_norm.weight": torch.ones(64)})
    with pytest.raises(UserError, match=r'no place for "blocks\.0\.attn\.q_norm\.weight"'):
        load(str(tmp_path), 3, 0)


def test_open_clip_settings_that_change_the_model(tmp_path: Path) -> None:
    vocabulary = write_tokenizer(tmp_path)
    w = random({**open_clip_vit(64, 1, 8, 4, 20), **open_clip_text(64, 1, vocabulary, LENGTH, 20)})
    cfg = {"vision_cfg": {"global_average_pool": True}, "text_cfg": {}}
    write(tmp_path, w, "open_clip_model.safetensors", open_clip_config={"model_cfg": cfg})
    with pytest.raises(UserError, match=r"global_average_pool = True of its open_clip_config\.json is not supported"):
        load(str(tmp_path), 3, 0)


def test_other_networks_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"layer1.0.conv1.weight": torch.zeros(1)})
    with pytest.raises(
        UserError, match=r"model\.safetensors holds no ViT and no CLIP in a layout of transformers, timm"
    ):
        load(str(tmp_path), 3, 0)


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"visual.conv1.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is not a readable file of tensors"):
        load(str(tmp_path), 3, 0)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", b"\x10\0\0\0\0\0\0\0{"])
def test_damaged_files_are_told(content: bytes, tmp_path: Path) -> None:
    for file in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(UserError, match=f"{file} is not a readable file of tensors"):
            load(str(tmp_path / file), 3, 0)


def test_damaged_settings_are_told(clip_folder: Path, tmp_path: Path) -> None:
    write(tmp_path, load_file(clip_folder / "model.safetensors"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        load(str(tmp_path), 3, 0)


def test_an_empty_folder_is_told_which_files_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no weights; it needs open_clip_model\.safetensors or model\.safetensors"):
        load(str(tmp_path), 3, 0)


@pytest.mark.parametrize("name", ["/nowhere/clip", "./clip", "~/nowhere/clip", "a/b/c"])
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(UserError, match=r"there is no such file or folder; pass a local folder .* tokenizer\.json"):
        build(name, (3, 16, 16), 3, 0)


def test_images_of_another_size_name_the_setting(clip_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.size: .* needs image sides that are multiples of 8, got 20x20"):
        build(str(clip_folder), (3, 20, 20), 3, 0, CLASSES)
    with pytest.raises(UserError, match=r"got images of 24x24 pixels in 1 channel; set dataset\.size=24 and .*nels=3"):
        build(str(clip_folder), (1, 24, 24), 3, 0, CLASSES)
    vocabulary = write_tokenizer(tmp_path)
    w = random({**open_clip_resnet(16, (1, 1, 1, 1), 32, 20), **open_clip_text(64, 1, vocabulary, LENGTH, 20)})
    write(tmp_path, w, "open_clip_model.safetensors")
    with pytest.raises(UserError, match=r"dataset\.size: .* takes images of 32x32 .* set dataset\.size=32"):
        build(str(tmp_path), (3, 64, 64), 3, 0, CLASSES)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (DeiTModel(DeiTConfig(**VIT)), "it has a distillation token; use .* facebook/deit-tiny-patch16-224"),
        (Dinov2Model(Dinov2Config(**DINO, use_swiglu_ffn=True)), r"its layers have gated MLPs \(SwiGLU\)"),
        (
            Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**DINO)),
            "it has register tokens; .* facebook/dinov2-small",
        ),
        (SiglipModel(SiglipConfig(vision_config=VIT, text_config=TEXT)), "SigLIP has no class token but pools"),
        (
            VisionTextDualEncoderModel(None, ViTModel(ViTConfig(**VIT)), BertModel(BertConfig(**TEXT))),
            "its text tower is not CLIP's",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedModel) else "",
)
def test_models_that_are_not_read_are_told_why(model: PreTrainedModel, why: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f'backbone.name = ".*" is not supported: {why}'):
        load(str(tmp_path), 3, 0)


@pytest.mark.parametrize("token", ["dist_token", "reg_token"])
def test_timms_models_with_further_tokens_are_told_why(token: str, tmp_path: Path) -> None:
    w = random(timm_vit(width=64, depth=1, hidden=64, side=8, patch=4, classes=2))
    write(tmp_path, w | {token: torch.zeros(1, 1, 64)})
    with pytest.raises(UserError, match="is not supported: it has"):
        load(str(tmp_path), 3, 0)


def test_a_pooler_with_another_activation(tmp_path: Path) -> None:
    towers = ViTModel(ViTConfig(**VIT, pooler_act="relu")), CLIPTextModel(CLIPTextConfig(**TEXT))
    VisionTextDualEncoderModel(None, *towers).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r'pooler_act = "relu" is not supported \(allowed: tanh, linear\)'):
        load(str(tmp_path), 3, 0)


# ---- the hub


class Hub:
    """In place of the hub: fails, or serves a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Exception | Path, cached: Path | None = None) -> None:
        import huggingface_hub

        self.asked: list[str] = []

        def model_info(_: object, name: str, timeout: float) -> object:
            if isinstance(answer, Exception):
                raise answer
            siblings = [type("File", (), {"rfilename": file.name}) for file in answer.iterdir()]
            return type("Info", (), {"sha": "abc", "siblings": siblings})

        def snapshot_download(
            name: str,
            repo_type: str,
            revision: str | None = None,
            allow_patterns: tuple[str, ...] = (),
            local_files_only: bool = False,
        ) -> str:
            assert repo_type == "model"
            self.asked += allow_patterns
            found = cached if local_files_only else answer
            if not isinstance(found, Path):
                raise FileNotFoundError(name)
            return str(found)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, ConnectionError("no network"))
    with pytest.raises(
        UserError, match=r"the hub cannot be reached; pass a local folder .* config\.json and model\.saf"
    ):
        build("openai/clip-vit-base-patch16", (3, 224, 224), 3, 0, CLASSES)


def test_an_earlier_download_is_used_without_a_connection(monkeypatch: pytest.MonkeyPatch, clip_folder: Path) -> None:
    Hub(monkeypatch, ConnectionError("no network"), cached=clip_folder)
    assert build("owner/clip", (3, 16, 16), 3, 0, CLASSES).name == "owner/clip"


def test_an_id_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HFValidationError

    Hub(monkeypatch, HFValidationError("bad id"))
    with pytest.raises(UserError, match="is not on the hub, or needs a login there; check the id, or pass a local"):
        build("openai/clip-vit-base-patch17", (3, 224, 224), 3, 0)


def test_one_file_of_weights_is_downloaded(monkeypatch: pytest.MonkeyPatch, clip_folder: Path, tmp_path: Path) -> None:
    for file in clip_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    hub = Hub(monkeypatch, tmp_path)
    load("owner/clip", 3, 0)
    assert "model.safetensors" in hub.asked
    assert not any(file.endswith(".bin") for file in hub.asked)
