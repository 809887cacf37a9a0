"""What every test of Flower needs: a cache apart, and an identity."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _identity():
    """Whom messages come from: Flower sets it when it starts a ServerApp."""
    from flwr.supercore.task_identity import TaskIdentity  # here: Flower may not be installed, and then no test runs

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
