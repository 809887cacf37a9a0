"""What a stranger may send, without end: the readers of promptfed.flower.wire under atheris.

    python tests/fuzz/flower_wire.py -runs=100000            # all readers
    python tests/fuzz/flower_wire.py answer -runs=100000     # one of them: request, answer or blob

A case is a value or Malformed in one printable line; anything else ends the run. An input is a byte that chooses the
reader, a byte that chooses a way to spoil the arrays, then JSON and blobs with a mark between them.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import atheris

    with atheris.instrument_imports(
        include=["promptfed.flower.wire", "promptfed.clients.messages", "promptfed.clients.wire"]
    ):
        import promptfed.flower.wire as wire
        from promptfed.clients import messages
        from promptfed.clients.wire import pack
else:
    import promptfed.flower.wire as wire
    from promptfed.clients import messages
    from promptfed.clients.wire import pack

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

READERS = ("request", "answer", "blob")
TASKS = {
    "identify": wire.Identify(),
    "enroll": messages.Enroll(),
    "train": messages.Train(round=3, score=True),
    "second": messages.Second(round=3),
    "evaluate": messages.Evaluate(as_of=4, pooled=True, after_local=False),
    "keys": messages.Keys(round=3),
    "shares": messages.Shares(round=3, clients=[0, 1, 2]),
    "unmask": messages.Unmask(round=3, answered=[0, 2]),
}
ASKS = tuple(TASKS)
MARK = b"\xff\xfe\xfd"  # in no UTF-8
SECONDS = 6.0  # of processor time that a case may take: ten times the costliest, as the machine may be busy
seen: Counter[str] = Counter()

# ---- messages as they should be

BLOB = pack(
    {"up/body.weight": torch.arange(6.0).reshape(2, 3), "up/n": torch.tensor(3), "stats/seen": torch.ones(2) > 0}
)
DIGEST = "0123456789abcdef" * 4
_SCORE = {"n": 2, "loss": 0.5, "tp": [1, 0], "fp": [0, 1], "fn": [1, 0]}
_SCORES = {"val": _SCORE, "test": _SCORE}
_TO = {"clients": [{"client": 0, "blob": 0, "once": {"set": DIGEST}}], "new": {DIGEST: 1}}
REQUESTS: list[tuple[dict[str, Any], list[bytes]]] = [
    ({"note": {"ask": "identify"}}, []),
    ({"note": {"ask": "identify"}, "fingerprint": {"seed": DIGEST}}, []),
    *(
        ({"note": {"task": TASKS[ask].model_dump(), **_TO}}, blobs)
        for ask, blobs in {
            "enroll": [b"", BLOB],
            "train": [BLOB, BLOB],
            "second": [BLOB, b""],
            "evaluate": [BLOB, BLOB],
            "keys": [b"", BLOB],
            "shares": [BLOB, BLOB],
            "unmask": [BLOB, BLOB],
        }.items()
    ),
]
ANSWERS: list[tuple[str, dict[str, Any], list[bytes]]] = [
    ("identify", {"result": {"client": 0, "n": 7, "fingerprint": {"seed": DIGEST}}}, []),
    ("enroll", {"result": {"client": 0}}, [BLOB]),
    ("train", {"result": {"client": 0, "n": 7, "passes": 14, "loss": float("nan")}}, [BLOB]),
    ("train", {"result": {"client": 0, "n": 7, "passes": 14, "after_local": _SCORES}}, [b""]),
    ("second", {"result": {"client": 0}}, []),
    *((ask, {"result": {"client": 0}}, [BLOB]) for ask in ("keys", "shares", "unmask")),
    (
        "evaluate",
        {"result": {"client": 0, "passes": 0, "scores": {**_SCORES, "pooled": _SCORE}, "groups": [[1, 1]]}},
        [],
    ),
    ("evaluate", {"error": "no space left"}, []),
]


def head(fields: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
    return {"version": 3, **fields, "sizes": [len(blob) for blob in blobs]}


def seeds() -> list[bytes]:
    """Inputs that are valid messages."""
    found = [bytes([0, 0]) + MARK.join([json.dumps(head(*one)).encode(), *one[1]]) for one in REQUESTS]
    for ask, note, blobs in ANSWERS:
        text = json.dumps(head(note, blobs)).encode()
        found.append(bytes([1 + 3 * ASKS.index(ask), 0]) + MARK.join([text, *blobs]))
    size = int.from_bytes(BLOB[:8], "little")
    return [*found, bytes([2, 0]) + MARK.join([BLOB[8 : 8 + size], BLOB[8 + size :]])]


SEEDS = seeds()

# ---- a case


def content(text: str, blobs: list[bytes], spoil: int) -> RecordDict:
    """A message of Flower's, with one thing or another wrong about its arrays."""
    arrays = {str(i): wire.array(blob) for i, blob in enumerate(blobs) if blob}
    if arrays and spoil:
        name, old = next(iter(arrays.items()))
        arrays[name] = {
            1: Array("uint8", (len(old.data) + 1,), "safetensors", old.data),
            2: Array("object", old.shape, "safetensors", old.data),
            3: Array("uint8", old.shape, "numpy.ndarray", old.data),
            4: Array("uint8", (1 << 60,), "safetensors", old.data),
            5: Array("uint8", (-1,), "safetensors", old.data),
            6: Array("uint8", (), "safetensors", old.data),
        }.get(spoil % 8, old)
        if spoil % 8 == 7:
            arrays["١"] = old  # a digit, elsewhere
    whole = RecordDict({"promptfed": ConfigRecord({"json": text})})
    if arrays:
        whole["blobs"] = ArrayRecord(arrays)
    return whole


