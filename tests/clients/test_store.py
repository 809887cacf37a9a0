"""What clients remember: newest before a round, idempotent, on disk, shared by processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from limits import HANG
from promptfed.clients.store import Store
from promptfed.errors import UserError
from promptfed.params import Params


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "clients")
    yield store
    store.close()


def value(number: float) -> Params:
    return {"private/prompt": torch.tensor([number])}


def get(store: Store, client: int, before: int) -> float | None:
    found = store.get(client, before)
    return found["private/prompt"].item() if found else None


def test_an_unknown_client_remembers_nothing(store: Store) -> None:
    assert store.get(0, 1) == {}
    store.put(1, {1: value(1), 3: value(3)})
    # Neighbours on both sides, and before the first value of a client that has one.
    for client in (0, 2, 4):
        assert store.get(client, 100) == {}
    assert store.get(1, 1) == {}
    assert store.get(3, 1) == {}


def test_the_newest_value_from_before_a_round_is_found(store: Store) -> None:
    store.put(2, {7: value(2)})
    store.put(5, {7: value(5)})
    assert [get(store, 7, before) for before in (1, 2, 3, 5, 6, 1000)] == [None, None, 2, 2, 5, 5]


def test_training_a_round_again_starts_from_what_was_known_before_it(store: Store) -> None:
    store.put(1, {0: value(1)})
    store.put(2, {0: value(2)})
    for _ in range(3):
        assert get(store, 0, 2) == 1
        store.put(2, {0: value(2)})
    assert get(store, 0, 3) == 2
    assert len(store) == 2


def test_a_round_put_twice_holds_the_second_value(store: Store) -> None:
    store.put(1, {0: value(1)})
    store.put(2, {0: value(2)})
    store.put(2, {0: value(22)})
    assert get(store, 0, 2) == 1
    assert get(store, 0, 3) == 22


def test_values_of_later_rounds_are_dropped_when_an_earlier_one_is_put(store: Store) -> None:
    store.put(1, {0: value(1)})
    store.put(5, {0: value(5)})
    store.put(3, {0: value(3)})
    assert [get(store, 0, before) for before in (2, 4, 100)] == [1, 3, 3]


def test_only_two_versions_are_kept(store: Store) -> None:
    for round in range(1, 8):
        store.put(round, {0: value(round), 9: value(-round)})
        assert len(store) <= 4
    assert len(store) == 4
    assert [get(store, 0, before) for before in (6, 7, 8)] == [None, 6, 7]
    assert [get(store, 9, before) for before in (6, 7, 8)] == [None, -6, -7]


def test_clients_do_not_disturb_each_other(store: Store) -> None:
    """Large and neighbouring numbers: the order on disk is that of (client, round), not of strings."""
    clients = [300, 2, 10, 255, 256, 1, 2**33, 0]
    for round in (9, 10, 255, 256):
        store.put(round, {client: value(client % 1000 + round) for client in clients})
    for client in clients:
        assert get(store, client, 1000) == client % 1000 + 256
        assert get(store, client, 256) == client % 1000 + 255
    assert len(store) == 2 * len(clients)


def test_values_survive_reopening_bit_by_bit(tmp_path: Path) -> None:
    params = {"private/a": torch.randn(3, 4), "memory/b": torch.arange(5), "private/c": torch.tensor(1.5).double()}
    store = Store(tmp_path / "clients")
    store.put(1, {4: params})
    store.close()
    again = Store(tmp_path / "clients")
    found = again.get(4, 2)
    again.close()
    assert found.keys() == params.keys()
    for name, p in params.items():
        assert found[name].dtype == p.dtype
        assert torch.equal(found[name], p)


def test_a_value_read_owns_its_memory(store: Store) -> None:
    store.put(1, {0: value(1)})
    found = store.get(0, 2)
    found["private/prompt"].add_(100)
    store.put(2, {0: value(2)})
    assert get(store, 0, 2) == 1
    assert found["private/prompt"].item() == 101


def test_a_put_that_fails_changes_nothing(store: Store) -> None:
    store.put(1, {0: value(1), 1: value(10)})
    with pytest.raises(AttributeError):
        store.put(2, {0: value(2), 1: {"private/prompt": None}})  # type: ignore[dict-item]
    assert get(store, 0, 3) == 1
    assert get(store, 1, 3) == 10


WRITER = """
import sys
from pathlib import Path
import torch
from promptfed.clients.store import Store

store, first = Store(Path(sys.argv[1])), int(sys.argv[2])
for round in range(1, 16):
    store.put(round, {client: {"w": torch.tensor([client * 100.0 + round])} for client in range(first, 20, 2)})
    assert store.get(first, round)["w"].item() == first * 100 + round - 1 if round > 1 else not store.get(first, round)
"""


def test_two_processes_write_at_once(tmp_path: Path, store: Store) -> None:
    store.put(1, {99: value(99)})
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "clients"), str(i)]) for i in (0, 1)]
    assert [writer.wait(timeout=HANG) for writer in writers] == [0, 0]
    # What they wrote is seen by a process that had the store open all along.
    for client in range(20):
        assert store.get(client, 16)["w"].item() == client * 100 + 15
        assert store.get(client, 15)["w"].item() == client * 100 + 14
    assert get(store, 99, 2) == 99
    assert len(store) == 41


def test_a_file_that_is_no_store_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1000)
    with pytest.raises(UserError, match="cannot be opened"):
        Store(tmp_path)
