"""The image cache: written once, whole or not at all."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from promptfed.data import Dataset, DatasetConfig, cache, load
from promptfed.data import datasets as module
from promptfed.errors import UserError


@pytest.fixture
def pictures(tmp_path: Path, paint) -> Path:
    for i in range(200):
        paint(tmp_path / "pictures" / f"class{i % 4}" / f"{i:03}.png", (i, 0, 0))
    return tmp_path / "pictures"


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_decoded_once(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DatasetConfig(name=str(pictures))
    first = load(config)
    monkeypatch.setattr(module, "pixels", lambda *_: pytest.fail("decoded again"))
    again = load(config)
    assert again.path == first.path
    assert again.fingerprint == first.fingerprint
    assert isinstance(again.images, np.memmap)
    assert entries(cache) == [first.path.name]
    assert entries(first.path) == ["images.bin", "labels.npy", "meta.json"]


def test_changed_source_or_setting_is_another_entry(pictures: Path, paint) -> None:
    first = load(DatasetConfig(name=str(pictures)))
    assert load(DatasetConfig(name=str(pictures), size=4)).path != first.path
    paint(pictures / "class0" / "more.png")
    second = load(DatasetConfig(name=str(pictures)))
    assert len(second) == 201
    assert second.fingerprint != first.fingerprint


def test_sent_to_another_process_as_a_path(pictures: Path) -> None:
    dataset = load(DatasetConfig(name=str(pictures)))
    message = pickle.dumps(dataset)
    assert len(message) < 1000
    assert np.array_equal(pickle.loads(message).images, dataset.images)


def test_interrupted_write_is_never_seen(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(DatasetConfig(name=str(pictures)))
    assert entries(cache) == []
    # a killed process leaves its temporary folder behind, which nobody takes for an entry
    (cache / ".writing-killed").mkdir()
    (cache / ".writing-killed" / "images.bin").write_bytes(b"half")
    assert len(load(DatasetConfig(name=str(pictures)))) == 200


def test_two_writers_of_one_entry(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DatasetConfig(name=str(pictures))
    expected = load(config)
    aside = cache.parent / "aside"
    shutil.move(expected.path, aside)
    finish = module._finish

    def finish_second(*arguments: object) -> None:
        finish(*arguments)  # type: ignore[arg-type]
        shutil.copytree(aside, expected.path)  # the other process is first

    monkeypatch.setattr(module, "_finish", finish_second)
    assert load(config).fingerprint == expected.fingerprint
    assert entries(cache) == [expected.path.name]


def test_full_disk(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_stream", full)
    with pytest.raises(UserError, match=r"image cache .*cache cannot be written \(No space left.*PROMPTFED_CACHE"):
        load(DatasetConfig(name=str(pictures)))
    assert entries(cache) == []


def test_unwritable_cache(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot be written .*PROMPTFED_CACHE"):
        load(DatasetConfig(name=str(pictures)))


def test_few_corrupt_images_are_named_and_skipped(pictures: Path) -> None:
    whole = load(DatasetConfig(name=str(pictures)))
    (pictures / "class1" / "001.png").write_bytes((pictures / "class1" / "001.png").read_bytes()[:40])
    (pictures / "class2" / "002.png").write_bytes(b"")
    for _ in range(2):  # told again when it comes from the cache
        with pytest.warns(UserWarning, match=r"2 corrupt images \(class1/001.png, class2/002.png\)"):
            dataset = load(DatasetConfig(name=str(pictures)))
    assert dataset.skipped == ("class1/001.png", "class2/002.png")
    kept = np.setdiff1d(np.arange(200), [50, 100])
    assert np.array_equal(dataset.images, whole.images[kept])
    assert np.array_equal(dataset.labels, whole.labels[kept])


def test_many_corrupt_images_are_an_error(pictures: Path, cache: Path) -> None:
    for i in (0, 4, 8):
        (pictures / "class0" / f"{i:03}.png").write_bytes(b"no")
    with pytest.raises(UserError, match=r"3 corrupt images \(class0/000.png, .*at most 1 % of 200"):
        load(DatasetConfig(name=str(pictures)))
    assert entries(cache) == []


def test_images_of_different_sizes_ask_for_a_size(pictures: Path, paint) -> None:
    paint(pictures / "class3" / "wide.png", size=(9, 8))
    with pytest.raises(UserError, match=r"dataset.size must be set .*class3/wide.png has 8 x 9 pixels"):
        load(DatasetConfig(name=str(pictures)))
    assert load(DatasetConfig(name=str(pictures), size=16)).images.shape == (201, 3, 16, 16)


def test_limit_is_stratified_and_stable(pictures: Path) -> None:
    first = load(DatasetConfig(name=str(pictures), limit=40))
    assert np.bincount(first.labels).tolist() == [10, 10, 10, 10]
    shutil.rmtree(first.path)
    assert load(DatasetConfig(name=str(pictures), limit=40)).fingerprint == first.fingerprint
    assert len(load(DatasetConfig(name=str(pictures), limit=1000))) == 200


def test_normalisation_is_computed_or_given(pictures: Path) -> None:
    dataset = load(DatasetConfig(name=str(pictures)))
    assert dataset.mean == pytest.approx(np.asarray(dataset.images).mean((0, 2, 3)) / 255, abs=1e-4)
    assert dataset.std[0] == pytest.approx(np.asarray(dataset.images)[:, 0].std() / 255, abs=1e-4)
    assert min(dataset.std) > 0
    given = load(DatasetConfig(name=str(pictures), mean=(0.5,), std=(0.1, 0.2, 0.3)))
    assert (Dataset.open(given.path).mean, given.std) == ((0.5, 0.5, 0.5), (0.1, 0.2, 0.3))
    with pytest.raises(UserError, match=r"dataset.mean = .* must hold 1 or 3 values"):
        load(DatasetConfig(name=str(pictures), mean=(0.5, 0.5)))
    with pytest.raises(UserError, match=r"dataset.std = .* must be above 0"):
        load(DatasetConfig(name=str(pictures), std=(0.5, 0, 0.5)))


def test_own_arrays(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (600, 3, 5, 4), dtype=np.uint8)
    labels = np.arange(600) % 2
    dataset = Dataset.from_arrays("mine", images, labels, ("a", "b"), domains=("x",), domain=np.zeros(600))
    assert np.array_equal(dataset.images, images)
    assert dataset.domain is not None
    assert dataset.domain.dtype == np.int64
    assert (
        Dataset.from_arrays("mine", images, labels, ("a", "b"), domains=("x",), domain=np.zeros(600)).path
        == dataset.path
    )
    assert Dataset.from_arrays("mine", images, labels, ("a", "c")).fingerprint != dataset.fingerprint
    assert Dataset.from_arrays("mine", images, labels, ("a", "b"), path=tmp_path / "x").path == tmp_path / "x"
    assert len(Dataset.from_arrays("mine", images[:9], labels[:9], ("a", "b"), path=tmp_path / "x")) == 9


def test_a_folder_that_holds_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("four years")
    with pytest.raises(UserError, match="cannot be written"):
        Dataset.from_arrays("mine", np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2), ("a",), path=tmp_path)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((4, 3, 2, 2))}, "images must be uint8"),
        ({"images": np.zeros((4, 2, 2, 3), np.uint8)}, "C = 1 or 3"),
        ({"labels": np.array([0, 1])}, "labels must hold one integer for each of the 4 images"),
        ({"labels": np.array([0, 1, 2, 0])}, r"labels must lie in 0\.\.1"),
        ({"domain": np.zeros(4)}, "domain and domains must be given together"),
        ({"sites": ("s",), "site": np.ones(4)}, "site must hold an index into sites"),
        ({"split": np.full(4, 3)}, "split must hold 0, 1 or 2"),
    ],
)
def test_bad_arrays(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"images": np.zeros((4, 3, 2, 2), np.uint8), "labels": np.array([0, 1, 1, 0])}
    with pytest.raises(UserError, match=message):
        Dataset.from_arrays("bad", classes=("a", "b"), **{**good, **change})  # type: ignore[arg-type]


def test_damaged_entry_is_told(pictures: Path) -> None:
    dataset = load(DatasetConfig(name=str(pictures)))
    meta = json.loads((dataset.path / "meta.json").read_text())
    (dataset.path / "images.bin").write_bytes(b"short")
    with pytest.raises(UserError, match=r"delete it and load the dataset again"):
        Dataset.open(dataset.path)
    assert meta["shape"] == [200, 3, 8, 8]


def test_old_leftovers_are_swept(cache: Path, pictures: Path) -> None:
    import os

    left = cache / ".writing-old"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    load(DatasetConfig(name=str(pictures)))
    assert not left.exists()


def test_slug() -> None:
    assert cache.slug("uoft-cs/cifar10") == "cifar10"
    assert cache.slug("/data/My set!/") == "My-set-"
