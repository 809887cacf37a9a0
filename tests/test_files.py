import stat
import subprocess
import sys
from pathlib import Path

import pytest

from promptfed import files

_WRITER = """
import sys
from pathlib import Path
from promptfed import files
for _ in range(400):
    files.write(Path(sys.argv[1]), sys.argv[2].encode() * 1000)
"""
_HOLDER = """
import sys
from pathlib import Path
from promptfed import files
with files.lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_two_processes_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), letter]) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert path.read_text() in ("a" * 1000, "b" * 1000)
    assert list(tmp_path.iterdir()) == [path]


def test_write_replaces_a_file_in_one_step(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    files.write(file, b"one")
    held = file.open("rb")
    files.write(file, b"two")
    assert held.read() == b"one"  # a reader of the old file has the old file
    held.close()
    assert file.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write(path, b"old")
    monkeypatch.setattr("os.fsync", _no_space)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, b"new")
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "key", b"secret", new=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    files.write(tmp_path / "secret", b"", private=True)
    files.write(tmp_path / "open", b"")
    assert _mode(tmp_path / "secret") == 0o600
    (tmp_path / "usual").touch()
    assert _mode(tmp_path / "open") == _mode(tmp_path / "usual")


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    files.write(tmp_path / "key", b"first", new=True)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "key", b"second", new=True)
    assert (tmp_path / "key").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        for shared in (False, True):
            with pytest.raises(files.Locked), files.lock(path, shared=shared, seconds=0):
                raise AssertionError("another process has the lock")
        holder.communicate()
    with files.lock(path, shared=True, seconds=0), files.lock(path, shared=True, seconds=0):
        pass  # readers hold it together
    with pytest.raises(FileNotFoundError), files.lock(tmp_path / "missing", shared=True):
        raise AssertionError("there is nothing to lock")
