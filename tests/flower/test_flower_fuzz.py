"""Whatever a stranger sends is read as it was written, or is Malformed: in one line, soon, and in little memory.

The cases and what is allowed of them are those of tests/fuzz/flower_wire.py, which runs for much longer.
"""

import json
import math
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from fuzz import flower_wire as fuzz
from limits import HANG
from promptfed.clients.messages import Enroll, Evaluate, Recipient, Request, Second, Train
from promptfed.clients.wire import pack
from promptfed.flower.wire import (
    LIMITS,
    Malformed,
    array,
    read_answer,
    read_request,
    tensors,
    write_answer,
    write_request,
)

SOME = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TESTS = Path(__file__).parents[1]

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
names = text.filter(lambda name: name != "__metadata__")
counts = st.integers(0, 1 << 53)
few = st.lists(st.integers(0, 1 << 48), max_size=5)
losses = st.floats(min_value=0.0) | st.just(math.nan)
score = st.builds(  # every sample that is missed in one class is found in another
    lambda loss, tp, fp: {"n": sum(tp + fp), "loss": loss, "tp": tp, "fp": fp, "fn": fp[::-1]}, losses, few, few
)
scores = st.fixed_dictionaries({"val": score, "test": score, "pooled": score})
trained = st.fixed_dictionaries({"client": counts, "n": counts, "passes": counts, "loss": st.floats()})
evaluated = st.fixed_dictionaries({"client": counts, "passes": counts})
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8])


@st.composite
def held(draw):
    """Tensors of any kind."""
    found = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        shape, dtype = draw(st.lists(st.integers(0, 3), max_size=4)), draw(dtypes)
        size = math.prod(shape)
        found[name] = (
            torch.tensor(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))).reshape(shape).to(dtype)
        )
    return found


@st.composite
def requests(draw):
    blobs = list(map(pack, draw(st.lists(held(), min_size=1, max_size=3))))
    index = st.integers(0, len(blobs) - 1)
    rounds = st.integers(0, (1 << 32) - 1)
    task = draw(
        st.one_of(
            st.builds(Enroll),
            st.builds(Second, round=rounds),
            st.builds(Train, round=rounds, score=st.booleans()),
            st.builds(Evaluate, as_of=rounds, pooled=st.booleans(), after_local=st.booleans()),
        )
    )
    once = draw(st.dictionaries(text, digests, max_size=3))
    to = Recipient(client=draw(counts), blob=draw(index), once=once)
    return Request(task=task, clients=[to], new=draw(st.dictionaries(digests, index, max_size=3))), blobs


answers = st.one_of(
    st.tuples(st.just("train"), st.builds(lambda a, b: {"result": {**a, "after_local": b}}, trained, scores)),
    st.tuples(
        st.just("evaluate"),
        st.builds(lambda a, b: {"result": {**a, "scores": b, "groups": [[b["test"]["n"]]]}}, evaluated, scores),
    ),
    st.tuples(st.sampled_from(list(fuzz.TASKS)), st.fixed_dictionaries({"error": text})),
)


# ---- what is written is read


@SOME
@given(requests())
def test_a_request_is_read_as_it_was_written(case):
    request, blobs = case
    asked, found = read_request(write_request(request, list(map(array, blobs))))
    assert (asked.note, found) == (request, blobs)


@SOME
@given(answers, held())
def test_an_answer_is_read_as_it_was_written(case, tensors):
    ask, note = case
    blobs = [pack(tensors)] if ask == "train" and "error" not in note else []
    content = fuzz.content(json.dumps(fuzz.head(note, blobs)), blobs, 0)
    found, got = read_answer(content, fuzz.TASKS[ask])
    result = found.result and found.result.model_dump(exclude_defaults=True)
    assert json.dumps(result, sort_keys=True) == json.dumps(note.get("result"), sort_keys=True)  # NaN is part of it
    assert found.error == note.get("error", "")
    assert got == blobs
    again = read_answer(write_answer(found.result, found.error, list(map(array, blobs))), fuzz.TASKS[ask])
    assert repr(again) == repr((found, got))


@SOME
@given(held())
def test_tensors_are_read_as_they_were_packed(params):
    found = tensors(pack(params))
    assert set(found) == set(params)
    for name, p in params.items():
        assert found[name].dtype == p.dtype
        assert torch.equal(found[name], p)


# ---- whatever else is sent


@SOME
@given(st.sampled_from(fuzz.SEEDS), st.integers(1, 5), st.randoms(use_true_random=False))
def test_messages_with_a_few_things_changed_are_read_or_malformed(data, times, g):
    for _ in range(times):
        data = fuzz.mutate(data, g)
    tracemalloc.start()
    try:
        fuzz.one(data)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


@SOME
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_malformed(data):
    fuzz.one(data)


def test_the_cases_reach_what_is_to_be_tested():
    """Of the cases that are made from valid messages, both outcomes are many, of each reader."""
    g = random.Random(3)
    fuzz.seen.clear()
    for seed in fuzz.SEEDS:
        fuzz.one(seed)
    assert set(fuzz.seen) == {f"{reader} read" for reader in fuzz.READERS}
    for _ in range(100):
        for seed in fuzz.SEEDS:
            fuzz.one(fuzz.mutate(seed, g))
    for reader in fuzz.READERS:
        assert min(fuzz.seen[f"{reader} read"], fuzz.seen[f"{reader} malformed"]) > 5


# ---- the largest there are


def test_the_largest_messages_take_little_time_and_memory():
    """In a process of its own, whose peak is its own. fuzz.one() has the bound on time."""
    command = [sys.executable, str(TESTS / "fuzz" / "largest.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name, (outcome, _, _) in found.items() if outcome.endswith(" read")} == {"numbers", "tensors"}
    assert max(megabytes for _, _, megabytes in found.values()) < 500, found


def test_json_beyond_the_limits_is_counted_and_not_parsed():
    many = ",".join("[]" for _ in range(LIMITS.parts))
    with pytest.raises(Malformed, match=f"more than {LIMITS.parts} parts"):
        read_request(fuzz.content(f"[{many}]", [], 0))
    header = ",".join('"a": 1' for _ in range(8 * LIMITS.tensors + 9)).encode()
    with pytest.raises(Malformed, match=f"more than {LIMITS.tensors} tensors"):
        tensors(len(header).to_bytes(8, "little") + header)
