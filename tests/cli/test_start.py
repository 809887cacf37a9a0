"""What a process imports before it begins."""

import subprocess
import sys

from limits import HANG


def test_what_needs_no_torch_starts_without_it():
    start("""
import sys, promptfed, promptfed.cli.main
assert "torch" not in sys.modules
assert set(promptfed.__all__) <= set(dir(promptfed))
from promptfed import *
assert Method.__module__ == "promptfed.method" and load_dataset.__module__.startswith("promptfed.data")
assert promptfed.run is run
try:
    promptfed.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
else:
    raise AssertionError
""")


def test_a_worker_process_starts_without_what_only_few_runs_need():
    start("""
import sys, promptfed.runs.build, promptfed.search.workers
early = {"matplotlib", "optuna", "pandas", "scipy", "sklearn"} & set(sys.modules)
assert not early, early
""")


def start(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
