"""scripts/sgpt_parts.py: what the parts of SGPT contribute."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sgpt_parts.py"


def test_selected_groups_have_the_accuracy_of_the_run(finished):
    folder = finished("sgpt")
    shares, steadier = runpy.run_path(str(SCRIPT))["parts"](folder)
    clients = json.loads((folder / "result.json").read_text())["clients"]["aggregated"]
    right = sum(client["accuracy"] * client["n_test"] for client in clients)
    assert shares["selected groups"] == pytest.approx(right / sum(client["n_test"] for client in clients))
    assert all(0 <= share <= 1 for share in shares.values())
    assert shares["training agrees with selection"] > 0
    assert steadier > 0
