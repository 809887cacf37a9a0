"""A small CLIP in the layout of `transformers`, with random weights."""

import json
from pathlib import Path

import pytest
import torch
from published import LENGTH, VIT, settle, write_tokenizer
from transformers import CLIPConfig, CLIPModel


def clip_config(tokens: int, **vision: object) -> CLIPConfig:
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": LENGTH,
        "vocab_size": tokens,
        "bos_token_id": tokens - 2,
        "eos_token_id": tokens - 1,
    }
    return CLIPConfig(
        text_config=text, vision_config={**VIT, "image_size": 16, "patch_size": 8, **vision}, projection_dim=20
    )


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    theirs = CLIPModel(clip_config(write_tokenizer(folder)))
    settle(theirs)
    theirs.save_pretrained(folder)
    preprocessor = {"size": {"shortest_edge": 16}, "crop_size": 16, "resample": 2, "image_mean": [0.4] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder
