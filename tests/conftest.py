import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small tensors: a second thread only waits for the first."""
    torch.set_num_threads(1)
