"""CLIP's byte-pair encoding, from a model's own files, and the sentences that name the classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ...errors import UserError
from ..text import Sentences

START, END = "<|startoftext|>", "<|endoftext|>"
FILES = ("tokenizer.json", "vocab.json", "merges.txt")
# special tokens, contractions, words, single digits, runs of other characters
_PIECES = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

Position = Literal["front", "middle", "end"]  # of the class name among the context vectors (CoOp)


@dataclass(frozen=True)
class Tokenizer:
    backend: Backend
    start: int
    end: int
    length: int  # positions of the text tower

    @classmethod
    def load(cls, folder: Path, vocabulary: int, length: int, name: str) -> Tokenizer:
        """From tokenizer.json, or vocab.json and merges.txt. `vocabulary`: rows of the text tower's embedding."""
        full, vocab, merges = (folder / file for file in FILES)
        asked = f'backbone.name = "{name}"'
        try:
            if full.is_file():
                backend = Backend.from_file(str(full))
            elif vocab.is_file() and merges.is_file():
                backend = _from_parts(vocab, merges)
            else:
                raise UserError(
                    f"{asked} has no tokenizer: {folder} needs tokenizer.json, or vocab.json and merges.txt"
                )
        except UserError:
            raise
        except Exception as error:  # the library raises plain exceptions
            raise UserError(f"{asked}: its tokenizer cannot be read: {str(error).splitlines()[0]}") from error
        backend.no_padding()
        backend.no_truncation()
        size = backend.get_vocab_size()
        if size != vocabulary:
            raise UserError(
                f"{asked}: its tokenizer has {size} tokens but its text embedding {vocabulary}; "
                "use the tokenizer files that belong to these weights"
            )
        start, end = backend.token_to_id(START), backend.token_to_id(END)
        if start is None or end is None:
            raise UserError(f"{asked}: its tokenizer has no {START} and {END}")
        return cls(backend, start, end, length)

    def words(self, text: str) -> list[int]:
        """Tokens without start and end. Unknown characters, which may be encoded as end tokens, are left out."""
        return [i for i in self.backend.encode(text, add_special_tokens=False).ids if i not in (self.start, self.end)]

    def sentences(
        self, names: Sequence[str], template: str = "a photo of a {}.", context: int = 0, position: Position = "end"
    ) -> Sentences:
        """The template with each name, and slots for `context` vectors.

        end: [context] template; middle: half of the context, template up to the name, other half, rest of it; front:
        template up to the name, [context], rest. A sentence that is too long loses its last words.
        """
        if template.count("{}") != 1:
            raise UserError(f'template = "{template}" must have one {{}}, the place of the class name')
        room = self.length - 2 - context
        if room < 1:
            raise UserError(
                f"context = {context} vectors leave no room for class names: this text tower has {self.length} "
                f"positions, so at most {self.length - 3}"
            )
        ahead = {"end": context, "middle": context // 2, "front": 0}[position]  # context vectors before the words
        rows, slots = [], []
        for name in names:
            name = name.replace("_", " ")
            words = self.words(template.replace("{}", name))[:room]
            named = len(words) if ahead == context else len(self.words(template[: template.index("{}")] + name)[:room])
            rows.append([self.start, *[0] * ahead, *words[:named], *[0] * (context - ahead), *words[named:], self.end])
            slots.append([*range(1, 1 + ahead), *range(1 + ahead + named, 1 + named + context)])
        return Sentences.of(rows, slots)


def _from_parts(vocab: Path, merges: Path) -> Backend:
    backend = Backend(BPE.from_file(str(vocab), str(merges), unk_token=END, end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (START, END)])
    return backend
