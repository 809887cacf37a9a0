"""What papers claim, judged by differences in a comparison."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from promptfed import UserError
from promptfed.report import draw_claims
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


def verdict(*ends: tuple[float, float], against: tuple[str, ...] = ()) -> str:
    found = {str(i): Difference((low + high) / 2, low, high, 3, 8) for i, (low, high) in enumerate(ends)}
    return claims.Verdict(claims.Claim("a", "better.", "ours", against=against), found, {}).word


def test_a_claim_holds_ahead_of_all_and_fails_behind_one() -> None:
    assert verdict((0.01, 0.04), (0.02, 0.03)) == "holds here"
    assert verdict((0.01, 0.04), (-0.01, 0.03)) == "cannot be told"
    assert verdict((0.01, 0.04), (-0.02, 0.01), (-0.03, -0.01)) == "does not hold here"
    assert verdict() == "cannot be told"
    assert verdict((0.01, 0.04), (-0.03, -0.01), against=("0",)) == "holds here"
    assert verdict((0.01, 0.04), (-0.03, -0.01), against=("0", "1")) == "does not hold here"


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
        ("columns", 0, "against", ["alon"], r'against of "skewed" = "alon" is unknown; did you mean "alone"\?'),
        ("columns", 0, "against", ["averaged"], r'against of "skewed" = "averaged" is unknown .*\(allowed: alone\)'),
        ("columns", 0, "against", "alone", r"against = 'alone' of \"skewed\" must be a list of labels of rows"),
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


def test_verdicts_are_shown_saved_and_drawn(file: Path, tmp_path: Path) -> None:
    plan = comparison.prepare(file, {"engine.workers": 1}, seeds=[0], only=", skewed", out=tmp_path / "out")
    outcome = comparison.execute(plan)
    verdicts = claims.judge(plan.claims, outcome.results, plan.layout)
    claims.save(verdicts, plan.folder / "claims.json")
    (found,) = json.loads((plan.folder / "claims.json").read_text())
    rows = {row["label"]: row["local"]["mean"] for row in outcome.table}
    assert found["differences"]["alone"]["mean"] == pytest.approx(rows["averaged, skewed"] - rows["alone, skewed"])
    console = Console(width=100, record=True, file=StringIO())
    console.print(claims.show(verdicts))
    text = console.export_text()
    assert f"skewed: the claim {found['verdict']}." in text
    assert found["differences"]["alone"]["decides"] is True
    assert "do not decide" not in text
    assert draw_claims(verdicts, tmp_path / "claims.png").stat().st_size > 1000


def test_a_row_that_does_not_decide_is_marked() -> None:
    found = {name: Difference(0.02, 0.01, 0.03, 3, 8) for name in ("paper's", "added")}
    verdict = claims.Verdict(
        claims.Claim("a", "better.", "ours", against=("paper's",)), found, dict.fromkeys([*found, "ours"], "50")
    )
    console = Console(width=100, record=True, file=StringIO())
    console.print(claims.show([verdict]))
    text = console.export_text()
    assert " added + " in text
    assert " paper's + " not in text
    assert "Rows marked + are not part of a claim and do not decide." in text
    assert [each["decides"] for each in verdict.complete()["differences"].values()] == [True, False]


def test_each_paper_has_its_method_and_baselines() -> None:
    spec = C.read("papers")["compare"]
    rows = {
        claim.column: [row["label"] for row in spec["rows"] if row["columns"] == [claim.column]]
        for claim in claims.read(spec)
    }
    assert rows.pop("prompts") == [
        "together",
        "each site alone",
        "a head alone, together",
        "class mean",
    ]  # what all of them build on
    assert list(rows) == ["pFedPT", "pFedPG", "SGPT", "ATPFL", "DP2FL"]
    assert all(paper == mine and len(others) >= 2 for paper, (mine, *others) in rows.items())
