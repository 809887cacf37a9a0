"""A finished run, opened again, is what it was; and stays so."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from promptfed import UserError
from promptfed.analysis import Options
from promptfed.analysis.opened import Bare, Opened, unprompted
from promptfed.methods import create
from promptfed.scoring import evaluate
from promptfed.tuning import Full
from promptfed.tunings.heads import HeadOnly
from promptfed.tunings.pixels import PixelPrompt


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("name", ["pfedpt", "tuned", "vpt", "sgpt", "dp2fl", "sealed"])
def test_clients_score_as_they_did_in_the_last_evaluation(finished, name):
    folder = finished(name)
    before = digests(folder)
    recorded = json.loads((folder / "result.json").read_text())["clients"]
    opened = Opened(folder)
    for stage, of in (("aggregated", opened.own), ("after_local_all", opened.after_local)):
        for row in recorded.get(stage, []):
            work, params = of(row["client"])
            samples = opened.host.samples(opened.federation.sites[row["client"]].test)
            score = evaluate(opened.method, opened.model, work, params, samples)
            assert score.accuracy == row["accuracy"]
            assert score.loss / score.n == pytest.approx(row["loss"], abs=1e-6)
    opened.close()
    assert digests(folder) == before


def test_what_clients_remember_cannot_be_written(finished):
    opened = Opened(finished("pfedpt"))
    with pytest.raises(TypeError, match="only read"):
        opened.host.store.put(9, {0: {}})
    with pytest.raises(TypeError, match="only read"):
        opened.host.store.add("digest", b"")
    opened.close()


def test_clients_that_are_asked_for(finished):
    opened = Opened(finished("pfedpt"))
    assert opened.chosen(Options()) == [0, 1, 2, 3]
    assert opened.chosen(Options(), most=3) == [0, 2, 3]  # evenly spread, from first to last
    assert opened.chosen(Options(everyone=True), most=3) == [0, 1, 2, 3]
    assert opened.chosen(Options((2, 1))) == [2, 1]
    with pytest.raises(UserError, match="--client = 7 must be 0 to 3"):
        opened.chosen(Options((7,)))
    opened.close()


def test_own_images_are_seen_as_those_of_the_dataset(finished):
    """Frozen values included."""
    for name in ("promptfl", "vpt"):
        opened = Opened(finished(name))
        index = opened.federation.sites[0].test
        work, params = opened.own(0)
        theirs = opened.probabilities(work, params, opened.host.samples(index))
        mine = opened.probabilities(work, params, opened.samples(opened.federation.dataset.images[index]))
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
        opened.close()


def test_folders_that_hold_nothing_or_no_end(finished, tmp_path):
    with pytest.raises(UserError, match="neither a run nor a comparison"):
        Opened(tmp_path)
    (tmp_path / "config.toml").write_bytes((finished("fedavg") / "config.toml").read_bytes())
    (tmp_path / "partition.json").write_bytes((finished("fedavg") / "partition.json").read_bytes())
    with pytest.raises(UserError, match="not finished"):
        _ = Opened(tmp_path).parts
    with pytest.raises(UserError, match=r"no run of the comparison in .* is finished"):
        Opened(tmp_path.parent)


def test_a_tuning_without_private_prompts():
    assert isinstance(unprompted(create("pfedpt").tuning), Full)
    assert isinstance(unprompted(create("fedavg+head+pt").tuning), HeadOnly)
    two = unprompted(create("fedrod+pt").tuning)
    assert isinstance(two.inner, Full)
    assert isinstance(create("fedrod+pt").tuning.inner, PixelPrompt)  # as it was


def test_a_bare_tuning_sees_the_image_alone(finished):
    opened = Opened(finished("pfedpt"))
    work, params = opened.own(0)
    images = opened.federation.dataset.images[:3]
    bare = opened.bare(work, params)
    assert isinstance(bare, Bare)
    samples = opened.samples(images)
    weights = {**opened.model.weights, **params}
    expected = opened.model.classify(weights, opened.model.features(weights, samples.images(slice(None)))).softmax(1)
    np.testing.assert_allclose(opened.probabilities(work, params, samples, bare), expected.detach(), atol=1e-6)
    opened.close()
