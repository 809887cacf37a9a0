"""What papers claim, judged by differences in a comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from promptfed import UserError
from promptfed.cli.main import app
from promptfed.runs import claims, comparison
from promptfed.runs import config as C
from promptfed.runs.statistics import Difference

SPEC: dict[str, Any] = {
    "seeds": [0, 1],
    "columns": [
        {"label": "skewed", "claim": "averaging helps.", "ours": "averaged", "partition": {"name": "dirichlet"}},
        {"label": "even", "partition": {"name": "iid"}},
    ],
    "rows": [
        {"label": "averaged", "method": {"name": "fedavg", "epochs": 1}},
        {"label": "alone", "method": {"name": "local", "epochs": 1}, "columns": ["skewed"]},
    ],
}
SMALL = {"rounds": 1, "dataset": {"name": "digits", "limit": 120, "size": 16}, "partition": {"clients": 3}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "claims.toml"
    path.write_text(tomli_w.dumps({**SMALL, "compare": SPEC}))
    return path


def verdict(*ends: tuple[float, float]) -> str:
    found = {str(i): Difference((low + high) / 2, low, high, 3, 8) for i, (low, high) in enumerate(ends)}
    return claims.Verdict(claims.Claim("a", "better.", "ours"), found, {}).word


def test_a_claim_holds_ahead_of_all_and_fails_behind_one() -> None:
    assert verdict((0.01, 0.04), (0.02, 0.03)) == "holds here"
    assert verdict((0.01, 0.04), (-0.01, 0.03)) == "cannot be told"
    assert verdict((0.01, 0.04), (-0.02, 0.01), (-0.03, -0.01)) == "does not hold here"
    assert verdict() == "cannot be told"


def test_a_row_is_only_in_the_columns_that_it_names(file: Path, tmp_path: Path) -> None:
    plan = comparison.prepare(file, {}, out=tmp_path / "out")
    assert {job.row.label for job in plan.jobs} == {"averaged, skewed", "averaged, even", "alone, skewed"}
    assert plan.claims == [claims.Claim("skewed", "averaging helps.", "averaged")]


@pytest.mark.parametrize(
    ("where", "at", "key", "value", "message"),
    [
        ("rows", 1, "columns", ["skewd"], r'columns = "skewd" is unknown; did you mean "skewed"\?'),
        ("rows", 1, "columns", "skewed", r"columns = 'skewed' of \"alone\" must be a list of labels of columns"),
        ("columns", 0, "ours", "mine", r'ours of "skewed" = "mine" is unknown .*\(allowed: alone, averaged\)'),
        ("columns", 0, "by", "worst", r"by = 'worst' of \"skewed\" must be \"local\" or \"global\""),
    ],
)  # fmt: skip
def test_mistakes(where: str, at: int, key: str, value: Any, message: str, tmp_path: Path) -> None:
    spec = json.loads(json.dumps(SPEC))
    spec[where][at][key] = value
    path = tmp_path / "wrong.toml"
    path.write_text(tomli_w.dumps({**SMALL, "compare": spec}))
    with pytest.raises(UserError, match=message):
        comparison.prepare(path, {}, out=tmp_path / "out")


def test_compare_prints_saves_and_draws_verdicts(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["compare", str(file), "engine.workers=1", "--out", str(out)])
    assert told.exit_code == 0, told.output
    (found,) = json.loads((out / "claims.json").read_text())
    assert f"skewed: the claim {found['verdict']}." in told.output
    assert (out / "claims.png").stat().st_size > 1000
    mean = found["differences"]["alone"]["mean"]
    rows = {row["label"]: row["local"]["mean"] for row in json.loads((out / "table.json").read_text())}
    assert mean == pytest.approx(rows["averaged, skewed"] - rows["alone, skewed"])


def test_each_paper_has_its_method_and_baselines() -> None:
    spec = C.read("papers")["compare"]
    rows = {
        claim.column: [row["label"] for row in spec["rows"] if row["columns"] == [claim.column]]
        for claim in claims.read(spec)
    }
    assert list(rows) == ["pFedPT", "pFedPG", "SGPT", "ATPFL", "DP2FL"]
    assert all(paper == mine and len(others) >= 2 for paper, (mine, *others) in rows.items())
