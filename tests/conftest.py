import pytest
import torch

# Modules that tests share: their assertions are to tell as much as those of the tests.
pytest.register_assert_rewrite("analysed", "client_blocks", "deployment", "fitting", "loopback", "tiny")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small tensors: a second thread only waits for the first."""
    torch.set_num_threads(1)
