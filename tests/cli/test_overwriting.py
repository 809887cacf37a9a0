"""Nothing of the user's own is replaced."""

import pytest
from PIL import Image

from promptfed.cli.main import main

TINY = ["dataset.limit=60", "dataset.size=16", "partition=iid", "partition.clients=2", "backbone=cnn-code", "rounds=1"]
TINY += ["method.epochs=1", "engine.workers=1"]


@pytest.fixture
def promptfed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))

    def call(*words):
        monkeypatch.setattr("sys.argv", ["promptfed", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return str(left.value.code or "")

    return call


def test_folders_and_files_that_are_not_ours_stay_as_they_are(promptfed, tmp_path):
    images = tmp_path / "images" / "cat"
    images.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(images / "1.png")
    for words in (["run", "method=local"], ["compare", "--methods", "local"]):
        assert '"images" is not empty and holds no' in promptfed(*words, *TINY, "--out", "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["cat"]
    assert promptfed("compare", "--methods", "local", *TINY, "--out", "both") == ""
    assert '"both" is not empty and holds no run' in promptfed("run", "method=local", *TINY, "--out", "both")
    keep = tmp_path / "keep.py"
    keep.write_text("mine")
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    photo = (tmp_path / "photo.png").read_bytes()
    foreign = "exists and was not written by promptfed"
    assert foreign in promptfed("report", "both", "--out", "keep.py")
    assert foreign in promptfed("partition", *TINY[:4], "--save", "keep.py")
    assert foreign in promptfed("partition", *TINY[:4], "--out", "photo.png")
    assert (keep.read_text(), (tmp_path / "photo.png").read_bytes()) == ("mine", photo)
    for _ in range(2):  # our own are replaced
        assert promptfed("report", "both", "--out", "page.html") == ""
        assert promptfed("partition", *TINY[:4], "--out", "split.png", "--save", "split.json") == ""
    with Image.open(tmp_path / "split.png") as picture:
        picture.verify()
