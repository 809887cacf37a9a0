from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import promptfed.models
from promptfed.data import shapes
from promptfed.models.clip import CLIP
from promptfed.models.pretrained.load import load

FOLDER = Path(promptfed.models.__file__).parent / "clip_mini"
FILES = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"}


@pytest.fixture(scope="module")
def model() -> CLIP:
    made = load(str(FOLDER), len(shapes.SHAPES), seed=0, names=shapes.SHAPES)
    assert isinstance(made, CLIP)
    return made


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def normalised(model: CLIP, pictures: torch.Tensor) -> torch.Tensor:
    assert model.preprocess is not None
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) * 255 for v in (model.preprocess.mean, model.preprocess.std))
    return (pictures.float() - mean) / std


def accuracy(model: CLIP, scenes: shapes.Scenes) -> float:
    pictures = torch.from_numpy(shapes.draw(scenes, seed=4321))
    with torch.no_grad():
        features = model.features(model.weights, normalised(model, pictures))
        told = model.classify(model.weights, features).argmax(1).numpy()
    return 100 * float((told == scenes.shape).mean())


def test_it_is_small() -> None:
    assert {file.name for file in FOLDER.iterdir()} >= FILES
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8_000_000


def test_every_word_of_a_caption_is_one_token(words: Tokenizer) -> None:
    for word in shapes.vocabulary():
        assert len(words.encode(word).ids) == 3, word
    longest = max(shapes.captions(shapes.sample(2000, seed=0), seed=0), key=lambda text: len(words.encode(text).ids))
    assert len(words.encode(longest).ids) <= 24


def test_other_words_fall_apart_into_letters(words: Tokenizer) -> None:
    assert words.encode("a photo of a Zebra").tokens[5:-1] == ["z", "e", "b", "r", "a</w>"]
    end = words.token_to_id("<|endoftext|>")
    for text in ("näive café 7 & 42", "日本", "don't!"):
        ids = words.encode(text).ids
        assert ids[-1] == end
        assert end not in ids[1:-1]


def test_zero_shot_on_styles_of_its_pre_training(model: CLIP) -> None:
    scenes = shapes.sample(1600, seed=4321, styles=shapes.SEEN_STYLES)
    scenes = scenes.take(np.flatnonzero(~shapes.unseen(scenes.shape, scenes.colour)))
    assert 72 < accuracy(model, scenes) < 83


def test_zero_shot_on_held_out_styles(model: CLIP) -> None:
    assert 48 < accuracy(model, shapes.sample(1600, seed=4321, styles=shapes.UNSEEN_STYLES)) < 60


def test_equals_transformers(model: CLIP, words: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CLIPModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    pictures = torch.from_numpy(shapes.draw(shapes.sample(8, seed=5), seed=5))
    texts = [f"a photo of a {name}." for name in shapes.SHAPES]
    encoded = words.encode_batch(texts)
    width = max(len(one.ids) for one in encoded)
    end = words.token_to_id("<|endoftext|>")
    ids = torch.tensor([one.ids + [end] * (width - len(one.ids)) for one in encoded])
    x = normalised(model, pictures)
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=x).logits_per_image
        ours = model.classify(model.weights, model.features(model.weights, x))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)
