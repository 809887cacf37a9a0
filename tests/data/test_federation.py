"""A partition on disk, and its picture."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from promptfed.data import Dataset, Federation, federate
from promptfed.data.partitions import Dirichlet, Iid
from promptfed.errors import UserError
from promptfed.report import draw_partition

Make = Callable[..., Dataset]
LABELS = np.arange(400) % 8


def test_round_trip(make: Make, tmp_path: Path) -> None:
    federation = federate(make(LABELS), Dirichlet(clients=5), 7)
    federation.save(tmp_path / "deep" / "partition.json")
    again = Federation.load(tmp_path / "deep" / "partition.json", federation.dataset)
    assert again.about == federation.about
    for a, b in zip(again.sites, federation.sites, strict=True):
        assert a.name == b.name
        assert all(np.array_equal(getattr(a, s), getattr(b, s)) for s in ("train", "val", "test"))
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["partition.json"]


def test_the_file_is_plain(make: Make, tmp_path: Path) -> None:
    federation = federate(make(LABELS), Iid(clients=2), 7)
    with pytest.raises(UserError, match=r'partition file ".*" cannot be written: '):
        federation.save(tmp_path)  # a folder
    federation.save(tmp_path / "p.json")
    text = json.loads((tmp_path / "p.json").read_text())
    assert text["dataset"] == {
        "name": "toy",
        "fingerprint": federation.dataset.fingerprint,
        "n": 400,
        "classes": [f"c{i}" for i in range(8)],
    }
    assert text["about"]["kind"] == "iid"
    assert text["clients"][1]["train"] == federation.sites[1].train.tolist()


def test_label_counts(make: Make) -> None:
    federation = federate(make(LABELS), Dirichlet(clients=5), 1)
    for split in ("train", "val", "test"):
        for row, site in zip(federation.label_counts(split), federation.sites, strict=True):  # type: ignore[arg-type]
            assert row.tolist() == np.bincount(LABELS[getattr(site, split)], minlength=8).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["clients"][0]["train"].append(400), r"index outside 0\.\.399"),
        (lambda t: t["clients"][0]["train"].append(-1), r"index outside 0\.\.399"),
        (lambda t: t["clients"][0]["train"].append(t["clients"][1]["test"][0]), "assigns some images twice"),
        (lambda t: t["clients"][0]["train"].append(1.5), "is malformed"),
        (lambda t: t["clients"][0].pop("val"), "is malformed"),
        (lambda t: t.pop("about"), "is malformed"),
        (lambda t: t["clients"].clear(), "holds no clients"),
        (lambda t: t["dataset"].update(fingerprint="?"), "belongs to another dataset"),
        (lambda t: t.update(dataset="toy"), "is malformed"),
    ],
)
def test_files_that_are_refused(
    make: Make, tmp_path: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    federation = federate(make(LABELS), Iid(clients=2), 7)
    path = tmp_path / "p.json"
    federation.save(path)
    text = json.loads(path.read_text())
    change(text)
    path.write_text(json.dumps(text))
    with pytest.raises(UserError, match=message):
        Federation.load(path, federation.dataset)


def test_no_json_and_no_file(make: Make, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(UserError, match="is malformed"):
        Federation.load(tmp_path / "p.json", make(LABELS))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Federation.load(tmp_path / "q.json", make(LABELS))


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (4, 8), (60, 50), (2500, 8)])
def test_heat_map(make: Make, tmp_path: Path, clients: int, classes: int) -> None:
    draw_partition(federate(make(np.arange(5000) % classes), Iid(clients=clients), 0), tmp_path / "maps" / "heat.png")
    with Image.open(tmp_path / "maps" / "heat.png") as image:
        assert min(image.size) > 350
