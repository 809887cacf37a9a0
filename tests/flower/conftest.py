"""What every test of Flower needs: a cache apart, and an identity."""

import os
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _identity():
    """Whom messages come from: Flower sets it when it starts a ServerApp."""
    if not find_spec("flwr"):  # a site's folder is tested without Flower
        return
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture(autouse=True)
def _umask():
    """A link and a node set it for their process."""
    before = os.umask(0o022)
    yield
    os.umask(before)
