"""What updates reveal: attacks on data by what clients send."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from promptfed.attacks import membership, privacy, update_inversion
from promptfed.attacks.membership import auc, interval
from promptfed.errors import UserError


def test_auc_is_how_often_a_member_has_the_lower_loss() -> None:
    assert auc(np.array([1.0, 3.0]), np.array([2.0, 3.0])) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_the_interval_holds_the_auc_and_narrows_with_samples() -> None:
    g = np.random.default_rng(0)
    few, many = ([(g.normal(0, 1, n), g.normal(0.5, 1, n))] for n in (20, 150))
    (a, low, high), (b, lower, upper) = interval(few), interval(many)
    assert low < a < high
    assert 0.5 < lower < b < upper
    assert upper - lower < high - low


def test_noise_hides_what_updates_reveal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_inversion, "_STEPS", 60)
    monkeypatch.setattr(membership, "_DRAWS", 100)
    monkeypatch.setattr(privacy, "_SAMPLES", 12)
    given = {
        "method": {"name": "head-tune", "epochs": 3, "standardise": False},
        "backbone": "vit-mini",
        "dataset": {"name": "shapes", "limit": 120},
        "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 3},
        "rounds": 1,
        "privacy": {"clip": 0.1, "noise": 20.0},
    }
    leaks = privacy.execute(privacy.prepare(None, given, tmp_path), Console(quiet=True))
    found = {(leak.attack.split(",")[0], leak.noise > 0): leak for leak in leaks}
    label = "label of an update by one sample"
    assert found[label, False].value > 0.9, "a head's gradient tells the label"
    assert found[label, True].value < 0.5
    assert found["label distribution", False].value > found["label distribution", False].guess
    assert found["membership", True].epsilon
    assert all(leak.low is not None for leak in leaks if leak.number == "AUC")
    assert (tmp_path / "leaks.md").read_text() == privacy.table(leaks)


def test_a_comparison_with_noise_needs_noise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"privacy\.noise = 0 protects nothing"):
        privacy.prepare(None, {"privacy": {"clip": 1.0, "noise": 0.0}}, tmp_path)
