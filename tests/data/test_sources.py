"""Every source of images, on files written here."""

import gzip
import io
import os
import struct
from pathlib import Path

import datasets as hf
import numpy as np
import pytest
from PIL import Image

from promptfed.data import CATALOGUE, DatasetConfig, load
from promptfed.data.images import Resize, pixels
from promptfed.data.sources import Source
from promptfed.errors import UserError


def test_digits_are_embedded() -> None:
    dataset = load(DatasetConfig())
    assert dataset.images.shape == (1797, 3, 32, 32)
    assert dataset.images.dtype == np.uint8
    assert dataset.images.max() > 240
    assert dataset.classes == tuple("0123456789")
    assert (dataset.mean, dataset.std) == ((0.5,) * 3, (0.5,) * 3)
    assert not dataset.images.flags.writeable


def test_digits_in_grey_and_their_own_size() -> None:
    dataset = load(DatasetConfig(channels=1, size=8))
    assert dataset.images.shape == (1797, 1, 8, 8)
    assert dataset.mean == (0.5,)
    assert set(np.unique(dataset.images)) <= {round(v * 255 / 16) for v in range(17)}


def write_idx(path: Path, array: np.ndarray, zipped: bool) -> None:
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize(("prefix", "zipped"), [("", False), ("", True), ("emnist-letters-", True)])
def test_idx_folder(tmp_path: Path, prefix: str, zipped: bool) -> None:
    images = np.arange(5 * 4 * 4).reshape(5, 4, 4)
    end = ".gz" if zipped else ""
    for split, part, labels in (("train", images[:3], [1, 2, 3]), ("t10k", images[3:], [3, 1])):
        write_idx(tmp_path / f"{prefix}{split}-images-idx3-ubyte{end}", part, zipped)
        write_idx(tmp_path / f"{prefix}{split}-labels-idx1-ubyte{end}", np.array(labels), zipped)
    dataset = load(DatasetConfig(name=str(tmp_path), channels=1))
    assert np.array_equal(dataset.images[:, 0], images)
    assert [dataset.classes[i] for i in dataset.labels] == ["1", "2", "3", "3", "1"]
    assert dataset.split is not None
    assert dataset.split.tolist() == [0, 0, 0, 2, 2]
    assert len(load(DatasetConfig(name=str(tmp_path), splits="test"))) == 2


def test_broken_idx_is_told(tmp_path: Path) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((3, 4, 4)), False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08")
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte is not a complete idx file"):
        load(DatasetConfig(name=str(tmp_path)))
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"lacks the label file train-labels-idx1-ubyte"):
        load(DatasetConfig(name=str(tmp_path)))


@pytest.mark.skipif(not Path(CATALOGUE["fashion-mnist"].folder or "").is_dir(), reason="package is not installed")
def test_fashion_mnist_of_the_system() -> None:
    dataset = load(DatasetConfig(name="fashion-mnist", limit=500))
    assert dataset.images.shape == (500, 3, 32, 32)
    assert dataset.classes[9] == "ankle boot"
    assert np.bincount(dataset.labels).min() >= 49


def test_class_folders(tmp_path: Path, paint) -> None:
    for name, colour in (("zebra", (255, 0, 0)), ("ant", (0, 255, 0)), ("ant", (0, 0, 255))):
        paint(tmp_path / "pics" / name / f"{colour[2]}.png", colour)
    paint(tmp_path / "pics" / "ant" / ".hidden.png")
    paint(tmp_path / "pics" / ".git" / "x.png")
    (tmp_path / "pics" / "ant" / "notes.txt").write_text("not an image")
    dataset = load(DatasetConfig(name=str(tmp_path / "pics")))
    assert dataset.classes == ("ant", "zebra")
    assert dataset.labels.tolist() == [0, 0, 1]
    assert dataset.images[:, :, 0, 0].tolist() == [[0, 255, 0], [0, 0, 255], [255, 0, 0]]
    assert dataset.name == "pics"
    assert dataset.mean == (0.3333,) * 3


def test_pipes_among_images_are_not_read(tmp_path: Path, paint) -> None:
    for name in ("cat/a.png", "dog/b.png"):
        paint(tmp_path / name)
    os.mkfifo(tmp_path / "cat" / "c.png")
    os.mkfifo(tmp_path / "train-images-idx3-ubyte")
    assert len(load(DatasetConfig(name=str(tmp_path), size=8))) == 2


def test_split_folders_are_pooled(tmp_path: Path, paint) -> None:
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for i in range(count):
            paint(tmp_path / split / "cat" / f"{i}.png")
    assert len(load(DatasetConfig(name=str(tmp_path)))) == 6
    assert len(load(DatasetConfig(name=str(tmp_path), splits="val"))) == 2
    dataset = load(DatasetConfig(name=str(tmp_path)))
    assert dataset.domains == ()
    assert dataset.split is not None
    assert np.bincount(dataset.split).tolist() == [3, 2, 1]


