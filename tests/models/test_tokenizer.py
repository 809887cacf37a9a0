"""The tokenizer against that of `transformers`, on files written here; and the sentences it makes."""

import json
from pathlib import Path

import pytest
from published import TEXTS, write_tokenizer
from transformers import CLIPTokenizer

from promptfed.errors import UserError
from promptfed.models.pretrained.tokenizer import Tokenizer

HARD = (
    "  Several   spaces,\tand a\nnew line ",
    "It's what they've said: DON'T!",
    "école naïve 東京 Ⅷ 1234 a-b_c",
    "punctuation?!... (all at once)",
    "",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def ours(folder: Path, theirs: CLIPTokenizer) -> Tokenizer:
    return Tokenizer.load(folder, len(theirs), 16, "x")


@pytest.mark.parametrize("text", [*TEXTS, *HARD])
@pytest.mark.parametrize("files", ["vocab.json and merges.txt", "tokenizer.json"])
def test_tokens_are_those_of_transformers(text: str, files: str, folder: Path, theirs: CLIPTokenizer) -> None:
    if files == "tokenizer.json":
        folder = folder / "whole"
        if not folder.exists():
            theirs.save_pretrained(str(folder))
        assert not (folder / "vocab.json").exists()
    ours = Tokenizer.load(folder, len(theirs), 77, "x")
    assert [ours.start, *ours.words(text), ours.end] == theirs(text).input_ids


def words(theirs: CLIPTokenizer, text: str) -> list[int]:
    return theirs(text).input_ids[1:-1]


def test_sentences_have_the_names_in_the_template(ours: Tokenizer, theirs: CLIPTokenizer) -> None:
    made = ours.sentences(["dog", "school_bus"], "a photo of a {}.")
    for row, end, name in zip(made.ids, made.end, ("dog", "school bus"), strict=True):
        assert row[: end + 1].tolist() == theirs(f"a photo of a {name}.").input_ids
    assert made.slots.shape == (2, 0)
    assert made.shared == 5  # start, a, photo, of, a


@pytest.mark.parametrize("context", [1, 4, 5])
def test_the_context_stands_before_around_or_behind_the_name(
    context: int, ours: Tokenizer, theirs: CLIPTokenizer
) -> None:
    names = ("dog", "school bus")
    for position in ("end", "middle", "front"):
        made = ours.sentences(names, "of a {}.", context, position)
        for c, name in enumerate(names):
            ahead = {"end": context, "middle": context // 2, "front": 0}[position]
            row: list[int | None] = [ours.start, *[None] * ahead, *words(theirs, f"of a {name}")]
            if position == "end":
                row += words(theirs, ".")
            row += [None] * (context - ahead)
            if position != "end":
                row += words(theirs, ".")
            row.append(ours.end)
            slots = [i for i, token in enumerate(row) if token is None]
            assert made.slots[c].tolist() == slots
            assert made.end[c] == len(row) - 1
            assert [None if i in slots else t for i, t in enumerate(made.ids[c, : len(row)].tolist())] == row


@pytest.mark.parametrize("position", ["end", "middle", "front"])
def test_a_sentence_that_is_too_long_loses_its_last_words(position: str, ours: Tokenizer) -> None:
    made = ours.sentences(["dog " * 30, "car"], "{}.", 6, position)
    assert made.ids.shape == (2, 16)
    assert made.end.tolist() == [15, 1 + 6 + 2]
    assert made.ids[0, 15] == ours.end
    assert made.slots.shape == (2, 6)
    assert made.slots.max() < 15


def test_unknown_signs_do_not_end_a_sentence(ours: Tokenizer, theirs: CLIPTokenizer) -> None:
    """Where a tokenizer gives an end token for what it does not know, all behind it would be lost."""
    made = ours.sentences(["dog <|endoftext|> car"], "{}.")
    assert made.ids[0].tolist() == [ours.start, *words(theirs, "dog car."), ours.end]


def test_too_much_context_is_refused(ours: Tokenizer) -> None:
    assert ours.sentences(["dog"], context=13).ids.shape == (1, 16)
    with pytest.raises(UserError, match=r"context = 14 vectors leave no room .* 16 positions, so at most 13"):
        ours.sentences(["dog"], context=14)


@pytest.mark.parametrize("template", ["a photo", "{} and {}"])
def test_a_template_has_one_place_for_the_name(template: str, ours: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"must have one \{\}"):
        ours.sentences(["dog"], template)


@pytest.mark.parametrize("there", [(), ("vocab.json",), ("merges.txt",)])
def test_missing_files_are_named(there: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    for file in there:
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    with pytest.raises(UserError, match=r'"x" has no tokenizer: .* needs tokenizer\.json, or vocab\.json and merges'):
        Tokenizer.load(tmp_path, 550, 16, "x")


def test_a_tokenizer_of_another_model_is_refused(folder: Path, theirs: CLIPTokenizer) -> None:
    with pytest.raises(UserError, match=rf"has {len(theirs)} tokens but its text embedding 49408; use the tokenizer"):
        Tokenizer.load(folder, 49408, 77, "x")


def test_unreadable_and_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="its tokenizer cannot be read"):
        Tokenizer.load(tmp_path, 10, 16, "x")
    other = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"has no <\|startoftext\|> and <\|endoftext\|>"):
        Tokenizer.load(tmp_path, 1, 16, "x")