def allowed(read: Callable[[], Any]) -> Any:
    """A value, or none where the case is Malformed. Whatever else it does is a fault."""
    begun = time.process_time()
    try:
        found = read()
    except wire.Malformed as error:
        found, said = None, str(error)
        assert said.isprintable(), f"not one printable line: {said!r}"
        assert len(said) < 700, f"{len(said)} characters"
    spent = time.process_time() - begun
    assert spent < SECONDS, f"{spent:.1f} seconds"
    return found


def one(data: bytes) -> None:
    """The case that these bytes stand for."""
    if len(data) < 2:
        return
    reader, variant, spoil = READERS[data[0] % 3], data[0] // 3, data[1]
    first, *blobs = data[2:].split(MARK)
    if reader == "blob":
        # The length in front is put right, except in every other variant: else hardly a header would be read.
        whole = b"".join(blobs)
        given = first + whole if variant % 2 else len(first).to_bytes(8, "little") + first + whole
        found = allowed(lambda: wire.tensors(given))
        if found is not None:
            assert sum(p.numel() * p.element_size() for p in found.values()) <= len(given)
    else:
        message = content(first.decode("utf-8", "surrogateescape"), blobs, spoil)
        if reader == "request":
            found = allowed(lambda: wire.read_request(message))
        else:
            found = allowed(lambda: wire.read_answer(message, TASKS[ASKS[variant % len(ASKS)]]))
        if found is not None:
            assert sum(map(len, found[1])) == sum(map(len, blobs))
    seen[f"{reader} {'malformed' if found is None else 'read'}"] += 1


# ---- other cases from one

_JUNK: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "\x00",
        "\n",
        "\ud800",
        "NaN",
        [],
        {},
    ),
    *(1 << 31, 1 << 32, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400, DIGEST, DIGEST + "\n"),
    *(
        "F32",
        "BOOL",
        "F8_E4M3",
        "__metadata__",
        "../../passwords",
        "x" * 5000,
        [[[[]]]],
        [0] * 5000,
        {"promptfed": "{}"},
    ),
]


def mutated(tree: Any, g: random.Random) -> Any:
    """JSON with one thing changed: a value, a key, what is missing, what is there twice, or how deep it is."""
    if isinstance(tree, dict) and tree and g.random() < 0.8:
        key = g.choice(list(tree))
        rest = {k: v for k, v in tree.items() if k != key}
        turn = g.randrange(6)
        if turn == 0:
            return rest
        if turn == 1:
            return {**tree, str(g.choice(_JUNK)): g.choice(_JUNK)}
        if turn == 2:
            return {**rest, str(g.choice(_JUNK)): tree[key]}
        return {**tree, key: mutated(tree[key], g)}
    if isinstance(tree, list) and tree and g.random() < 0.8:
        at = g.randrange(len(tree))
        turn = g.randrange(4)
        if turn == 0:
            return tree[:at] + tree[at + 1 :]
        if turn == 1:
            return [*tree, *tree]
        return [*tree[:at], mutated(tree[at], g), *tree[at + 1 :]]
    if isinstance(tree, int) and g.random() < 0.5:
        return tree + g.choice([-8, -4, -1, 1, 4, 8, 1 << 32])
    if g.random() < 0.1:
        for _ in range(g.choice([1, 30, 300])):
            tree = g.choice([[tree], {"a": tree}])
        return tree
    return g.choice(_JUNK)


