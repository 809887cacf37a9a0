"""The runs behind pFedPT's figures, at the small scale of their file, and the analyses that draw them."""

from pathlib import Path

import pytest

from promptfed.analysis import make
from promptfed.runs import comparison

FILE = Path(__file__).parents[2] / "experiments" / "pfedpt" / "figures.toml"


@pytest.mark.slow  # two runs and six analyses
def test_figures_are_drawn_from_their_file(tmp_path: Path) -> None:
    for only in ("pFedPT, Dirichlet, CNN", "pFedPT, two classes"):
        plan = comparison.prepare(FILE, {}, out=tmp_path / "runs", mini=True, only=only)
        assert not comparison.execute(plan).failed
    first = make(tmp_path / "runs" / "pfedpt-dirichlet-cnn-seed0").files
    assert set(first) >= {"attention", "colours-labels", "drift", "leakage", "variation"}
    second = make(tmp_path / "runs" / "pfedpt-two-classes-cnn-seed0", ["variation"]).files
    assert all(file.exists() for files in (*first.values(), *second.values()) for file in files)