def test_domain_folders(tmp_path: Path, paint) -> None:
    for domain in ("web", "art"):
        for name in ("cup", "bag"):
            paint(tmp_path / domain / name / "0.jpg")
    dataset = load(DatasetConfig(name=str(tmp_path)))
    assert dataset.domains == ("art", "web")
    assert dataset.domain is not None
    assert dataset.domain.tolist() == [0, 0, 1, 1]
    assert dataset.labels.tolist() == [0, 1, 0, 1]
    assert dataset.split is None


def test_client_folders(tmp_path: Path, paint) -> None:
    for client in ("bern", "aarau"):
        for split in ("train", "val", "test"):
            paint(tmp_path / client / split / "cup" / "0.png")
    dataset = load(DatasetConfig(name=str(tmp_path)))
    assert dataset.sites == ("aarau", "bern")
    assert dataset.site is not None
    assert dataset.split is not None
    assert dataset.site.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.split.tolist() == [2, 0, 1, 2, 0, 1]


def test_folders_without_images_are_told(tmp_path: Path, paint) -> None:
    """With them a site or a class is gone; a class that other sites have is not."""
    data = tmp_path / "data"
    for client in ("bern", "aarau"):
        paint(data / client / "train" / "cup" / "0.png")
    paint(data / "bern" / "test" / "bag" / "0.png")
    for empty in ("chur/train/cup", "bern/train/hat", "aarau/test/bag"):
        (data / empty).mkdir(parents=True)
    with pytest.warns(UserWarning, match=r'has 2 folders without images, .* left out: "chur", "bern/train/hat"$'):
        assert load(DatasetConfig(name=str(data))).sites == ("aarau", "bern")
    with pytest.warns(UserWarning, match="2 folders without images"):  # also when it is in the cache
        load(DatasetConfig(name=str(data)))


def test_an_empty_class_is_told(tmp_path: Path, paint) -> None:
    paint(tmp_path / "data" / "cup" / "0.png")
    (tmp_path / "data" / "hat").mkdir()
    with pytest.warns(UserWarning, match=r'has a folder without images, which is left out: "hat"$'):
        assert load(DatasetConfig(name=str(tmp_path / "data"))).classes == ("cup",)


def test_folders_of_no_known_layout(tmp_path: Path, paint) -> None:
    with pytest.raises(UserError, match=r"holds no images; allowed layouts: class/"):
        load(DatasetConfig(name=str(tmp_path)))
    paint(tmp_path / "a" / "0.png")
    paint(tmp_path / "b" / "c" / "0.png")
    with pytest.raises(UserError, match=r"mixed or unknown depths"):
        load(DatasetConfig(name=str(tmp_path)))


def table(n: int, **columns: object) -> hf.Dataset:
    images = [Image.new("RGB", (6, 6), (i, 0, 0)) for i in range(n)]
    features = hf.Features({"img": hf.Image()})
    rows: dict[str, object] = {"img": images}
    for name, value in columns.items():
        rows[name], features[name] = value  # type: ignore[misc]
    return hf.Dataset.from_dict(rows, features=features)


LETTERS = hf.ClassLabel(names=["z", "a"])


def test_parquet_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "set" / "data").mkdir(parents=True)
    train, test = table(3, label=([0, 1, 1], LETTERS)), table(2, label=([0, -1], LETTERS))
    train.to_parquet(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    test.to_parquet(tmp_path / "set" / "data" / "test-00000-of-00001.parquet")
    dataset = load(DatasetConfig(name=str(tmp_path / "set")))
    assert dataset.classes == ("z", "a")  # as the source orders them
    assert dataset.labels.tolist() == [0, 1, 1, 0]  # the unlabelled one is left out
    assert dataset.images[:, 0, 0, 0].tolist() == [0, 1, 2, 0]
    assert dataset.split is not None
    assert dataset.split.tolist() == [0, 0, 0, 2]
    assert len(load(DatasetConfig(name=str(tmp_path / "set"), splits="train"))) == 3
    with pytest.raises(UserError, match=r"has no split val, only train, test"):
        load(DatasetConfig(name=str(tmp_path / "set"), splits="val"))


def test_single_file_and_saved_dataset(tmp_path: Path) -> None:
    both = table(4, label=(["b", "a", "a", "b"], hf.Value("string")), domain=([0, 0, 1, 1], hf.Value("int64")))
    both.to_parquet(tmp_path / "x.parquet")
    both.save_to_disk(tmp_path / "saved")
    for name in ("x.parquet", "saved"):
        dataset = load(DatasetConfig(name=str(tmp_path / name)))
        assert dataset.classes == ("a", "b")
        assert dataset.labels.tolist() == [1, 0, 0, 1]
        assert dataset.domains == ("0", "1")
        assert dataset.domain is not None
        assert dataset.domain.tolist() == [0, 0, 1, 1]


def test_columns_are_found_by_type_or_asked_for(tmp_path: Path) -> None:
    table(2, fine=([0, 1], LETTERS), coarse=([1, 0], LETTERS)).to_parquet(tmp_path / "two.parquet")
    name = str(tmp_path / "two.parquet")
    with pytest.raises(UserError, match=r"dataset.label_column must be set .* fine or coarse"):
        load(DatasetConfig(name=name))
    with pytest.raises(UserError, match=r'dataset.label_column = "fin" is not a column .*allowed: img, fine, coarse'):
        load(DatasetConfig(name=name, label_column="fin"))
    assert load(DatasetConfig(name=name, label_column="coarse")).labels.tolist() == [1, 0]
    table(2, words=(["x", "y"], hf.Value("string"))).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"none of its columns .* is clearly a label"):
        load(DatasetConfig(name=str(tmp_path / "none.parquet")))


