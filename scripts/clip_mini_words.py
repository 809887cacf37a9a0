"""The tokenizer of clip-mini."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def tokenizer(words: list[str]) -> Tokenizer:
    """CLIP's byte-pair encoding with merges for these words only: others are encoded as bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    last = [f"{byte}</w>" for byte in alphabet]  # bytes that end a word
    trainer = trainers.BpeTrainer(
        vocab_size=10_000,
        min_frequency=1,
        end_of_word_suffix="</w>",
        initial_alphabet=alphabet,
        special_tokens=last,  # fixes their ids, by which equally frequent pairs are ordered
        show_progress=False,
    )
    learned = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learned.pre_tokenizer = _split()
    learned.train_from_iterator(words, trainer)
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    # as in CLIP: bytes, bytes that end a word, merges, the two special tokens
    tokens = [*alphabet, *last, *dict.fromkeys(a + b for a, b in merges), START, END]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=END, end_of_word_suffix="</w>", continuing_subword_prefix="")
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    made.pre_tokenizer = _split()
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.RobertaProcessing(
        (END, vocabulary[END]), (START, vocabulary[START]), trim_offsets=False, add_prefix_space=False
    )
    made.add_special_tokens([START, END])
    return made


def _split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
