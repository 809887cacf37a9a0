"""Every file of a run's folder, damaged in four ways: what is said is one sentence, and nothing is lost."""

import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import promptfed
from promptfed.errors import UserError
from promptfed.params import digest
from promptfed.runs.record import read_checkpoint

SETTINGS = {
    "method": {"name": "fedper", "epochs": 1},
    "dataset": {"name": "digits", "limit": 60, "size": 16},
    "partition": {"name": "iid", "clients": 2},
    "backbone": "cnn-code",
    "privacy": {"clip": 1.0},
    "engine": {"workers": 1},
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "flipped": lambda file: file.write_bytes(flipped(file.read_bytes())),
    "emptied": lambda file: file.write_bytes(b""),
    "removed": lambda file: file.unlink(),
}
FILES = (
    *("config.toml", "partition.json", "rounds.jsonl", "asked.jsonl", "result.json", "clients/data.mdb"),
    *("checkpoint.safetensors", "checkpoint.previous.safetensors"),
)
# What may be damaged without a word: it is written again, or not needed.
REMADE = {
    *(("result.json", damage) for damage in DAMAGES),
    *(("checkpoint.previous.safetensors", damage) for damage in DAMAGES),
    ("partition.json", "removed"),  # drawn again, and compared
}


def flipped(content: bytes) -> bytes:
    """One bit of a byte in the middle; of LMDB's pages, which hold old values too, one in each after the first two."""
    pages = range(2 * 4096 + 2000, len(content), 4096)
    changed = bytearray(content)
    for at in pages if len(pages) > 5 else [len(content) // 2]:
        changed[at] ^= 2
    return bytes(changed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("runs") / "whole"
        promptfed.run(**SETTINGS, rounds=3, out=folder)
        yield folder


def test_these_are_all_files(whole):
    ours = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    assert ours - {".lock", "clients/lock.mdb"} == set(FILES)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_resumed_after_damage(whole, tmp_path, name, damage, recwarn):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    DAMAGES[damage](folder / name)
    said = []
    try:
        result = promptfed.run(out=folder, resume=True, rounds=4)
    except UserError as error:
        said.append(str(error))
        assert name not in ("checkpoint.safetensors", "checkpoint.previous.safetensors", "result.json")
    else:
        assert result.numbers["rounds"] == 4
        said += [str(warning.message) for warning in recwarn]
    told = [sentence for sentence in said if Path(name).name in sentence]
    assert bool(told) is ((name, damage) not in REMADE), said
    assert not any("\n" in sentence.strip() for sentence in told)
    with suppress(UserError):  # reading it ends in a model or in one sentence too
        promptfed.load(folder, client=0)


def test_an_edited_setting_is_named_and_refused(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    config = folder / "config.toml"
    text = config.read_text()
    assert "lr = 0.005" in text
    config.write_text(text.replace("lr = 0.005", "lr = 0.5", 1))
    with pytest.raises(UserError, match=r"was changed since round 3: method.lr = 0.5, not 0.005; change it back"):
        promptfed.run(out=folder, resume=True, rounds=4)
    config.write_text(text.replace('precision = "fp32"', 'precision = "bf16"'))
    with pytest.raises(
        UserError, match=r"was changed since round 3: engine.precision = bf16, not fp32; change it back"
    ):
        promptfed.run(out=folder, resume=True, rounds=4)
    config.write_text(text)
    assert promptfed.run(out=folder, resume=True, rounds=4).numbers["rounds"] == 4


@pytest.mark.parametrize("room", [200, 5_000, 40_000, 300_000])
def test_a_run_without_room_stops_with_a_sentence_and_goes_on_when_there_is(whole, tmp_path, room):
    """No file may grow beyond `room` bytes, as on a disk that is full: the first write that needs more fails."""
    folder, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(UserError, match=r"make room") as refused:
            promptfed.run(**SETTINGS, rounds=3, out=folder, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(refused.value)
    begun = (folder / "config.toml").exists()
    promptfed.run(**({} if begun else SETTINGS), rounds=3, out=folder, resume=begun, progress=False)
    checkpoints = [read_checkpoint(path) for path in (folder, whole)]
    assert digest(checkpoints[0].state) == digest(checkpoints[1].state)