def test_broken_parquet_is_told(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match=r"x.parquet. cannot be read"):
        load(DatasetConfig(name=str(tmp_path / "x.parquet")))
    assert list(cache.iterdir()) == []


def test_corrupt_cell_of_a_table_is_skipped(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    cells = [{"bytes": buffer.getvalue(), "path": None}] * 150
    cells[7] = {"bytes": b"broken", "path": None}
    rows = hf.Dataset.from_dict({"image": cells, "label": [0] * 150}).cast_column("image", hf.Image(decode=False))
    rows.cast_column("image", hf.Image()).to_parquet(tmp_path / "x.parquet")
    with pytest.warns(UserWarning, match=r"1 corrupt image \(train\[7\]\)"):
        dataset = load(DatasetConfig(name=str(tmp_path / "x.parquet")))
    assert len(dataset) == len(dataset.images) == 149
    assert dataset.skipped == ("train[7]",)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    for name in ("cifar10", "uoft-cs/cifar10"):
        with pytest.raises(
            UserError, match=r'"uoft-cs/cifar10" was asked for but the hub cannot be reached; pass a local'
        ):
            load(DatasetConfig(name=name))


def test_hub_download_of_before_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route")

    snapshot = tmp_path / "snapshots" / "abc"
    (snapshot / "data").mkdir(parents=True)
    table(3, label=([0, 1, 1], LETTERS)).to_parquet(snapshot / "data" / "train-00000-of-00001.parquet")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    assert load(DatasetConfig(name="some/thing")).labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifra10", 'dataset.name = "cifra10" is unknown; did you mean "cifar10"?'),
        ("/no/such/place", 'dataset.name = "/no/such/place" does not exist'),
        ("office-caltech10", "has to be fetched by hand: .* domain/class/"),
        ("msk", "ISIC archive"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        load(DatasetConfig(name=name))


def test_catalogue_entries_say_where_from() -> None:
    for name, entry in CATALOGUE.items():
        assert name in ("digits", "shapes", "parts") or (entry.hub is None) != (entry.manual is None), name
        assert len(entry.mean) == len(entry.std) == 3
        assert len(entry.names) in (0, entry.classes)
        assert len(entry.keep) in (0, entry.classes)


def test_keep_and_rename() -> None:
    source = Source(
        labels=np.array([0, 1, 2, 1]),
        classes=("Wine Glass", "cup", "bird"),
        image=lambda i: Image.new("L", (1, 1), i),
        name=str,
    )
    kept = source.keep(("bird", "wine_glass"))
    assert kept.labels.tolist() == [1, 0]
    assert [kept.name(i) for i in range(2)] == ["0", "2"]
    assert source.rename(("x", "y", "z")).classes == source.classes


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (4, 4), 77), [77, 77, 77]),
        (Image.new("RGBA", (4, 4), (200, 10, 10, 0)), [255, 255, 255]),
        (Image.new("LA", (4, 4), (90, 255)), [90, 90, 90]),
        (Image.new("RGB", (4, 4), (1, 2, 3)).convert("P"), None),
        (Image.fromarray(np.full((4, 4), 65535, np.uint16)), [255, 255, 255]),
        (Image.fromarray(np.full((4, 4), 25700, np.int32)), [100, 100, 100]),
        (Image.fromarray(np.full((4, 4), 0.5, np.float32)), [128, 128, 128]),
        (Image.new("CMYK", (4, 4), (0, 0, 0, 255)), [0, 0, 0]),
        (Image.new("1", (4, 4), 1), [255, 255, 255]),
    ],
)
def test_every_kind_of_image_becomes_bytes(image: Image.Image, expected: list[int] | None) -> None:
    colour, grey = pixels(image, 3, None), pixels(image, 1, Resize((2, 2)))
    assert (colour.dtype, colour.shape, grey.shape) == (np.uint8, (3, 4, 4), (1, 2, 2))
    assert expected is None or colour[:, 0, 0].tolist() == expected


def test_photos_are_cropped_to_the_centre() -> None:
    wide = Image.new("RGB", (30, 10), "black")
    wide.paste("white", (10, 0, 20, 10))
    assert pixels(wide, 1, Resize((10, 10))).min() == 255
