import os

import pytest
import torch

# Some virtual machines announce matrix instructions (AMX) that they cannot execute: a product in bf16 ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Modules that tests share: a failed assertion shows its values, as in a test.
pytest.register_assert_rewrite("analysed", "client_blocks", "deployment", "fitting", "loopback", "tiny")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tensors are small: a second thread would only wait for the first."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _hub_allowed(monkeypatch):
    """A site forbids it to its whole process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
