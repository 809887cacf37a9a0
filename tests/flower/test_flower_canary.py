"""A tiny deployment on the newest Flower that can be installed: says early what a release of Flower would break."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from deployment import deployed

from limits import HANG

pytestmark = pytest.mark.slow


def test_one_round_on_the_newest_flower(tmp_path, monkeypatch):
    newest = tmp_path / "newest"
    words = ["install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target", str(newest), "flwr"]
    made = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=HANG)
    if made.returncode:
        pytest.skip(f"no Flower can be installed here: {made.stderr.strip().splitlines()[-1]}")
    monkeypatch.setenv("PYTHONPATH", f"{newest}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    version = subprocess.check_output([sys.executable, "-c", "import flwr; print(flwr.__file__)"], text=True)
    assert version.startswith(str(newest))
    (tmp_path / "deployed").mkdir()
    with deployed(tmp_path / "deployed", clients=1, insecure=True, rounds=1) as deployment:
        deployment.link()
        deployment.node(0).wait_for("is connected")
        submitted = deployment.start("submit", "submit", deployment.server, "--insecure")
        submitted.popen.wait(HANG)
        assert "round 1, " in submitted.said(), submitted.said()
        assert "everything is in" in submitted.said()
