"""Worker processes of a search: they stop when they are told, go on where they stopped, and are killed in time."""

import time
from pathlib import Path
from typing import Any

import pytest

from promptfed.runs import config as C
from promptfed.runs import record
from promptfed.search.workers import Ended, Job, Pool, Round, as_trial

TINY: dict[str, Any] = {
    "dataset": {"name": "digits", "limit": 90, "size": 16},
    "partition": {"name": "iid", "clients": 2},
    "method": {"name": "head-tune", "epochs": 1},
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_a_run_is_stopped_resumed_killed_and_fails_alone(tmp_path: Path) -> None:
    def job(rounds: int, name: str, on_round: Any, **settings: Any) -> Job:
        config = C.make(TINY, {"rounds": rounds, **settings})
        return Job(as_trial(config, every=1), tmp_path / name, on_round)

    told: list[Round] = []
    ended: list[Ended] = []

    def until(round: Round, last: int = 2) -> bool:
        told.append(round)
        return round.number < last

    with Pool("cpu", tmp_path / "log") as pool:

        def run(*jobs: Job, seconds: float | None = None) -> None:
            ended.clear()
            todo = iter(jobs)
            pool.run(lambda: next(todo, None), lambda job, how: ended.append(how), seconds)

        run(job(3, "a", until))
        assert [one.how for one in ended] == ["stopped"]
        assert [one.number for one in told] == [1, 2]
        assert all(one.val is not None and one.train > 0 for one in told)
        run(job(3, "a", lambda round: told.append(round) is None))
        assert [one.how for one in ended] == ["done"]
        assert [one.number for one in told] == [1, 2, 3]
        assert record.read_result(tmp_path / "a")

        begun = time.monotonic()
        run(job(100_000, "b", lambda round: True), seconds=1.0)
        assert [one.how for one in ended] == ["killed"]
        assert time.monotonic() - begun < 30
        # The same pool goes on, and a user error is told of its own run only.
        run(job(1, "c", lambda round: True, backbone="no-such-model"), job(1, "d", lambda round: True))
        assert sorted(one.how for one in ended) == ["done", "failed"]
        (error,) = (one.error for one in ended if one.error)
        assert "no-such-model" in str(error)