def written(tree: Any, g: random.Random) -> str:
    """Its text: now and then with a key twice, or a few characters damaged."""
    text = json.dumps(tree)
    if g.random() < 0.1:
        text = text.replace('"', '"version": 1, "', 1).replace("{", '{"sizes": [9], ', 1)
    for _ in range(g.choice([0, 0, 0, 0, 1, 3])):
        at = g.randrange(len(text) + 1)
        text = (
            text[:at]
            + g.choice(["", "[", "}", '"', ",", ":", "\\u d800", "\\ud800", "é", "\x00", "9" * 5000])
            + text[at + 1 :]
        )
    return text


_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}


def packed(g: random.Random) -> bytes:
    """A blob of a few tensors of any kind, as it should be but for their order now and then."""
    header: dict[str, Any] = {"__metadata__": {"promptfed": "{}"}}
    end = 0
    for i in range(g.randrange(5)):
        dtype, size = g.choice(list(_BYTES.items()))
        shape = [g.choice([0, 1, 2, 3, 1 << 40 if g.random() < 0.1 else 1]) for _ in range(g.randrange(5))]
        begin, end = end, end + size * math.prod(shape)
        header[f"{g.choice(['up/', 'stats/', ''])}{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    if g.random() < 0.1:
        header = dict(reversed(header.items()))
    return bytes([2, 0]) + json.dumps(header).encode() + MARK + g.randbytes(min(end, 1 << 12)).replace(MARK, b"")


def mutate(data: bytes, g: random.Random) -> bytes:
    """Another input, most often one whose JSON still parses and whose sizes are right."""
    if len(data) < 2 or g.random() < 0.3:  # again from the start: changes upon changes are seldom read
        data = g.choice([seed for seed in SEEDS if not data or seed[0] % 3 == data[0] % 3])
        data = packed(g) if data[0] % 3 == 2 else data
    first, *blobs = data[2:].split(MARK)
    try:
        tree = json.loads(first)
    except (ValueError, RecursionError):
        tree = g.choice(_JUNK)
    if blobs and g.random() < 0.3:
        at = g.randrange(len(blobs))
        blobs[at] = blobs[at][: g.randrange(len(blobs[at]) + 1)] + g.choice([b"", b"\x00", b"\xff" * 8, blobs[at]])
        blobs[at] = blobs[at][: 1 << 16]
        if isinstance(tree, dict) and "sizes" in tree and g.random() < 0.8:
            tree = {**tree, "sizes": [len(blob) for blob in blobs]}
    elif g.random() < 0.8:
        tree = mutated(tree, g)
    kind = data[0] % 3 + 3 * g.randrange(len(ASKS)) if g.random() < 0.1 else data[0]
    spoil = g.randrange(8) if g.random() < 0.1 else 0
    text = written(tree, g).encode("utf-8", "surrogatepass")
    return bytes([kind, spoil]) + MARK.join([text[: 1 << 18], *blobs[:6]])


def main() -> None:
    wanted = [READERS.index(sys.argv.pop(1))] if len(sys.argv) > 1 and sys.argv[1] in READERS else [0, 1, 2]
    with tempfile.TemporaryDirectory() as corpus:
        for i, seed in enumerate(seed for seed in SEEDS if seed[0] % 3 in wanted):
            (Path(corpus) / str(i)).write_bytes(seed)

        def custom(data: bytes, limit: int, seed: int) -> bytes:
            g = random.Random(seed)
            if g.random() < 0.3:  # as libFuzzer does it, in all but the first byte
                return data[:1] + atheris.Mutate(data[1:], limit - 1) if len(data) > 1 else data
            for _ in range(g.choice([1, 1, 2, 4])):
                data = mutate(data, g)
            return data[:limit]

        def test(data: bytes) -> None:
            if data and data[0] % 3 not in wanted:  # libFuzzer has changed it
                data = bytes([wanted[0]]) + data[1:]
            one(data)
            if seen and sum(seen.values()) % 20_000 == 0:
                print(dict(seen), flush=True)

        atheris.Setup(
            [*sys.argv, "-max_len=400000", "-timeout=20", "-rss_limit_mb=2048", corpus], test, custom_mutator=custom
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
