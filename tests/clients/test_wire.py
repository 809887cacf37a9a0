"""What travels: safetensors and a note, nothing else."""

import io
import json
import pickle

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from promptfed.clients.wire import pack, unpack

TENSORS = {
    "float32": torch.tensor([[1.5, -2.0], [0.0, 3e38]]),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "float16": torch.tensor([0.1, 2.0], dtype=torch.float16),
    "bfloat16": torch.tensor([0.1, 2.0], dtype=torch.bfloat16),
    "int64": torch.tensor([2**40, -1]),
    "uint8": torch.tensor([[0, 255]], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7.0),
    "nothing": torch.zeros(0, 3),
    "ß/ü.ñ": torch.tensor([1.0]),
}


def test_tensors_survive_with_names_dtypes_and_shapes() -> None:
    found, note = unpack(pack(TENSORS))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert note == {}


@pytest.mark.parametrize("params", [{}, {"w": torch.ones(2)}])
def test_notes_survive(params: dict[str, torch.Tensor]) -> None:
    note = {"round": 3, "text": 'a "quoted" ü', "list": [1, 2.5, None, True], "nested": {"x": {}}}
    found, read = unpack(pack(params, note))
    assert read == note
    assert found.keys() == params.keys()


def test_nothing_to_say_is_no_bytes() -> None:
    assert pack({}) == b""
    assert pack({}, {}) == b""
    assert unpack(b"") == ({}, {})


def test_non_finite_numbers_survive() -> None:
    found, _ = unpack(pack({"w": torch.tensor([float("nan"), float("inf"), -float("inf")])}))
    assert found["w"].isnan().tolist() == [True, False, False]
    assert found["w"][1:].tolist() == [float("inf"), -float("inf")]


def test_views_and_gradients_are_sent_as_plain_values() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    params = {"column": whole[:, 1], "transposed": whole.T, "trained": torch.ones(2, requires_grad=True) * 2}
    found, _ = unpack(pack(params))
    assert found["column"].tolist() == [1, 5, 9]
    assert torch.equal(found["transposed"], whole.T)
    assert found["trained"].tolist() == [2, 2]
    assert not found["trained"].requires_grad


def test_a_blob_holds_exactly_the_named_tensors() -> None:
    """8 bytes of length, a JSON header, and the tensors' bytes without a gap: there is no room for anything else."""
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    blob = pack(params, {"round": 1})
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    assert header.pop("__metadata__") == {"promptfed": '{"round": 1}'}
    assert header.keys() == params.keys()
    body = blob[8 + size :]
    assert len(body) == 3 * 4
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert body[begin:end] == params[name].numpy().tobytes()


def test_a_few_selected_columns_do_not_bring_the_rest_along() -> None:
    secret = torch.full((1000,), 42.0)
    secret[:2] = 0
    assert torch.tensor(42.0).numpy().tobytes() not in pack({"w": secret[:2]})


def test_the_safetensors_library_reads_a_blob_by_itself() -> None:
    found = load(pack(TENSORS, {"x": 1}))
    assert found.keys() == TENSORS.keys()
    assert torch.equal(found["float32"], TENSORS["float32"])


@pytest.mark.parametrize("note", [{}, {"round": 1, "text": "ü"}])
def test_fp32_is_packed_to_the_bytes_of_the_library(note: dict[str, object]) -> None:
    """pack() writes them by itself."""
    g = torch.Generator().manual_seed(0)
    shapes = {"b.weight": (3, 2), "a": (5,), "scalar": (), "nothing": (0, 3), "ß\n": (1,), "odd": (7,)}
    params = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    params["turned"] = params["b.weight"].T
    plain = {name: p.clone(memory_format=torch.contiguous_format) for name, p in params.items()}
    assert pack(params, note) == save(plain, {"promptfed": json.dumps(note, sort_keys=True)})


def test_pickled_and_cut_off_bytes_are_refused() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('unpickled')",)

    buffer = io.BytesIO()
    torch.save({"w": torch.ones(1)}, buffer)
    for blob in (pickle.dumps(Evil()), buffer.getvalue(), pack(TENSORS)[:-1], pack(TENSORS)[:20]):
        with pytest.raises((ValueError, SafetensorError)):
            unpack(blob)


def test_equal_content_is_equal_bytes() -> None:
    note = {"b": 1, "a": 2}
    assert pack(TENSORS, note) == pack(dict(TENSORS), dict(reversed(note.items())))


def test_one_tensor_under_two_names_is_sent_under_both() -> None:
    """FedMTL sends the mean twice to a client that has no model yet."""
    w = torch.tensor([1.0, 2.0])
    found, _ = unpack(pack({"own": w, "mean.own": w}))
    assert found["own"].tolist() == found["mean.own"].tolist() == [1, 2]


def test_tensors_come_back_in_one_order_and_aligned() -> None:
    """Sums round by their order, and products by alignment: what is read twice must give the same bits."""
    blob = pack({f"descriptor.{i}": torch.full((3,), float(i)) for i in range(40)})
    for _ in range(5):
        tensors, _note = unpack(blob)
        assert list(tensors) == sorted(tensors)
        assert all(p.data_ptr() % 64 == 0 for p in tensors.values())
