"""A method that trains longer has an advantage: where methods on all weights are compared, FedAvg is also there with as
many passes."""

from itertools import groupby
from pathlib import Path

import pytest

from promptfed.runs import config as C
from promptfed.runs import dryrun
from promptfed.runs.api import without_compare
from promptfed.runs.rows import Job, plan, rows
from promptfed.tuning import Full, Wrapper

ROOT = Path(__file__).parents[2]
OF_ALL_WEIGHTS = (
    "pfedpt/[tf]*[0-9].toml",
    "pfedpg/table[123].toml",
    "sgpt/table2.toml",
    "evidence/cifar10-[ps]*.toml",
    "evidence/office-domain.toml",
)
PAPER = sorted(path for pattern in OF_ALL_WEIGHTS for path in (ROOT / "experiments").glob(pattern))
PRESETS = ["digits", "pfedpt", "pfedpt-code"]
ROW = "FedAvg, equal passes"
SAMPLES = 840  # of a client


def passes(job: Job) -> int:
    """Of a client and round."""
    return sum(phase.length(SAMPLES) * phase.batch_size for phase in job.config.method.method.schedule(1))


def all_weights(job: Job) -> bool:
    """Whether it trains them, also beside a prompt."""
    tuning = job.config.method.method.tuning
    return bool(passes(job)) and isinstance(tuning.inner if isinstance(tuning, Wrapper) else tuning, Full)


SCALES = [(source, small) for source in [*PRESETS, *PAPER] for small in (False, True)[: 1 + ("mini" in C.read(source))]]


@pytest.mark.parametrize(
    ("source", "small"), SCALES, ids=[f"{Path(source).stem}{'-mini' * small}" for source, small in SCALES]
)
def test_fedavg_has_the_passes_of_the_most_expensive_row(source: str | Path, small: bool, tmp_path: Path) -> None:
    table = C.read(source)
    jobs = plan([without_compare(table)], rows(table["compare"], mini=table["mini"] if small else None), tmp_path)

    def column(job: Job) -> str:
        return job.row.place[1]

    for _, group in groupby(sorted(jobs, key=column), column):
        each = {job.row.place[0] or job.row.label: job for job in group}
        most = max(passes(job) for job in each.values() if all_weights(job))
        assert passes(each[ROW]) == pytest.approx(most, rel=0.01)


def test_no_comparison_on_all_weights_is_forgotten() -> None:
    """Leaderboards show the passes of each row instead; the runs behind figures are not compared."""
    found = set()
    for path in sorted((ROOT / "experiments").glob("*/*.toml")):
        if path.parent.name != "leaderboard" and path.stem != "figures":
            table = C.read(path)
            jobs = plan([without_compare(table)], rows(table["compare"]), Path("unused"))
            if len({job.config.method.name for job in jobs if all_weights(job)}) > 1:
                found.add(path)
    assert found == set(PAPER)


def test_the_dry_run_counts_the_same_passes(tmp_path: Path) -> None:
    table = C.read("digits")
    found = {
        job.row.label: dryrun.estimate(job.config).passes
        for job in plan([without_compare(table)], rows(table["compare"]), tmp_path)
    }
    assert found[ROW] == pytest.approx(found["pFedPT"], rel=0.01)
    assert found["FedAvg"] == pytest.approx(found["pFedPT"] / 2, rel=0.01)
