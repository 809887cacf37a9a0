"""scripts/evidence.py: what is said of the papers' claims follows from the kept results."""

import html
import math
import re
import runpy
from pathlib import Path
from statistics import NormalDist

import pytest

from promptfed.runs.statistics import Difference

ROOT = Path(__file__).parents[1]
EVIDENCE = runpy.run_path(str(ROOT / "scripts" / "evidence.py"))
PAGE = EVIDENCE["PAGE"].read_text()
DIFFERENCE = r"[-+][\d.]+ \[[-+][\d.]+, [-+][\d.]+\]"
BLOCK = r"<!-- evidence: .*?<!-- end -->"


def told(low: float, high: float, seeds: int = 3) -> Difference:
    return Difference((low + high) / 2, low, high, seeds, clients=5)


def test_the_page_has_the_tables_that_the_kept_results_make():
    assert EVIDENCE["filled"](PAGE) == PAGE


def test_intervals_stand_in_tables_only():
    """Where the kept results make them."""
    assert len(re.findall(DIFFERENCE, PAGE)) > 60
    assert not re.findall(DIFFERENCE, re.sub(BLOCK, "", PAGE, flags=re.DOTALL))
    readme = (ROOT / "README.md").read_text().split("On photos")[1]
    assert "docs/images/claims.svg" in readme
    assert not re.findall(DIFFERENCE, readme)


def test_the_picture_shows_the_differences_that_decide():
    """The text of its marks, for screen readers, has their numbers."""
    drawn = re.findall(r'aria-label="mean: ([^;]+); row: ([^;]+); word: ([^"]+)"', EVIDENCE["PICTURE"].read_text())
    panels = EVIDENCE["panels"]()
    assert len(panels) == 5
    chosen = [claim for claim in EVIDENCE["GIVEN"]["claims"] if "short" in claim]
    assert sum(map(len, panels.values())) == sum(len(claim["pairs"]) for claim in chosen)  # no two have one name
    expected = [(name, found.word, 100 * found.mean) for each in panels.values() for name, found in each.items()]
    assert [(html.unescape(name), word) for _, name, word in drawn] == [one[:2] for one in expected]
    assert [float(mean.replace("−", "-")) for mean, _, _ in drawn] == pytest.approx(
        [one[2] for one in expected], abs=1e-6
    )


def test_every_table_and_claim_is_shown():
    named = re.findall(r"<!-- evidence: (.*?) -->", PAGE)
    assert sorted(named) == sorted(["claims", "images", *(table["name"] for table in EVIDENCE["GIVEN"]["tables"])])
    assert {claim["paper"] for claim in EVIDENCE["GIVEN"]["claims"]} == {"pFedPT", "SGPT", "ATPFL", "pFedPG", "DP2FL"}
    for claim in EVIDENCE["GIVEN"]["claims"]:
        assert ("pairs" in claim) != ("verdict" in claim), claim["claim"]
        assert "verdict" not in claim or "numbers" in claim


@pytest.mark.parametrize(
    ("intervals", "word"),
    [
        ([(0.01, 0.03)], "found"),
        ([(0.01, 0.03), (0.02, 0.03)], "found"),
        ([(-0.03, -0.01)], "not found"),
        ([(-0.01, 0.03)], "cannot be told"),
        ([(-0.01, 0.03), (0.01, 0.03)], "found in 1 of 2"),
        ([(-0.01, 0.03), (-0.03, -0.01), (0.01, 0.03)], "found in 1 of 3, not found in 1 of 3"),
    ],
)
def test_the_verdict_follows_from_the_intervals(intervals, word):
    assert EVIDENCE["verdict"](told(*each) for each in intervals) == word


def test_a_row_is_level_with_another_if_the_whole_interval_is_within_the_limit():
    near, far = told(-0.004, 0.009), told(0.004, 0.011)
    assert EVIDENCE["verdict"]([near], within=1) == "found"
    assert EVIDENCE["verdict"]([far], within=1) == "cannot be told"
    assert EVIDENCE["verdict"]([near, far], within=1) == "found in 1 of 2"
    assert EVIDENCE["verdict"]([told(0.011, 0.02)], within=1) == "not found"


def test_a_difference_is_bold_if_it_is_told_apart_and_marked_if_it_has_one_seed():
    assert EVIDENCE["shown"](told(0.01, 0.03)) == "**+2.0 [+1.0, +3.0]**"
    assert EVIDENCE["shown"](told(-0.01, 0.03, seeds=1)) == "+1.0 [-1.0, +3.0]¹"


def test_a_difference_that_survives_the_correction_is_marked():
    """Benjamini and Hochberg's: the n-th smallest p-value of N is at most .05 n / N for some n at or above its own."""
    pairs = [tuple(pair[:4]) for claim in EVIDENCE["GIVEN"]["claims"] for pair in claim.get("pairs", ())]
    found = {pair: EVIDENCE["between"](*pair) for pair in pairs}
    apart = {pair for pair, one in found.items() if not one.low <= 0 <= one.high}
    surviving = EVIDENCE["surviving"]()
    assert set() < surviving < apart
    weakest = min(abs(one.mean) / (one.high - one.low) for pair, one in found.items() if pair in surviving)
    assert weakest > max(abs(one.mean) / (one.high - one.low) for pair, one in found.items() if pair not in surviving)
    p = math.erfc(2 * NormalDist().inv_cdf(0.975) * weakest / math.sqrt(2))  # two-sided
    assert 0.5 * 0.05 * len(surviving) / len(found) < p <= 0.05 * len(surviving) / len(found)
    lines = [EVIDENCE["claim"](claim)[2] for claim in EVIDENCE["GIVEN"]["claims"] if "pairs" in claim]
    assert sum(line.count("**†") + line.count("**¹†") for line in lines) >= len(surviving)
    assert not any("]†" in line or "]¹†" in line for line in lines)


def test_a_row_that_is_not_kept_is_named():
    with pytest.raises(SystemExit, match='office-domain has no row "SGTP"'):
        EVIDENCE["between"]("office-domain", "pFedPG", "SGTP", "local")
