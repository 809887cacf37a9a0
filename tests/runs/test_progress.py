"""What is told of a run while it goes on, by a clock that stands where a test puts it."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from limits import HANG
from promptfed import run, steps
from promptfed.clients.base import Notice
from promptfed.data import load
from promptfed.runs import display
from promptfed.runs.progress import Live, Status, duration, slow
from promptfed.server import Line
from promptfed.steps import Step


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(round: int, train: float, evaluate: float | None = None, accuracy: float = 0.5, **changes: Any) -> Line:
    found: Line = {"round": round, "left_out": [], "train_loss": 0.25, "seconds": {"train": train}}
    if evaluate is not None:
        found["seconds"]["evaluate"] = evaluate
        found["aggregated"] = {"summary": {"local": {"mean": accuracy, "worst": accuracy / 2}}}
    return {**found, **changes}


def took(*each: tuple[float, int]) -> list[dict[str, Any]]:
    return [{"client": i, "seconds": seconds, "samples": samples} for i, (seconds, samples) in enumerate(each)]


def seen(status: Status, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(status)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def answers(ask: str, client: int, asked: int, seconds: float | None = None, error: str = "") -> Notice:
    return Notice(ask, client, asked, 10, seconds, error)


# ---- time


def test_a_round_takes_what_the_last_ones_took_and_evaluations_count_where_they_are_due() -> None:
    clock = Clock()
    status = Status("x", 10, clock=clock)
    status.end(line(1, 9.0))  # the first one is slower
    assert status.left() == "time left: known after two rounds"
    status.end(line(2, 4.0))
    assert status.left() == "at least 0:32 left"  # 8 x 4 s; how often is evaluated is seen from round 3 on
    status.end(line(3, 6.0, 20.0))
    assert status.left() == "1:35 left"  # 7 x 5 s and 3 x 20 s
    status.begin(4, [0, 1])
    clock.now = 3.0
    assert status.left() == "1:32 left"
    clock.now = 1000.0  # it takes longer than usual: the others do not get shorter for it
    assert status.left() == "1:30 left"
    assert duration(status.spent()) == "17:19"


def test_only_the_last_rounds_count() -> None:
    status = Status("x", 40)
    for round in range(1, 21):
        status.end(line(round, 100.0 if round <= 10 else 1.0, 1.0))
    assert status.left() == "0:40 left"


def test_nothing_is_left_behind_the_last_round_and_nothing_known_before_the_first() -> None:
    status = Status("x", 1)
    assert "known after two rounds" in status.left()
    status.end(line(1, 1.0, 1.0))
    assert status.left() == ""


@pytest.mark.parametrize("rounds", [2, 7, 9])
@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_evaluations_are_counted_as_the_round_loop_makes_them(rounds: int, every: int) -> None:
    due = [round % every == 0 or round == rounds for round in range(1, rounds + 1)]
    status = Status("x", rounds)
    for done in range(1, rounds):
        status.end(line(done, 0.0, 1.0 if due[done - 1] else None))
        if done > 1:
            seen = any(due[:done])
            assert status.left() == (f"{duration(sum(due[done:]))} left" if seen else "at least 0:00 left")


def test_a_run_that_goes_on_counts_evaluations_from_there() -> None:
    status = Status("x", 30)
    status.begin(10, [0])
    for round in (10, 11, 12):
        status.end(line(round, 0.0, 1.0 if round % 10 == 0 else None))
    assert status.left() == "at least 0:01 left"  # evaluated every round, or every tenth?
    for round in range(13, 21):
        status.end(line(round, 0.0, 1.0 if round % 10 == 0 else None))
    assert status.left() == "0:01 left"


def test_durations() -> None:
    assert [duration(s) for s in (-1, 0.6, 75, 3599.6, 3725)] == ["0:00", "0:01", "1:15", "1:00:00", "1:02:05"]


# ---- slow and failed clients


def test_slow_is_more_than_three_times_the_median_a_sample_and_seconds_behind() -> None:
    found = slow(took((1.0, 10), (2.0, 20), (3.0, 30), (6.2, 20), (9.6, 30)))
    assert list(found.items()) == [
        (4, "9.6 s, 3.2 x the median per sample"),
        (3, "6.2 s, 3.1 x the median per sample"),
    ]
    assert slow(took((1.0, 10), (2.0, 20), (6.0, 20))) == {}, "just three times"
    assert slow(took((0.001, 10), (0.002, 20), (0.02, 20))) == {}, "a moment behind"


def test_a_client_of_few_samples_that_is_done_early_is_not_slow() -> None:
    assert slow(took((1.0, 10), (2.0, 20), (3.0, 30), (0.9, 1))) == {}
    assert slow(took((1.0, 10), (1.0, 10), (1.0, 10), (3.1, 1))) != {}


def test_of_two_clients_neither_is_slow() -> None:
    assert slow(took((1.0, 10), (9.0, 10))) == {}


def test_who_is_slow_is_told_from_the_second_round_on_as_the_first_step_of_all_takes_longer() -> None:
    status = Status("x", 3)
    lame = {"train": 9.0, "clients": took((1.0, 10), (1.0, 10), (5.0, 10))}
    status.end(line(1, 9.0, seconds=lame))
    assert "slow" not in status.line() + seen(status)
    status.end(line(2, 9.0, seconds=lame))
    assert "slow: 2 (5.0 s, 5.0 x the median per sample)" in status.line()
    assert "slow in round 2: 2 (5.0 s, 5.0 x the median per sample)" in seen(status)
    status.end(line(3, 9.0))
    assert "slow" not in status.line(), "of another round"


def test_failures_are_told_at_once_and_once() -> None:
    status = Status("x", 9)
    status.begin(1, [3, 4])
    status.on_notice(answers("train", 3, 2, 0.5, "non-finite loss"))
    assert "failed in round 1: 3 (non-finite loss)" in seen(status)
    failed = [{"client": 3, "why": "non-finite loss"}, {"client": 4, "why": "no answer"}]
    status.end(line(1, 1.0, left_out=failed))
    assert "failed: 3 (non-finite loss), 4 (no answer)" in status.line()
    status.end(line(2, 1.0, left_out=failed[:1]))
    assert "4 (no answer)" not in status.line()
    assert "failed in round 2: 3 (non-finite loss)\n" in seen(status).replace(" " * 2, "")


def test_many_failures_are_counted() -> None:
    status = Status("x", 2)
    status.end(line(1, 1.0, left_out=[{"client": i, "why": "no answer"} for i in range(50)]))
    assert "47 more" in status.line()
    assert len(status.line()) < 200
    assert "47 more" in seen(status)


# ---- the round under way


def test_clients_are_counted_as_they_answer() -> None:
    status = Status("x", 4)
    status.begin(1, [0, 1, 2])
    assert "training: 0 of 3 clients" in seen(status)
    for client in (0, 1):
        status.on_notice(answers("train", client, 3))
    status.on_notice(answers("train", 0, 3, 5.0))
    assert "training: 1 of 3 clients" in seen(status)
    for client in (1, 2):
        status.on_notice(answers("train", client, 3, 5.0))
    status.on_notice(answers("evaluate", 7, 20))
    assert "evaluating: 0 of 20 clients\n" in seen(status).replace(" " * 2, "")
    for client in range(20):
        status.on_notice(answers("evaluate", client, 20, 0.1))
    status.on_notice(answers("evaluate", 0, 20))  # a further stage: the common model
    assert "evaluating: 0 of 20 clients" in seen(status)


def test_the_accuracy_is_that_of_the_last_evaluation_with_its_round() -> None:
    status = Status("x", 9)
    status.end(line(1, 1.0))
    assert "local" not in status.line()
    status.end(line(2, 1.0, 1.0, accuracy=0.5))
    status.end(line(3, 1.0))
    assert "local 50.0%, worst 25.0% (round 2)" in status.line()
    assert "local 50.0%, worst 25.0% (round 2)" in seen(status)


def test_an_evaluation_without_test_data_and_a_round_without_answers_are_told() -> None:
    status = Status("x", 2)
    nothing = {"summary": {"local": {"mean": None, "worst": None}}}
    status.end(line(1, 1.0, aggregated=nothing, train_loss=None))
    assert "loss" not in status.line()


def test_it_fits_a_narrow_terminal() -> None:
    status = Status("a method of a rather long name (seed 3)", 100)
    status.end(line(1, 50.0, left_out=[{"client": 3, "why": "because of " * 20}]))
    status.begin(2, range(10))
    text = seen(status, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "…" in text


# ---- the view of the command line


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def run_through(view: Live) -> None:
    with view:
        for round in (1, 2):
            view.begin(round, [0])
            view.on_notice(answers("train", 0, 1))
            view.on_notice(answers("train", 0, 1, 0.1))
            view.end(line(round, 1.0, 1.0))


def test_off_a_terminal_there_is_a_line_when_rounds_begin_and_one_per_round() -> None:
    console = Console(file=io.StringIO(), width=40)
    run_through(Live(console, "[x]", 2))
    assert isinstance(console.file, io.StringIO)
    begun, first, second = console.file.getvalue().splitlines()
    assert begun == "[x]  round 1/2  training: 0 of 1 clients"
    assert first == "[x]  round 1/2  loss 0.250  local 50.0%, worst 25.0%  0:02 spent"
    assert second.endswith("0:04 spent")


def test_on_a_terminal_the_end_stays_and_a_run_that_was_done_before_leaves_nothing() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    assert isinstance(console.file, io.StringIO)
    run_through(Live(console, "x", 2))
    assert "2/2 rounds" in console.file.getvalue()
    console.file.truncate(0)
    with Live(console, "x", 2):
        pass
    assert console.file.getvalue().endswith("\x1b[2K"), "it wipes its line"


# ---- steps beside the rounds


def plain() -> tuple[Console, Callable[[], str]]:
    file = io.StringIO()
    return Console(file=file, width=200), file.getvalue


def test_off_a_terminal_a_long_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "QUIET", 0.05)
    console, said = plain()
    with Live(console, "x", 2) as live:
        assert said() == "", "a mistake in the settings is told first"
        wait_for(lambda: said().count("x  preparing data and model\n") > 1)
        live.begin(1, [0, 1, 2])
        wait_for(lambda: said().count("training: 0 of 3 clients") > 1)
    told = said()
    time.sleep(0.2)
    assert said() == told, "nothing is told of a run that is over"


def test_decoding_is_told_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path))
    console, said = plain()
    with Live(console, "x", 2) as live:
        step = Step("decoding a", 300, lambda: 100)
        step.begun -= 5.0
        live.on_step(step)
        assert said() == "x  decoding a: 100 of 300 images, 0:10 left\n"
        assert "decoding a" in seen(live)
        assert "100 of 300 images, 0:10 left" in seen(live)
        step.over = True
        assert "decoding a" not in seen(live)
        load("digits")
    assert "x  decoding digits: 0 of 1,797 images\n" in said()


def test_outside_of_a_run_bars_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path))
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    assert isinstance(console.file, io.StringIO)
    with display.bars(console):
        load("digits")
    assert "decoding digits" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K"), "it wipes its line"
    told = console.file.getvalue()
    with display.bars(console):
        load("digits")  # decoded by now
    assert console.file.getvalue() == told


@pytest.mark.parametrize("workers", [1, 2])
def test_filling_the_cache_of_frozen_values_is_told(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    found: list[Step] = []
    with steps.listening(found.append):
        run(
            method={"name": "head-tune", "epochs": 1},
            backbone="vit-mini",
            dataset={"name": "digits", "limit": 60, "size": 32},
            partition={"name": "iid", "clients": 2},
            rounds=1,
            out=tmp_path / "run",
            progress=False,
            engine={"workers": workers},
        )
    decoding, again, caching = found
    assert decoding is again
    assert (decoding.what, decoding.over, decoding.count()) == ("decoding digits", True, 60)
    assert (caching.what, caching.total, caching.count(), caching.active) == ("caching features", 60, 60, False)
