"""Processes that work for another one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from limits import HANG

CHILD = "from promptfed.processes import end_with_parent; end_with_parent(); print('up', flush=True)\nwhile True: pass"
PARENT = f"""
import sys, subprocess, time
from promptfed.processes import start
child = start([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(1000)
"""


def alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is not alive either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_busy_process_ends_when_its_parent_is_killed_but_not_by_ctrl_c() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGINT)
    time.sleep(1)
    assert alive(child)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + HANG
    while alive(child) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(child)
