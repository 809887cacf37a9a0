from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

import promptfed.models
from promptfed.data import drawing, parts, shapes
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


def accuracy(model: CLIP, world: ModuleType, classes: tuple[str, ...]) -> float:
    """Zero-shot, in percent."""
    labels, _, pictures = world.sample(1280, seed=4321)
    model = model.naming(classes)
    with torch.no_grad():
        features = model.features(model.weights, normalised(model, torch.from_numpy(pictures)))
        told = model.classify(model.weights, features).argmax(1).numpy()
    return 100 * float((told == labels).mean())


def test_it_is_small() -> None:
    assert {file.name for file in FOLDER.iterdir()} >= FILES
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8_000_000


def test_every_word_of_a_caption_is_one_token(words: Tokenizer) -> None:
    for word in (*drawing.SHAPES, *drawing.COLOURS, *drawing.TEXTURES, "two", "left", "above", "pencil", "small"):
        assert len(words.encode(word).ids) == 3, word


def test_other_words_fall_apart_into_letters(words: Tokenizer) -> None:
    assert words.encode("a photo of a Zebra").tokens[5:-1] == ["z", "e", "b", "r", "a</w>"]
    end = words.token_to_id("<|endoftext|>")
    for text in ("näive café 7 & 42", "日本", "don't!"):
        ids = words.encode(text).ids
        assert ids[-1] == end
        assert end not in ids[1:-1]


def test_zero_shot_on_what_it_was_pre_trained_on(model: CLIP) -> None:
    assert 70 < accuracy(model, shapes, shapes.SHAPES) < 81


def test_zero_shot_on_what_it_never_saw(model: CLIP) -> None:
    assert 25 < accuracy(model, parts, parts.CLASSES) < 35


def test_equals_transformers(model: CLIP, words: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CLIPModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    pictures = torch.from_numpy(shapes.sample(8, seed=5)[2])
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
