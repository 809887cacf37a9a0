"""A method that trains longer has an advantage: where pFedPT is compared, FedAvg is also there with as many passes."""

from itertools import groupby
from pathlib import Path

import pytest

from promptfed.runs import config as C
from promptfed.runs import dryrun
from promptfed.runs.api import without_compare
from promptfed.runs.rows import Job, plan, rows

ROOT = Path(__file__).parents[2]
PAPER = sorted((ROOT / "experiments" / "pfedpt").glob("[tf]*[0-9].toml"))
PRESETS = ["digits", "pfedpt", "pfedpt-code"]
ROW = "FedAvg, equal passes"
SAMPLES = 840  # of a client


def passes(job: Job) -> int:
    """Of a client and round."""
    return sum(phase.length(SAMPLES) * phase.batch_size for phase in job.config.method.method.schedule(1))


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
        each = {job.row.place[0] or job.row.label: passes(job) for job in group}
        assert each[ROW] == pytest.approx(max(each.values()), rel=0.01)


def test_the_dry_run_counts_the_same_passes(tmp_path: Path) -> None:
    table = C.read("digits")
    found = {
        job.row.label: dryrun.estimate(job.config).passes
        for job in plan([without_compare(table)], rows(table["compare"]), tmp_path)
    }
    assert found[ROW] == pytest.approx(found["pFedPT"], rel=0.01)
    assert found["FedAvg"] == pytest.approx(found["pFedPT"] / 2, rel=0.01)
